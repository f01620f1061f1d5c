"""fedloom doctor: is this machine ready, and does a recipe contain a known pitfall?"""

import importlib.util
import os
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Options, verb
from .output import RUN_FAILED, Exit, columns

Finding = tuple[str, str, str]
"""(name, "ok" or "warn", detail)"""

EXTRAS = {
    "flower": "flwr", "export": "onnx", "track": "tensorboard", "wandb": "wandb", "privacy": "dp_accounting",
    "hf": "datasets", "lora": "peft", "tune": "optuna", "fast": "numba", "metrics": "torchmetrics",
}  # fmt: skip


@verb("sets", "data_dir", "device", "files", "format")
def doctor(
    options: Options, recipe: Annotated[Path | None, typer.Argument(help="A recipe to examine as well.")] = None
) -> None:
    """Show what this machine has and what to watch out for in a recipe; with --device alone, test that device."""
    if options.device is not None and recipe is None:
        _test_device(options, options.device)
        return
    findings = _machine() + _data(options.data)
    if recipe is not None:
        findings += _recipe(options, recipe)
    options.show(
        [{"name": name, "state": state, "detail": detail} for name, state, detail in findings],
        columns(("what", "", ""), findings),
    )


def _test_device(options: Options, name: str) -> None:
    """Every method on a device against the CPU: a table to paste into a bug report."""
    from ..placement import resolve_device
    from ..recipe.errors import recipe_error
    from ..runs.loop import single_thread
    from ..testing.device_check import check_device

    assert options.registries is not None  # a file of --with may register a device
    try:
        device = resolve_device(name)
    except ValueError as error:
        raise recipe_error("--device", "DEVICE_MISSING", str(error), "fedloom doctor shows what there is") from None
    with single_thread():
        report = check_device(device)
    records = report.records()
    table = columns(list(records[0]), [[str(cell) for cell in record.values()] for record in records])
    options.show(report.to_dict(), f"{report.title}\n{table}")
    if not report.passed:
        raise Exit(RUN_FAILED)


def _machine() -> list[Finding]:
    import torch

    from ..engines.hardware import find_hardware

    extras = [name for name, module in EXTRAS.items() if importlib.util.find_spec(module)]
    writable = os.access(Path.cwd(), os.W_OK)
    return [
        ("python", "ok", platform.python_version()),
        ("torch", "ok", torch.__version__),
        ("trains on", "ok", str(find_hardware())),
        ("cores", "ok", str(os.cpu_count())),
        (
            "folder for runs",
            "ok" if writable else "warn",
            f"{Path.cwd() / 'runs'}{'' if writable else ' cannot be written'}",
        ),
        ("extras", "ok", ", ".join(extras) or "none installed"),
    ]


def _data(folder: Path) -> list[Finding]:
    if not folder.is_dir():
        return [("data", "ok", f"bundled data sets only: there is no {folder} (FEDLOOM_DATA or --data-dir)")]
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() or path.suffix == ".npz")
    return [("data", "ok", f"{folder}: {', '.join(names) or 'empty'}")]


def _recipe(options: Options, recipe: Path) -> list[Finding]:
    from ..runs.build import build
    from ..runs.data import read_data_spec

    loaded = options.load(recipe)
    fleet, _ = build(loaded, options.registries, read_data_spec(loaded, options.registries, options.data))
    return [
        ("recipe", "ok", str(recipe)),
        *_batch_norm(loaded.recipe, fleet),
        *_scaler(fleet),
        *_blocks(loaded.recipe, fleet),
        *_shares(fleet),
    ]


def _batch_norm(recipe: Any, fleet: Any) -> list[Finding]:
    if not fleet.global_model.statistics():
        return []
    query = recipe.evaluation.statistics.get("query", "pooled")
    if query == "pooled":
        return [("batch norm", "warn", "statistics are pooled over all data, which only a simulation can do; "
                 'a deployment needs evaluation.statistics.query = "per_device"')]  # fmt: skip
    if fleet.size < 10:
        return [("batch norm", "warn", "fewer than 10 devices: their statistics reveal a lot; use group norm")]
    return [("batch norm", "ok", "statistics from devices' own sums")]


def _scaler(fleet: Any) -> list[Finding]:
    """The scaler acts in training only. Without a norm layer after it, activations of a narrow slice have another scale
    in evaluation than in training."""
    settings = [tier.model.full_settings() for tier in fleet.tiers]
    unnormalized = any(tier.get("normalization") == "none" and tier.get("scaler") for tier in settings)
    if not unnormalized or len({tier.get("width") for tier in settings}) == 1:
        return []
    return [("scaler", "warn", "without a norm layer narrow tiers are evaluated unscaled; set scaler = false")]


def _blocks(recipe: Any, fleet: Any) -> list[Finding]:
    """Whether several devices of a tier run as one network, tried on random examples."""
    findings = []
    for tier in fleet.tiers if recipe.engine.devices_per_block != 1 else ():
        one_by_one, reasons = tier.model.one_by_one_reason(), tier.model.fallback_reasons()
        if one_by_one:
            finding = ("warn", f"trains one device at a time, which is slower: {one_by_one}")
        elif reasons and not tier.model.is_folded():
            finding = ("ok", f"many devices run at once by vmap, which is slower than folding; {'; '.join(reasons)}")
        elif reasons:
            finding = ("ok", f"many devices run as one network, by torch; {'; '.join(reasons)}")
        else:
            finding = ("ok", "many devices run as one network")
        findings.append((f"tier {tier.name}", *finding))
    return findings


def _shares(fleet: Any) -> list[Finding]:
    used = {fleet.device(index, 1).tier for index in range(fleet.size)}
    empty = [tier.name for tier in fleet.tiers if tier.name not in used]
    return (
        [("tiers", "warn", f"no device in {', '.join(empty)}: the fleet is too small for its share")] if empty else []
    )

"""fedloom probe: what this machine can do, for fleet planning."""

import math
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, verb
from .output import columns

if TYPE_CHECKING:
    from ..analysis.planning import DeviceSpec


BYTES = {"memory": "memory free", "memory_total": "memory", "disk_free": "disk free"}


@verb("sets", "data_dir", "files", "format")
def probe(
    options: Options,
    recipe: Annotated[Path | None, typer.Argument(help="Train this recipe's models; default: a small net.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the machine; default: the host name.")] = None,
    bandwidth: Annotated[float | None, typer.Option("--bandwidth", help="Bytes per second; not measured.")] = None,
    deadline: Annotated[float | None, typer.Option("--deadline", help="Seconds a round may take.")] = None,
) -> None:
    """Measure this machine: free memory, disk, training speed. `plan --fleet` reads what --format json prints."""
    from ..analysis.planning import system_info

    measured = asdict(_measure(options, recipe, name or platform.node() or "this"))
    values = {key: value for key, value in measured.items() if value not in (None, {}) and value != math.inf}
    limits = {"bandwidth": bandwidth, "deadline": deadline}
    values |= {key: value for key, value in limits.items() if value is not None}
    values |= system_info()
    options.show(values, columns(("what", ""), _rows(values)))


def _measure(options: Options, recipe: Path | None, name: str) -> "DeviceSpec":
    from ..analysis.planning import probe

    if recipe is None:
        return probe(name, {})
    from ..recipe.validation import instantiate
    from ..runs.build import build_models
    from ..runs.data import read_data_spec

    loaded, registries = options.load(recipe), options.registries
    training = loaded.recipe.training
    models = dict(build_models(loaded, registries, read_data_spec(loaded, registries, options.data)))
    return probe(name, models, training.batch_size, instantiate(options.registries.optimizers, training.optimizer)())


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for key, value in values.items():
        if key == "speeds":
            rows += [(f"  tier {tier}", f"{speed:.3g}") for tier, speed in value.items()]
        elif key == "speed":
            rows.append(("trains", f"{value:.3g} multiply-adds per second, on one thread"))
        elif key in BYTES:
            rows.append((BYTES[key], f"{value / 1e9:.2f} GB"))
        else:
            rows.append((key, str(value)))
    return rows

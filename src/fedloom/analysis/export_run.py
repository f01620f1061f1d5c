"""Export a finished run's model: write the file, open it in its own runtime, compare it with the run's model, and
describe it in a model card."""

import hashlib
import math
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..data.catalog import LICENSES
from ..exporting import (
    FORMATS,
    ExportModule,
    InputKind,
    Parity,
    Predictor,
    as_lists,
    as_predictor,
    build_empty_module,
    build_export_module,
    build_preparation,
    check_parity,
    describe_input,
    evaluate_examples,
    evaluate_predictor,
    input_transform,
    measure_latency_ms,
    read_card,
    read_description,
    rebuild_model,
    rebuild_preparation,
    write_card,
)
from ..exporting.card import OUTPUT_MEANINGS
from ..exporting.parity import COMPARED, TIMED
from ..methods import headline_test
from ..models import Family, compute_cost
from ..recipe.errors import recipe_error
from ..recipe.paths import require_place
from ..recipe.registries import Registries
from ..registry import suggest
from ..results import Record, Result
from ..runs.experiment import Experiment
from ..runs.folder import read_manifest
from ..runs.loop import single_thread
from ..runs.resume import open_finished_run
from .trained import ModelSelector, TrainedModel, select_model


class ParityError(Exception):
    """An exported file whose output differs from the run's model."""

    def __init__(self, parity: Parity, folder: Path):
        super().__init__(
            f"the exported file differs from the run's model by {parity.difference:.1e}, more than {parity.bound:.1e}"
        )
        self.hint = f"it was removed from {folder}; try another format"


@dataclass(frozen=True, repr=False)
class ExportResult(Result):
    """An exported model.

    Parameters
    ----------
    folder : that holds the file, its card and the recipe.
    card : what the model is, takes and returns, and how it was evaluated.
    """

    folder: Path
    card: Mapping[str, Any]

    @property
    def file(self) -> Path:
        """The model."""
        return self.folder / str(self.card["file"])

    @property
    def title(self) -> str:
        return f"{self.card['name']}: {self.file}"

    def records(self) -> list[Record]:
        facts = {name: self.card[name] for name in ("format", "bytes", "parameters", "macs", "sha256")}
        return [{**facts, "largest_difference": self.card["parity"]["difference"]}]

    def content(self) -> dict[str, Any]:
        return {"folder": str(self.folder), **self.card}


def export(
    run: Path,
    selector: ModelSelector,
    to: str,
    out: Path | None,
    input_kind: InputKind,
    registries: Registries,
    data: Path,
) -> ExportResult:
    """Export a model of a run to the format `to`; nothing is left behind if that fails."""
    formats = registries.export_formats
    if to not in formats:
        raise recipe_error("--to", "FORMAT_NAME", f"there is no format {to!r}", suggest(to, formats))
    formats[to].require(to)
    experiment = open_finished_run(run, registries, data)
    with single_thread():
        trained = select_model(run, experiment, selector, registries, data)
        folder = run / "exports" / f"{trained.name}-{to}" if out is None else out
        if folder.exists():
            raise recipe_error(folder, "OUT_EXISTS", f"{folder} already exists", "choose another --out")
        require_place(folder)
        folder.mkdir(parents=True)
        try:
            return _export(run, experiment, trained, to, folder, input_kind, registries)
        except BaseException:
            shutil.rmtree(folder)
            raise


def load_model(
    run: Path, selector: ModelSelector, registries: Registries, data: Path, input_kind: InputKind = "stored"
) -> ExportModule:
    """The module that `export` would write."""
    experiment = open_finished_run(run, registries, data)
    return _build_module(experiment, select_model(run, experiment, selector, registries, data), input_kind)


def load_exported(path: Path, registries: Registries) -> nn.Module:
    """Load a module from a folder that was exported to safetensors, or from a safetensors file that describes itself.

    A file next to its card is the folder's; `fedloom subnet` and runs write files that describe themselves.
    """
    if path.suffix == ".safetensors" and path.is_file():
        has_card = (path.parent / "card.json").is_file() and read_card(path.parent)["file"] == path.name
        if not has_card:
            return _load_described(path, registries)
        path = path.parent
    if not (path / "card.json").is_file():
        raise recipe_error(path, "EXPORT_FOLDER", "this is not an exported model", _loading_hint(path))
    card = read_card(path)
    if card["format"] != "safetensors":
        message = f"this is {card['format']}, which needs no fedloom"
        raise recipe_error(path, "EXPORT_FORMAT", message, "see its card.md")
    module = FORMATS["safetensors"].open(path / card["file"], lambda: rebuild_module(card, registries))
    assert isinstance(module, nn.Module)
    return module


def _loading_hint(path: Path) -> str:
    if not path.exists():
        return "there is no such file or folder"
    if (path / "manifest.json").is_file():
        return f"it is the folder of a run: fl.open_run({str(path)!r}).model(TIER)"
    return "fedloom export RUN --to safetensors writes a folder, fedloom subnet RUN --out FILE.safetensors a file"


def _load_described(file: Path, registries: Registries) -> nn.Module:
    try:
        described = read_description(file)
    except (SafetensorError, ValueError) as error:
        raise recipe_error(file, "MODEL_FILE", f"this file cannot be read: {error}") from error
    if described is None:
        message = "this file does not say which model its weights belong to"
        raise recipe_error(file, "MODEL_FILE", message, _loading_hint(file))
    family = _find_family(described, file, registries)
    model = rebuild_model(described, family, described["output"]["classes"])
    return build_export_module(model, load_file(file), rebuild_preparation(described))


def _find_family(described: Mapping[str, Any], source: Path | str, registries: Registries) -> Family:
    name = described["family"]
    if name in registries.models:
        return registries.models[name]
    files = described.get("with_files", ())
    made_with = ", ".join(f"{file['name']} (sha256 {file['sha256'][:12]}…)" for file in files)
    message = f"there is no model family {name!r}" + (f"; this model was made with {made_with}" if files else "")
    raise recipe_error(
        source, "MODEL_NAME", message, "pass the file that adds it with --with; in Python extensions=[…]"
    )


def rebuild_module(card: Mapping[str, Any], registries: Registries) -> ExportModule:
    """The module that a card describes, without weights."""
    net = rebuild_model(card, _find_family(card, card["file"], registries), card["output"]["shape"][-1])
    return build_empty_module(net, rebuild_preparation(card))


def _export(
    run: Path, experiment: Experiment, trained: TrainedModel, to: str, folder: Path, input_kind: InputKind,
    registries: Registries,
) -> ExportResult:  # fmt: skip
    format, dataset, transform = (
        registries.export_formats[to],
        experiment.dataset,
        input_transform(experiment.dataset, input_kind),
    )
    file, example = folder / f"model{format.suffix}", transform(dataset.test.x[:1])
    format.write(_build_module(experiment, trained, input_kind), example.repeat(2, *[1] * (example.dim() - 1)), file)
    card = _build_card(run, experiment, trained, to, file, input_kind)
    predictor = format.open(file, lambda: rebuild_module(card, registries))
    stored = dataset.test.x[:COMPARED]
    reference, prepared = as_predictor(trained.model, trained.weights), dataset.preparation(stored)
    parity = check_parity(predictor, transform(stored), reference, prepared, format.one_at_a_time)
    if not parity.is_within_bound:
        raise ParityError(parity, folder)
    card |= {
        "parity": {**asdict(parity), "bound": parity.bound},
        "measured": _evaluate(experiment, trained, predictor, transform, format.one_at_a_time),
        "latency": {
            "median_ms": measure_latency_ms(predictor, example), "runs": TIMED, "batch": 1, "threads": 1,
            "runtime": format.runtime_version, "machine": platform.machine(),
        },
    }  # fmt: skip
    shutil.copyfile(run / "recipe.toml", folder / "recipe.toml")
    if dataset.vocabulary:
        (folder / "vocabulary.txt").write_text("\n".join(dataset.vocabulary) + "\n", encoding="utf-8")
    write_card(folder, card)
    return ExportResult(folder, card)


def _build_module(experiment: Experiment, trained: TrainedModel, input_kind: InputKind) -> ExportModule:
    dataset = experiment.dataset
    preparation = build_preparation(dataset.preparation, dataset.test.x[:1]) if input_kind == "stored" else None
    return build_export_module(trained.model, trained.weights, preparation, dataset.class_names)


def _evaluate(
    experiment: Experiment, trained: TrainedModel, predictor: Predictor, transform: Callable[[Tensor], Tensor],
    one_at_a_time: bool,
) -> dict[str, dict[str, float | None]]:  # fmt: skip
    """With the batch size of the run's evaluator, since some models depend on the batch; those also one by one."""
    dataset, batch_size = experiment.dataset, 1 if one_at_a_time else experiment.evaluator.batch_size
    results = {"global": evaluate_predictor(predictor, dataset, transform, batch_size)}
    if trained.model.is_batch_dependent() and not one_at_a_time:
        results["global, one example at a time,"] = evaluate_predictor(predictor, dataset, transform, 1)
    if trained.local_tests is not None and len(trained.local_tests):
        x, y = dataset.test.x[trained.local_tests], dataset.test.y[trained.local_tests]
        batch_size = 1 if one_at_a_time else experiment.evaluator.device_batch_size(trained.model)
        results["local"] = evaluate_examples(predictor, transform(x), y, batch_size, dataset.task)
    headline = headline_test("personalized" if trained.device else "global", results)
    ordered = sorted(results.items(), key=lambda one: one[0] != headline)
    return {test: _finite(metrics) for test, metrics in ordered}


def _build_card(
    run: Path, experiment: Experiment, trained: TrainedModel, to: str, file: Path, input_kind: InputKind
) -> dict[str, Any]:
    recipe, costs, shape = experiment.loaded.recipe, compute_cost(trained.model), _output_shape(trained)
    labels, manifest = experiment.dataset.class_names, read_manifest(run)
    owner = f"device {trained.device}" if trained.device else f"tier {trained.tier}" if trained.tier else trained.name
    return {
        "name": f"{trained.model.family} of {owner}, {recipe.method.name} on {recipe.data.dataset}",
        "file": file.name, "format": to, "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "tier": trained.tier, "device": trained.device, "candidate": trained.candidate,
        "family": trained.model.family, "settings": as_lists(dict(trained.model.settings)),
        "parameters": costs.parameters, "trained_parameters": costs.trained_parameters,
        "macs": costs.macs, "uncounted_operations": list(costs.uncounted),
        "input": describe_input(experiment.dataset, input_kind),
        "output": {
            "name": "logits", "shape": shape, "task": experiment.dataset.task.kind,
            "meaning": OUTPUT_MEANINGS[experiment.dataset.task.family],
            "labels": list(labels) if len(labels) == trained.model.classes else [],
        },
        "evaluated": {
            "round": trained.round, "tests": {test: _finite(metrics) for test, metrics in trained.metrics.items()},
        },
        "training": {
            "method": recipe.method.name, "paper": experiment.method.info.paper,
            "uploads": experiment.method.info.uploads, "dataset": recipe.data.dataset, "data_sha256": manifest["data"],
            "devices": recipe.data.devices, "rounds": recipe.rounds, "seed": recipe.seed, "recipe": "recipe.toml",
            "run_sha256": manifest.get("sha256"), "fedloom": manifest.get("fedloom"), "torch": manifest.get("torch"),
        },
        "license": {
            "data": LICENSES.get(recipe.data.dataset, "unknown; see where the data came from"),
            "code": "Apache-2.0",
            "weights": "to be chosen by those who trained them",
        },
        "warnings": _warnings(trained),
    }  # fmt: skip


def _output_shape(trained: TrainedModel) -> list[int]:
    with torch.no_grad():
        return list(as_predictor(trained.model, trained.weights)(trained.model.zero_inputs(2)).shape[1:])


def _warnings(trained: TrainedModel) -> list[str]:
    warnings = []
    if trained.model.is_batch_dependent():
        warnings.append("Its normalization uses the statistics of the batch: predictions depend on the other examples.")
    if not trained.is_trained:
        warnings.append("This size was not trained: it is a slice of the trained model, between the tiers' sizes.")
    if trained.device:
        warnings.append(f"Personalized for device {trained.device}; it may not suit the data of other devices.")
    return warnings


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """NaN and infinity become None: JSON cannot express them."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}

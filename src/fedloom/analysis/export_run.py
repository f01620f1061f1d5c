"""A finished run's model as a file that runs elsewhere: written, opened again in its own runtime, compared with the
model that the run judged, measured anew, and told of in a card.

What a run knows of one of its models, as the words of a model card.

An exported file of weights as a module again: the card beside it says which.
"""

import hashlib
import math
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Preparation
from ..data.catalog import LABELS, LICENSES
from ..export import (
    FORMATS,
    ExportModule,
    Parity,
    Predictor,
    as_predictor,
    build_empty_module,
    build_export_module,
    build_preparation,
    check_parity,
    evaluate_predictor,
    measure_accuracy,
    measure_latency_ms,
    read_card,
    write_card,
)
from ..export.parity import COMPARED, TIMED
from ..models import cost, model
from ..recipe.errors import recipe_error, suggest
from ..recipe.registry import Registry
from ..runs.build import Experiment
from ..runs.folder import read_manifest
from ..runs.loop import one_thread
from .select_model import InputKind, ModelSelector, TrainedModel, open_finished_run, select_model, wrong

LASTING = ("mean", "std", "size", "channels")  # what of a preparation is there outside of training too


def input_transform(experiment: Experiment, input_kind: InputKind) -> Callable[[Tensor], Tensor]:
    """What a file takes, of stored examples."""
    return (lambda x: x) if input_kind == "stored" else experiment.dataset.preparation


def build_card(run: Path, experiment: Experiment, chosen: TrainedModel, to: str, file: Path, input_kind: InputKind) -> dict[str, Any]:
    recipe, spent, shape = experiment.loaded.recipe, cost(chosen.model), _output_shape(chosen)
    labels = LABELS.get(recipe.data.dataset, ())
    who = f"device {chosen.device}" if chosen.device else f"tier {chosen.tier}" if chosen.tier else chosen.name
    return {
        "name": f"{chosen.model.family} of {who}, {recipe.method.name} on {recipe.data.dataset}",
        "file": file.name, "format": to, "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "tier": chosen.tier, "device": chosen.device, "candidate": chosen.candidate,
        "family": chosen.model.family, "settings": _to_json(dict(chosen.model.settings)),
        "parameters": spent.parameters, "macs": spent.macs,
        "input": _input(experiment, input_kind),
        "output": {"name": "logits", "shape": shape, "labels": list(labels) if len(labels) == shape[-1] else []},
        "evaluated": {
            "round": chosen.round,
            "tests": {test: {k: finite_or_none(v) for k, v in one.items()} for test, one in chosen.judged.items()},
        },
        "training": _training(run, experiment),
        "license": _licence(recipe.data.dataset),
        "warnings": _warnings(chosen),
    }  # fmt: skip


def _input(experiment: Experiment, input_kind: InputKind) -> dict[str, Any]:
    dataset = experiment.dataset
    example = input_transform(experiment, input_kind)(dataset.test.x[:1])
    steps = {name: value for name, value in asdict(dataset.preparation).items() if name in LASTING and value}
    if dataset.tokens is not None:
        said = f"Ids of {dataset.tokens} tokens" + (", which vocabulary.txt lists." if dataset.vocabulary else ".")
    elif input_kind == "stored":
        said = "Examples as the data set stores them; scaling, resizing and normalization are inside the file."
    else:
        said = f"Examples divided by 255 and then prepared by whoever calls: {_to_json(steps) or 'nothing else'}."
    return {
        "name": "input", "kind": input_kind, "dtype": str(example.dtype).removeprefix("torch."),
        "shape": list(example.shape[1:]), "meaning": said, "preparation": _to_json(steps),
        "stored_dtype": str(dataset.test.x.dtype).removeprefix("torch."),
        "stored_shape": list(dataset.test.x.shape[1:]),
        "model_shape": list(dataset.input_shape), "tokens": dataset.tokens,
    }  # fmt: skip


def _output_shape(chosen: TrainedModel) -> list[int]:
    with torch.no_grad():
        return list(as_predictor(chosen.model, chosen.weights)(chosen.model.zero_inputs(2)).shape[1:])


def _training(run: Path, experiment: Experiment) -> dict[str, Any]:
    recipe, said = experiment.loaded.recipe, read_manifest(run)
    return {
        "method": recipe.method.name, "paper": experiment.method.info.paper, "uploads": experiment.method.info.uploads,
        "dataset": recipe.data.dataset, "data_sha256": said["data"], "devices": recipe.data.devices,
        "rounds": recipe.rounds, "seed": recipe.seed, "recipe": "recipe.toml", "run_sha256": said.get("sha256"),
        "fedloom": said.get("fedloom"), "torch": said.get("torch"),
    }  # fmt: skip


def _licence(dataset: str) -> dict[str, str]:
    return {
        "data": LICENSES.get(dataset, "not known to fedloom; ask where it came from"),
        "code": "Apache-2.0",
        "weights": "for whoever trained them to say",
    }


def _warnings(chosen: TrainedModel) -> list[str]:
    found = []
    if chosen.model.is_batch_dependent():
        found.append("Its norms look at the whole batch: an example alone gets another answer than among others.")
    if chosen.device:
        found.append(f"Trained to suit device {chosen.device}; others' examples may be unlike its own.")
    return found


def finite_or_none(value: float) -> float | None:
    """JSON has no word for other numbers."""
    return value if math.isfinite(value) else None


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_json(one) for key, one in value.items()}
    return [_to_json(one) for one in value] if isinstance(value, list | tuple) else value


def load_exported(folder: Path, registry: Registry) -> nn.Module:
    """A module from a folder that was exported to safetensors."""
    if not (folder / "card.json").is_file():
        raise wrong(folder, "EXPORT_FOLDER", "this is no exported model", "fedloom export RUN --to safetensors")
    card = read_card(folder)
    if card["format"] != "safetensors":
        raise wrong(folder, "EXPORT_FORMAT", f"this is {card['format']}, which needs no fedloom", "see its card.md")
    answer = FORMATS["safetensors"].open(folder / card["file"], lambda: rebuild_module(card, registry))
    assert isinstance(answer, nn.Module)
    return answer


def rebuild_module(card: Mapping[str, Any], registry: Registry) -> ExportModule:
    """The module of a card, without weights."""
    said, family = card["input"], card["family"]
    if family not in registry.models:
        raise wrong(Path(card["file"]), "MODEL_NAME", f"there is no model family {family!r}", "name it in models={…}")
    settings = {name: _tuples(value) for name, value in card["settings"].items()}
    net = model(
        family, registry.models[family], settings, tuple(said["model_shape"]), card["output"]["shape"][-1], said["tokens"]
    )
    steps = {name: _tuples(value) for name, value in said["preparation"].items()}
    stored = torch.zeros(1, *said["stored_shape"], dtype=getattr(torch, said["stored_dtype"]))
    return build_empty_module(net, build_preparation(Preparation(**steps), stored) if said["kind"] == "stored" else None)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class ParityError(Exception):  # noqa: N818 - named for what is wrong
    """An exported file that does not make what the run's model makes."""

    def __init__(self, found: Parity, folder: Path):
        super().__init__(
            f"the exported file differs from the run's model by {found.difference:.1e}, more than {found.bound:.1e}"
        )
        self.hint = f"it was removed from {folder}; try another format"


@dataclass(frozen=True)
class ExportResult:
    folder: Path
    card: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / str(self.card["file"])


def export(
    run: Path, selector: ModelSelector, to: str, out: Path | None, input_kind: InputKind, registry: Registry, data: Path
) -> ExportResult:
    if to not in FORMATS:
        raise recipe_error("--to", "FORMAT_NAME", f"there is no format {to!r}", suggest(to, FORMATS))
    FORMATS[to].require(to)
    experiment = open_finished_run(run, registry, data)
    with one_thread():
        chosen = select_model(run, experiment, selector, registry, data)
        folder = run / "exports" / f"{chosen.name}-{to}" if out is None else out
        if folder.exists():
            raise wrong(folder, "OUT_EXISTS", f"{folder} is there already", "say another --out")
        folder.mkdir(parents=True)
        try:
            return _exported(run, experiment, chosen, to, folder, input_kind, registry)
        except BaseException:
            shutil.rmtree(folder)
            raise


def load_model(run: Path, selector: ModelSelector, registry: Registry, data: Path, input_kind: InputKind = "stored") -> ExportModule:
    """The same without a file."""
    experiment = open_finished_run(run, registry, data)
    return _module(experiment, select_model(run, experiment, selector, registry, data), input_kind)


def _exported(
    run: Path, experiment: Experiment, chosen: TrainedModel, to: str, folder: Path, input_kind: InputKind, registry: Registry
) -> ExportResult:
    kind, dataset, shown = FORMATS[to], experiment.dataset, input_transform(experiment, input_kind)
    file, example = folder / f"model{kind.suffix}", shown(dataset.test.x[:1])
    kind.write(_module(experiment, chosen, input_kind), example.repeat(2, *[1] * (example.dim() - 1)), file)
    card = build_card(run, experiment, chosen, to, file, input_kind)
    answer = kind.open(file, lambda: rebuild_module(card, registry))
    few = dataset.test.x[:COMPARED]
    right, inputs = as_predictor(chosen.model, chosen.weights), dataset.preparation(few)
    same = check_parity(answer, shown(few), right, inputs, kind.one_at_a_time)
    if not same.is_within_bound:
        raise ParityError(same, folder)
    card |= {
        "parity": {**asdict(same), "bound": same.bound},
        "measured": _measured(experiment, chosen, answer, shown, kind.one_at_a_time),
        "latency": {
            "median_ms": measure_latency_ms(answer, example), "runs": TIMED, "batch": 1, "threads": 1,
            "runtime": kind.runtime_version, "machine": platform.machine(),
        },
    }  # fmt: skip
    shutil.copyfile(run / "recipe.toml", folder / "recipe.toml")
    if dataset.vocabulary:
        (folder / "vocabulary.txt").write_text("\n".join(dataset.vocabulary) + "\n", encoding="utf-8")
    write_card(folder, card)
    return ExportResult(folder, card)


def _module(experiment: Experiment, chosen: TrainedModel, input_kind: InputKind) -> ExportModule:
    dataset = experiment.dataset
    prepare = build_preparation(dataset.preparation, dataset.test.x[:1]) if input_kind == "stored" else None
    return build_export_module(chosen.model, chosen.weights, prepare)


def _measured(
    experiment: Experiment, chosen: TrainedModel, answer: Predictor, shown: Callable[[Tensor], Tensor], alone: bool
) -> dict[str, dict[str, float | None]]:
    """In batches as large as the judge's, for who looks at the whole batch; and of such, also one by one."""
    dataset, size = experiment.dataset, 1 if alone else experiment.evaluator.batch_size
    found = {"global": evaluate_predictor(answer, dataset, shown, size)}
    if chosen.model.is_batch_dependent() and not alone:
        found["global, one example at a time,"] = evaluate_predictor(answer, dataset, shown, 1)
    if chosen.own_tests is not None and len(chosen.own_tests):
        x, y = dataset.test.x[chosen.own_tests], dataset.test.y[chosen.own_tests]
        size = 1 if alone else experiment.evaluator.device_batch_size(chosen.model)
        found["local"] = {"accuracy": measure_accuracy(answer, shown(x), y, size)}
    return {test: {name: finite_or_none(value) for name, value in metrics.items()} for test, metrics in found.items()}

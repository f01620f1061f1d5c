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
    Answer,
    Parity,
    Plain,
    accuracy_on,
    functional,
    latency_ms,
    measured,
    parity,
    plain,
    preparing,
    read_card,
    unfilled,
    write_card,
)
from ..export.parity import COMPARED, TIMED
from ..models import cost, model
from ..recipe.errors import RecipeError, RecipeIssue, nearest
from ..recipe.registry import Registry
from ..runs.build import Experiment
from ..runs.folder import read_manifest
from ..runs.loop import one_thread
from .trained import Input, ModelSelector, Trained, finished, trained, wrong

LASTING = ("mean", "std", "size", "channels")  # what of a preparation is there outside of training too


def taken(experiment: Experiment, given: Input) -> Callable[[Tensor], Tensor]:
    """What a file takes, of stored examples."""
    return (lambda x: x) if given == "stored" else experiment.dataset.preparation


def about(run: Path, experiment: Experiment, chosen: Trained, to: str, file: Path, given: Input) -> dict[str, Any]:
    recipe, spent, shape = experiment.loaded.recipe, cost(chosen.model), _output_shape(chosen)
    labels = LABELS.get(recipe.data.dataset, ())
    who = f"device {chosen.device}" if chosen.device else f"tier {chosen.tier}" if chosen.tier else chosen.name
    return {
        "name": f"{chosen.model.family} of {who}, {recipe.method.name} on {recipe.data.dataset}",
        "file": file.name, "format": to, "bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "tier": chosen.tier, "device": chosen.device, "candidate": chosen.candidate,
        "family": chosen.model.family, "settings": _plain(dict(chosen.model.settings)),
        "parameters": spent.parameters, "macs": spent.macs,
        "input": _input(experiment, given),
        "output": {"name": "logits", "shape": shape, "labels": list(labels) if len(labels) == shape[-1] else []},
        "judged": {
            "round": chosen.round,
            "tests": {test: {k: finite(v) for k, v in one.items()} for test, one in chosen.judged.items()},
        },
        "training": _training(run, experiment),
        "license": _licence(recipe.data.dataset),
        "warnings": _warnings(chosen),
    }  # fmt: skip


def _input(experiment: Experiment, given: Input) -> dict[str, Any]:
    dataset = experiment.dataset
    example = taken(experiment, given)(dataset.test.x[:1])
    steps = {name: value for name, value in asdict(dataset.preparation).items() if name in LASTING and value}
    if dataset.tokens is not None:
        said = f"Ids of {dataset.tokens} tokens" + (", which vocabulary.txt lists." if dataset.vocabulary else ".")
    elif given == "stored":
        said = "Examples as the data set stores them; scaling, resizing and normalization are inside the file."
    else:
        said = f"Examples divided by 255 and then prepared by whoever calls: {_plain(steps) or 'nothing else'}."
    return {
        "name": "input", "kind": given, "dtype": str(example.dtype).removeprefix("torch."),
        "shape": list(example.shape[1:]), "meaning": said, "preparation": _plain(steps),
        "stored_dtype": str(dataset.test.x.dtype).removeprefix("torch."),
        "stored_shape": list(dataset.test.x.shape[1:]),
        "model_shape": list(dataset.input_shape), "tokens": dataset.tokens,
    }  # fmt: skip


def _output_shape(chosen: Trained) -> list[int]:
    with torch.no_grad():
        return list(functional(chosen.model, chosen.weights)(chosen.model.blank(2)).shape[1:])


def _training(run: Path, experiment: Experiment) -> dict[str, Any]:
    recipe, said = experiment.loaded.recipe, read_manifest(run)
    return {
        "method": recipe.method.name, "paper": experiment.method.paper, "leaves": experiment.method.leaves,
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


def _warnings(chosen: Trained) -> list[str]:
    found = []
    if chosen.model.mixes_examples():
        found.append("Its norms look at the whole batch: an example alone gets another answer than among others.")
    if chosen.device:
        found.append(f"Trained to suit device {chosen.device}; others' examples may be unlike its own.")
    return found


def finite(value: float) -> float | None:
    """JSON has no word for other numbers."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def load_exported(folder: Path, tables: Registry) -> nn.Module:
    """A module from a folder that was exported to safetensors."""
    if not (folder / "card.json").is_file():
        raise wrong(folder, "EXPORT_FOLDER", "this is no exported model", "fedloom export RUN --to safetensors")
    card = read_card(folder)
    if card["format"] != "safetensors":
        raise wrong(folder, "EXPORT_FORMAT", f"this is {card['format']}, which needs no fedloom", "see its card.md")
    answer = FORMATS["safetensors"].open(folder / card["file"], lambda: rebuilt(card, tables))
    assert isinstance(answer, nn.Module)
    return answer


def rebuilt(card: Mapping[str, Any], tables: Registry) -> Plain:
    """The module of a card, without weights."""
    said, family = card["input"], card["family"]
    if family not in tables.models:
        raise wrong(Path(card["file"]), "MODEL_NAME", f"there is no model family {family!r}", "name it in models={…}")
    settings = {name: _tuples(value) for name, value in card["settings"].items()}
    net = model(
        family, tables.models[family], settings, tuple(said["model_shape"]), card["output"]["shape"][-1], said["tokens"]
    )
    steps = {name: _tuples(value) for name, value in said["preparation"].items()}
    stored = torch.zeros(1, *said["stored_shape"], dtype=getattr(torch, said["stored_dtype"]))
    return unfilled(net, preparing(Preparation(**steps), stored) if said["kind"] == "stored" else None)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


class NotTheSame(Exception):  # noqa: N818 - named for what is wrong
    """An exported file that does not make what the run's model makes."""

    def __init__(self, found: Parity, folder: Path):
        super().__init__(
            f"the exported file differs from the run's model by {found.difference:.1e}, more than {found.bound:.1e}"
        )
        self.hint = f"it was removed from {folder}; try another format"


@dataclass(frozen=True)
class Exported:
    folder: Path
    card: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / str(self.card["file"])


def export(
    run: Path, selector: ModelSelector, to: str, out: Path | None, given: Input, tables: Registry, data: Path
) -> Exported:
    if to not in FORMATS:
        raise RecipeError([RecipeIssue((), "FORMAT_NAME", f"there is no format {to!r}", nearest(to, FORMATS))], "--to")
    FORMATS[to].require(to)
    experiment = finished(run, tables, data)
    with one_thread():
        chosen = trained(run, experiment, selector, tables, data)
        folder = run / "exports" / f"{chosen.name}-{to}" if out is None else out
        if folder.exists():
            raise wrong(folder, "OUT_EXISTS", f"{folder} is there already", "say another --out")
        folder.mkdir(parents=True)
        try:
            return _exported(run, experiment, chosen, to, folder, given, tables)
        except BaseException:
            shutil.rmtree(folder)
            raise


def model_of(run: Path, selector: ModelSelector, tables: Registry, data: Path, given: Input = "stored") -> Plain:
    """The same without a file."""
    experiment = finished(run, tables, data)
    return _module(experiment, trained(run, experiment, selector, tables, data), given)


def _exported(
    run: Path, experiment: Experiment, chosen: Trained, to: str, folder: Path, given: Input, tables: Registry
) -> Exported:
    kind, dataset, shown = FORMATS[to], experiment.dataset, taken(experiment, given)
    file, example = folder / f"model{kind.suffix}", shown(dataset.test.x[:1])
    kind.write(_module(experiment, chosen, given), example.repeat(2, *[1] * (example.dim() - 1)), file)
    card = about(run, experiment, chosen, to, file, given)
    answer = kind.open(file, lambda: rebuilt(card, tables))
    few = dataset.test.x[:COMPARED]
    right, inputs = functional(chosen.model, chosen.weights), dataset.preparation(few)
    same = parity(answer, shown(few), right, inputs, kind.one_at_a_time)
    if not same.holds:
        raise NotTheSame(same, folder)
    card |= {
        "parity": {**asdict(same), "bound": same.bound},
        "measured": _measured(experiment, chosen, answer, shown, kind.one_at_a_time),
        "latency": {
            "median_ms": latency_ms(answer, example), "runs": TIMED, "batch": 1, "threads": 1,
            "runtime": kind.runtime_version, "machine": platform.machine(),
        },
    }  # fmt: skip
    shutil.copyfile(run / "recipe.toml", folder / "recipe.toml")
    if dataset.vocabulary:
        (folder / "vocabulary.txt").write_text("\n".join(dataset.vocabulary) + "\n", encoding="utf-8")
    write_card(folder, card)
    return Exported(folder, card)


def _module(experiment: Experiment, chosen: Trained, given: Input) -> Plain:
    dataset = experiment.dataset
    prepare = preparing(dataset.preparation, dataset.test.x[:1]) if given == "stored" else None
    return plain(chosen.model, chosen.weights, prepare)


def _measured(
    experiment: Experiment, chosen: Trained, answer: Answer, shown: Callable[[Tensor], Tensor], alone: bool
) -> dict[str, dict[str, float | None]]:
    """In batches as large as the judge's, for who looks at the whole batch; and of such, also one by one."""
    dataset, size = experiment.dataset, 1 if alone else experiment.evaluator.batch_size
    found = {"global": measured(answer, dataset, shown, size)}
    if chosen.model.mixes_examples() and not alone:
        found["global, one example at a time,"] = measured(answer, dataset, shown, 1)
    if chosen.own_tests is not None and len(chosen.own_tests):
        x, y = dataset.test.x[chosen.own_tests], dataset.test.y[chosen.own_tests]
        size = 1 if alone else experiment.evaluator.device_batch(chosen.model)
        found["local"] = {"accuracy": accuracy_on(answer, shown(x), y, size)}
    return {test: {name: finite(value) for name, value in metrics.items()} for test, metrics in found.items()}

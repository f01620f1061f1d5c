"""What a run knows of one of its models, as the words of a model card."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.meanings import LABELS, LICENCES
from ...export import functional
from ...models import cost
from ...reporting import read_manifest
from ..assembly.assemble import Experiment
from .trained import Trained
from .wanted import Input

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
        "licence": _licence(recipe.data.dataset),
        "warnings": _warnings(chosen),
    }  # fmt: skip


def _input(experiment: Experiment, given: Input) -> dict[str, Any]:
    dataset = experiment.dataset
    example = taken(experiment, given)(dataset.test.x[:1])
    steps = {name: value for name, value in asdict(dataset.preparation).items() if name in LASTING and value}
    if dataset.tokens is not None:
        said = f"Ids of {dataset.tokens} tokens" + (", which vocabulary.txt lists." if dataset.vocabulary else ".")
    elif given == "stored":
        said = "Examples as the data set stores them; scaling, resizing and normalisation are inside the file."
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
        "data": LICENCES.get(dataset, "not known to fedloom; ask where it came from"),
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

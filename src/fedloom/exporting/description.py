"""What a file of weights says about itself, so that nothing else is needed to build its model: the metadata of a
safetensors file, as JSON."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ..data import Dataset, Preparation
from ..models import Family, Model, build_model
from ..registry import freeze
from .module import PreparationModule, build_preparation

DESCRIPTION_VERSION = 1
INFERENCE_STEPS = ("mean", "std", "size", "channels")  # the steps of a preparation that also apply after training

InputKind = Literal["stored", "prepared"]
"""Examples as stored, with the preparation inside the exported file; or prepared, as the model itself takes them."""

Described = Mapping[str, Any]
"""A description that was read from a file or a model card."""


def describe_model(model: Model, dataset: Dataset, **more: Any) -> dict[str, Any]:
    """Everything that is needed to build a model and to prepare its examples.

    Parameters
    ----------
    model : the model.
    dataset : the data set that it was trained on.
    more : where it came from.
    """
    return {
        "schema_version": DESCRIPTION_VERSION,
        "family": model.family,
        "settings": as_lists(dict(model.settings)),
        "input": describe_input(dataset, "stored"),
        "output": {"name": "logits", "classes": model.classes},
        **more,
    }


def describe_input(dataset: Dataset, input_kind: InputKind) -> dict[str, Any]:
    """The input of a model: name, type, shape, and how stored examples are prepared.

    Parameters
    ----------
    dataset : the data set.
    input_kind : whether the preparation is part of the model.
    """
    example = input_transform(dataset, input_kind)(dataset.test.x[:1])
    steps = {name: value for name, value in asdict(dataset.preparation).items() if name in INFERENCE_STEPS and value}
    if dataset.tokens is not None:
        meaning = f"Ids of {dataset.tokens} tokens" + (", which vocabulary.txt lists." if dataset.vocabulary else ".")
    elif input_kind == "stored":
        meaning = _describe_stored_input(build_preparation(dataset.preparation, dataset.test.x[:1]))
    else:
        scaled = " divided by 255, then" if dataset.test.x.dtype == torch.uint8 else ""
        meaning = f"Examples{scaled} prepared by the caller: {as_lists(steps) or 'nothing else'}."
    return {
        "name": "input", "kind": input_kind, "dtype": str(example.dtype).removeprefix("torch."),
        "shape": list(example.shape[1:]), "meaning": meaning, "preparation": as_lists(steps),
        "stored_dtype": str(dataset.test.x.dtype).removeprefix("torch."),
        "stored_shape": list(dataset.test.x.shape[1:]),
        "model_shape": list(dataset.input_shape), "tokens": dataset.tokens,
    }  # fmt: skip


def _describe_stored_input(preparation: nn.Module) -> str:
    """Claims only what the file contains: what the data set's reader did to its examples is not known."""
    steps = preparation.steps if isinstance(preparation, PreparationModule) else ()
    if not steps:
        return (
            "Examples as the data set gives them. Nothing is prepared inside the file: whatever the reader of the data "
            "set computes, such as a normalization, must be done before."
        )
    *others, last = steps
    inside = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return f"Examples as the data set gives them; {inside} inside the file."


def input_transform(dataset: Dataset, input_kind: InputKind) -> Callable[[Tensor], Tensor]:
    """From stored examples to the input of the file.

    Parameters
    ----------
    dataset : the data set.
    input_kind : whether the preparation is part of the model.
    """
    return (lambda x: x) if input_kind == "stored" else dataset.preparation


def read_description(file: Path) -> dict[str, Any] | None:
    """What a safetensors file says about its model; None if it says nothing that a model could be built from.

    Parameters
    ----------
    file : the file.
    """
    with safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("about", "{}")
    content: dict[str, Any] = json.loads(text)
    return content if "input" in content and "family" in content else None


def rebuild_model(described: Described, family: Family, classes: int) -> Model:
    """The model that a description or a card is about, without weights.

    Parameters
    ----------
    described : the description.
    family : the function that builds the family's module.
    classes : the number of classes.
    """
    about = described["input"]
    shape, tokens = tuple(about["model_shape"]), about["tokens"]
    return build_model(described["family"], family, freeze(described["settings"]), shape, classes, tokens)


def rebuild_preparation(described: Described) -> nn.Module | None:
    """The preparation that is part of the described model; None if the caller prepares examples.

    Parameters
    ----------
    described : the description.
    """
    about = described["input"]
    if about["kind"] != "stored":
        return None
    stored = torch.zeros(1, *about["stored_shape"], dtype=getattr(torch, about["stored_dtype"]))
    return build_preparation(Preparation(**freeze(about["preparation"])), stored)


def as_lists(value: Any) -> Any:
    """Settings as JSON has them: lists instead of tuples, at every depth.

    Parameters
    ----------
    value : the settings, or one of them.
    """
    if isinstance(value, Mapping):
        return {key: as_lists(item) for key, item in value.items()}
    return [as_lists(item) for item in value] if isinstance(value, list | tuple) else value

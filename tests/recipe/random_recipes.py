"""Random recipes, drawn from the schema and from the signature of everything that a recipe can name.

A recipe begins as a tiny one that works: a method, a family that it takes, data that fits both. Then some keys are
changed, any of the schema or of the settings of what is chosen: mostly to values that fit the rest of the recipe,
otherwise to any that the key's type allows, and sometimes to values at or beyond a bound. What is drawn for a key
follows from its type, so that a new key, method, family, partition, … is covered without a change here.

`try_recipe` says what becomes of one: either `check` refuses it, or it runs. Hunt for counterexamples with

    python -m tests.recipe.random_recipes --count 5000 --seed 7
"""

import argparse
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
import torch
from annotated_types import Interval, Len
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from safetensors.torch import save_file

from fedloom.api.simulation import Simulation
from fedloom.api.verbs import check, plan, resume, run
from fedloom.cli.app import main
from fedloom.client.losses import fits_task
from fedloom.data import PREPARATIONS, DataMissing, Dataset, Examples, LearningTask, Partition, Preparation
from fedloom.data.catalog import DATASET_INFO
from fedloom.data.tasks import TASKS
from fedloom.evaluation import BatchNormStatistics, FineTune
from fedloom.fleet import Fleet, make_tiers
from fedloom.methods import METHODS, fleet_problem
from fedloom.models import MODELS, build_model
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import dumps
from fedloom.recipe.registries import PASSED, Registries
from fedloom.recipe.schema import Recipe
from fedloom.recipe.validation import type_hints
from fedloom.registry import settable_parameters
from fedloom.runs.faults import NoQuorum
from fedloom.runs.recorder import NothingAdmitted
from fedloom.testing.world import SMALLER_SETTINGS, TINY_METHODS, TINY_SETTINGS, tiny_model

Place = tuple[str | int, ...]
Document = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]

CHOICES: dict[Place, str] = {
    ("data", "partition"): "partitions",
    ("training", "optimizer"): "optimizers",
    ("training", "lr_schedule"): "lr_schedules",
    ("training", "loss"): "losses",
    ("aggregation", "server_optimizer"): "server_optimizers",
    ("compression", "uplink"): "compressors",
    ("compression", "downlink"): "compressors",
    ("faults", "stragglers"): "stragglers",
}
"""Tables with a `kind` and its settings, and the registry of the kinds."""

NAMES: dict[Place, str] = {
    ("data", "dataset"): "datasets",
    ("data", "public", "dataset"): "datasets",
    ("data", "preparation"): "preparations",
    ("task", "kind"): "tasks",
    ("model", "family"): "models",
    ("tiers", "family"): "models",
    ("method", "name"): "methods",
    ("engine", "kind"): "engines",
    ("aggregation", "rule"): "aggregation",
}
"""Keys that are a name, and its registry."""

FUNCTIONS: dict[Place, Callable[..., Any]] = {
    ("evaluation", "statistics"): BatchNormStatistics,
    ("evaluation", "fine_tune"): FineTune,
}
"""Tables that are the settings of one function."""

TAKES_LONG = ("rounds", "epochs", "server_epochs", "body_epochs", "iterations", "subnets")
"""Whole numbers that a run's time grows with: they stay tiny, for a huge one is valid and would never end."""

SIZES = frozenset(name for build in MODELS.values() for name in settable_parameters(build, PASSED["models"])) | {
    "server_planes",
    "server_blocks",
    "devices",
    "max_examples",
}
"""Whole numbers that memory grows with."""

FILES = ("trace.json", "speeds.json", "partition.json", "tiny.npz", "start.safetensors", "nowhere.json", ".")
"""Paths that recipes name; `write_files` makes most of them."""

TIERS = ("large", "medium", "small")
SHAPES: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"width": 1.0}, {"width": 0.5, "smaller": True}),
    ({"width": 1.0}, {"width": 0.5, "smaller": True}, {"width": 0.25, "smaller": True}),
    ({}, {"smaller": True}),
    ({"width": 1.0}, {"width": 0.5}),
    ({"exit_after": "every"}, {"exit_after": "every", "depth": 1, "stages": 1}),
    ({},),
)
"""Tiers of a family, without what it does not know; `smaller` stands for the settings of its lower tiers."""

SHARES = {1: ((1.0,),), 2: ((0.5, 0.5), (0.25, 0.75), (0.7, 0.3)), 3: ((0.5, 0.25, 0.25),)}
"""Shares of so many tiers."""


# ---- tiny data of every kind, beside the bundled digits


def tiny_images() -> Dataset:
    """Images of one channel with three classes, in five groups."""
    return _tiny("tiny-images", lambda count: (_bytes(count, (1, 8, 8)), torch.arange(count) % 3), 3, groups=True)


def tiny_colors() -> Dataset:
    """Images of three channels with two classes, one of which is rare."""
    return _tiny("tiny-colors", lambda count: (_bytes(count, (3, 8, 8)), (torch.arange(count) % 7 == 0).long()), 2)


def tiny_words() -> Dataset:
    """Rows of tokens with one label each."""

    def make(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.arange(count) % 3
        return (labels[:, None] + torch.arange(5)) % 4, labels

    return _tiny("tiny-words", make, 3, tokens=5, groups=True)


def tiny_text() -> Dataset:
    """Rows of tokens in which every token is its own label."""

    def make(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = (torch.arange(count)[:, None] * 3 + torch.arange(5)) % 4
        return rows, rows

    return _tiny("tiny-text", make, 4, tokens=5, groups=True)


def tiny_masked() -> Dataset:
    """Rows of tokens, some of which are masked in training."""
    return replace(tiny_text(), name="tiny-masked", preparation=Preparation(mask_chance=0.3, mask_token=4), task=None)


def tiny_series() -> Dataset:
    """Time series of two channels with three classes."""
    return _tiny("tiny-series", lambda count: (_bytes(count, (2, 16)) / 255, torch.arange(count) % 3), 3, groups=True)


def tiny_pixels() -> Dataset:
    """Images in which every pixel has one of three classes."""

    def make(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = _bytes(count, (1, 8, 8))
        return images, images[:, 0].long() % 3

    return _tiny("tiny-pixels", make, 3)


def tiny_numbers() -> Dataset:
    """Images with two numbers each."""

    def make(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        images = _bytes(count, (1, 8, 8))
        return images, torch.stack([images.float().mean((1, 2, 3)), images[:, 0, 0, 0].float()], 1) / 255

    return _tiny("tiny-numbers", make, 2)


def tiny_flags() -> Dataset:
    """Images with any number of three labels each."""
    bits = torch.tensor([1, 2, 4])
    return _tiny("tiny-flags", lambda count: (_bytes(count, (1, 8, 8)), (torch.arange(count)[:, None] & bits) > 0), 3)


def write_files(folder: Path) -> None:
    """Small files of every kind that a recipe can name, some of which do not fit most recipes."""
    trace = {"available": {"0": [[1, 1]], "2": [[2, 9]]}, "period": 3}
    (folder / "trace.json").write_text(json.dumps(trace), encoding="utf-8")
    (folder / "speeds.json").write_text(json.dumps({"1": {"speed": 0.25, "bandwidth": 0.5}}), encoding="utf-8")
    rows = [np.arange(4 * device, 4 * device + 4) for device in range(4)]
    Partition(tuple(rows), (*rows[:3], np.zeros(0, dtype=np.int64))).save(folder / "partition.json")
    images, labels = np.arange(40 * 64, dtype=np.uint8).reshape(40, 8, 8), np.arange(40) % 3
    arrays = {"train_images": images, "train_labels": labels, "test_images": images[:9], "test_labels": labels[:9]}
    np.savez(folder / "tiny.npz", **arrays)
    save_file({"weight": torch.zeros(2)}, folder / "start.safetensors")


def _bytes(count: int, shape: tuple[int, ...]) -> torch.Tensor:
    drawn = np.random.default_rng(count).integers(0, 256, (count, *shape), dtype=np.uint8)
    return torch.from_numpy(drawn)


def _tiny(
    name: str, make: Callable[[int], Any], classes: int, tokens: int | None = None, groups: bool = False
) -> Dataset:
    train, test = (Examples(*make(count)) for count in (48, 20))
    kinds = (torch.arange(48) % 5, torch.arange(20) % 5) if groups else None
    return Dataset(name, train, test, classes, PREPARATIONS["plain"], tokens, kinds)


TINY_DATA: dict[str, Callable[[], Dataset]] = {
    "tiny-images": tiny_images,
    "tiny-colors": tiny_colors,
    "tiny-words": tiny_words,
    "tiny-text": tiny_text,
    "tiny-masked": tiny_masked,
    "tiny-series": tiny_series,
    "tiny-pixels": tiny_pixels,
    "tiny-numbers": tiny_numbers,
    "tiny-flags": tiny_flags,
}
"""Data of every task, and of every shape that a family reads."""

BUNDLED = ("digits", "fashion-mini", "diabetes", "digits-multilabel", "digits-segmentation", *TINY_DATA)
"""Data that needs neither files nor settings."""


@cache
def registries() -> Registries:
    """The names that random recipes use."""
    return Registries().with_names(datasets=TINY_DATA)


@cache
def read_data(name: str) -> Dataset:
    """Data that is bundled or made here."""
    data: Dataset = registries().datasets[name]()
    return data


# ---- what a type allows, and what it does not

NUMBERS = (1, 2, 3, 5, 10, 64, 1000, 10**6)
FRACTIONS = (1.0, 0.5, 0.1, 0.25, 0.9, 0.01, 2.0, 3.0, 10.0)
EXTREME_FRACTIONS = (1e3, 1e-6, 1e6, 1e-30, 1e30)
TEXTS = ("server", "personal", "accuracy", "a", "nothing", "")
ODD_TEXTS = ("", " ", "..", "a/b", "ä ö", "x\ny", '"', "\\", "a" * 300, "nan", "\u0000", "🙂", "=", "[x]")
ODD: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**63 - 1, 2**64, 10**30, -(2**63), 0.0, -0.0, 0.5, 1.0, -1.0, 1e300, -1e300, 5e-324, math.nan,
    math.inf, -math.inf, True, False, "", "none", "auto", [], [0], [[]], ["a", "a"], [1.5, math.nan], {},
    {"kind": "none"}, {"a": 1},
)  # fmt: skip


def fitting(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    """Values that a type allows, most of them small.

    Parameters
    ----------
    hint : the type of a key or of a setting.
    name : what it is called.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _bounded(args[0], args[1:], name)
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, UnionType):
        return st.one_of(*(fitting(one, name) for one in args if one is not NoneType))
    if origin is tuple:
        of = [fitting(one, name) for one in args if one is not Ellipsis]
        return st.lists(of[0], max_size=3) if Ellipsis in args else st.tuples(*of).map(list)
    if origin is list:
        return st.lists(fitting(args[0], name), max_size=3)
    if origin is not None and issubclass(origin, Mapping):
        keys = fitting(args[0], name)
        names = keys if get_origin(args[0]) is Literal else _names(keys)
        return st.dictionaries(names, fitting(args[1], name), max_size=2)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return _tables(hint, ())
    plain: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: _bounded(int, (), name),
        float: _bounded(float, (), name),
        str: st.sampled_from(FILES if name in ("path", "file", "trace", "source", "from") else (*TEXTS, *TIERS)),
    }
    return plain.get(hint, st.sampled_from(ODD))


def _names(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[str]:
    return st.one_of(st.sampled_from(TIERS), strategy.filter(lambda value: isinstance(value, str)))


def _bounded(kind: Any, constraints: Iterable[Any], name: str) -> st.SearchStrategy[Any]:
    bounds: dict[str, Any] = {}
    for one in _flat(constraints):
        for key in ("ge", "gt", "le", "lt", "min_length", "max_length"):
            if getattr(one, key, None) is not None:
                bounds[key] = getattr(one, key)

    def allowed(value: Any) -> bool:
        return (
            value >= bounds.get("ge", -math.inf)
            and value > bounds.get("gt", -math.inf)
            and value <= bounds.get("le", math.inf)
            and value < bounds.get("lt", math.inf)
        )

    if kind is int:
        low = bounds.get("ge", 0)
        if name in TAKES_LONG:
            return st.integers(low, low + 1)
        if name in SIZES:
            return st.integers(low, low + 5)
        return st.one_of(st.integers(low, low + 5), st.sampled_from([one for one in NUMBERS if allowed(one)]))
    if kind is float:
        ends = [float(bounds[key]) for key in ("ge", "le") if key in bounds and math.isfinite(bounds[key])]
        listed = [*(one for one in FRACTIONS if allowed(one)), *ends]
        extreme = [*(one for one in EXTREME_FRACTIONS if allowed(one)), *listed]
        between = st.floats(0, 1).filter(allowed) if allowed(0.3) else st.sampled_from(listed)
        return st.one_of(*[st.sampled_from(listed)] * 3, between, st.sampled_from(extreme))
    inner = fitting(kind, name)
    least = bounds.get("min_length", 0)
    return inner.filter(lambda value: len(value) >= least) if least else inner


def _flat(constraints: Iterable[Any]) -> Iterator[Any]:
    for one in constraints:
        yield from _flat(one.metadata) if isinstance(one, FieldInfo) else [one]


def odd(hint: Any, place: Place) -> st.SearchStrategy[Any]:
    """Values at and beyond the bounds of a type, and of other types."""
    edges, other = odd_values(hint, place)
    return (
        st.one_of(st.sampled_from(edges), st.sampled_from(edges), st.sampled_from(other))
        if edges
        else st.sampled_from(other)
    )


def odd_values(hint: Any, place: Place) -> tuple[list[Any], list[Any]]:
    """Values at and beyond the bounds of a type; values of any type."""
    edges, other = _odd_values(hint)
    if place[-1] in TAKES_LONG or place[-1] in SIZES or place[0] == "tiers":
        edges, other = ([one for one in some if type(one) is not int or one < 100] for some in (edges, other))
    return edges, other


def _odd_values(hint: Any) -> tuple[list[Any], list[Any]]:
    kinds = [hint, *get_args(hint)]
    edges: list[Any] = []
    for one in kinds:
        for constraint in _flat(getattr(one, "__metadata__", ()) or ([one] if isinstance(one, Interval | Len) else [])):
            for key in ("ge", "gt", "le", "lt"):
                bound = getattr(constraint, key, None)
                if bound is not None and math.isfinite(bound):
                    edges += [
                        bound,
                        bound - 1,
                        bound + 1,
                        math.nextafter(bound, -math.inf),
                        math.nextafter(bound, math.inf),
                    ]
    kinds = [one for kind in kinds for one in (kind, *get_args(kind))]
    if int in kinds or float in kinds:
        edges += [one for one in ODD if isinstance(one, int | float) and (float in kinds or isinstance(one, int))]
    if str in kinds:
        edges += ODD_TEXTS
    return edges, [*ODD, *ODD_TEXTS]


# ---- tables of the schema and settings of names


def _tables(model: type[BaseModel], place: Place) -> st.SearchStrategy[Document]:
    """A table of the schema with its required keys and some others."""

    @st.composite
    def table(draw: Draw) -> Document:
        keys = list(model.model_fields)
        chosen = draw(st.sets(st.sampled_from(keys), max_size=3))
        made = {}
        for name, key in model.model_fields.items():
            if key.is_required() or name in chosen:
                made[key.alias or name] = draw(values((*place, name), _hint(key)))
        return made

    return table()


def _hint(key: FieldInfo) -> Any:
    return Annotated[(key.annotation, *key.metadata)] if key.metadata else key.annotation


def settings_of(function: Callable[..., Any], kind: str) -> dict[str, Any]:
    """The settings of an entry of a registry, and the type of each."""
    hints = type_hints(function)
    return {name: hints.get(name, Any) for name in settable_parameters(function, PASSED.get(kind, ()))}


def _required(function: Callable[..., Any], kind: str) -> list[str]:
    parameters = settable_parameters(function, PASSED.get(kind, ()))
    return [name for name, parameter in parameters.items() if parameter.default is parameter.empty]


def choices(kind: str, fits: Callable[[str], bool] = lambda name: True) -> st.SearchStrategy[Document]:
    """An entry of a registry with its required settings and some others, as a table."""

    @st.composite
    def choice(draw: Draw) -> Document:
        table = getattr(registries(), kind)
        name = draw(st.sampled_from([name for name in sorted(table) if fits(name)]))
        return {"kind": name, **draw(arguments(table[name], kind))}

    return choice()


def arguments(function: Callable[..., Any], kind: str = "") -> st.SearchStrategy[Document]:
    """The required settings of a function, and some others."""

    @st.composite
    def drawn(draw: Draw) -> Document:
        hints, required = settings_of(function, kind), _required(function, kind)
        chosen = draw(st.sets(st.sampled_from(sorted(hints)), max_size=2)) if hints else set()
        return {name: draw(fitting(hints[name], name)) for name in sorted({*chosen, *required})}

    return drawn()


def values(place: Place, hint: Any) -> st.SearchStrategy[Any]:
    """Values for a key of the schema: of what it names, or of its type."""
    if place in CHOICES:
        return choices(CHOICES[place])
    if place in FUNCTIONS:
        return arguments(FUNCTIONS[place])
    if place == ("engine", "kind"):
        return st.just("in_process")  # the others need Ray, or devices
    if place in NAMES:
        return st.sampled_from(sorted(getattr(registries(), NAMES[place])))
    if place == ("evaluation", "metrics"):
        return st.lists(
            st.one_of(st.sampled_from(sorted(registries().metrics)), choices("metrics")), min_size=1, max_size=3
        )
    if place in (("fleet", "eligible"), ("fleet", "device_tiers")):
        return st.lists(st.sampled_from(TIERS), max_size=4)
    if place == ("compare", "arms"):
        overrides = st.sampled_from((*OVERRIDES, "method.name=fedavg", "seed=3", "x=1"))
        return st.dictionaries(st.sampled_from((*ARMS, "fedavg", "a b")), st.lists(overrides, max_size=2), max_size=2)
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    bare = next((one for one in members if isinstance(one, type) and issubclass(one, BaseModel)), None)
    return _tables(bare, place) if bare else fitting(hint, str(place[-1]))


ARMS = ("arm", "other")
OVERRIDES = ("training.epochs=2", "training.optimizer.lr=0.5")


@cache
def schema_keys() -> dict[Place, Any]:
    """Every key of every section, and its type."""
    keys: dict[Place, Any] = {}
    for name, key in Recipe.model_fields.items():
        section = key.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            keys |= {(name, inner): _hint(field) for inner, field in section.model_fields.items()}
        elif name != "tiers":
            keys[(name,)] = _hint(key)
    return keys


def tier_keys() -> dict[str, Any]:
    """The keys of a tier besides the settings of its model."""
    (tier, *_) = get_args(get_args(Recipe.model_fields["tiers"].annotation) and Recipe.model_fields["tiers"].annotation)
    return {name: _hint(field) for name, field in tier.model_fields.items()}


# ---- recipes that work, to begin with


def _tier_settings(family: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    known = settings_of(MODELS[family], "models")
    smaller = SMALLER_SETTINGS.get(family, {}) if shape.get("smaller") else {}
    return {**{key: value for key, value in shape.items() if key in known}, **smaller}


@cache
def shapes_that_fit(method: str, family: str) -> tuple[tuple[dict[str, Any], ...], ...]:
    """The tiers of a family, of all `SHAPES`, that a method trains."""
    return tuple(
        tiers for tiers, fleet in _fleets(family) if fleet_problem(build_method_of(method, tiers), fleet) is None
    )


@cache
def _fleets(family: str) -> tuple[tuple[tuple[dict[str, Any], ...], Fleet], ...]:
    fleets = {}
    for shape in SHAPES:
        tiers = tuple(_tier_settings(family, one) for one in shape)
        widest = max(one.get("width", 1.0) for one in tiers)
        models = [
            (name, tiny_model(family, **{"widest": widest, **one})) for name, one in zip(TIERS, tiers, strict=False)
        ]
        fleets[repr(tiers)] = tiers, Fleet(make_tiers(models), (1 / len(tiers),) * len(tiers), 6, 0)
    return tuple(fleets.values())


def method_settings(method: str, tiers: int) -> dict[str, Any]:
    """Settings with which a method is small, for tiers of the names that recipes here have."""
    small = dict(TINY_METHODS.get(method, {}))
    if "parts" in small:
        named = {"a": list(TIERS[: max(1, tiers - 1)]), "b": [TIERS[tiers - 1]]}
        small["parts"] = [{**part, "tiers": named[part["tiers"][0]]} for part in small["parts"][: min(2, tiers)]]
    if "sizes" in small:
        small["sizes"] = {name: 0.25**number for number, name in enumerate(TIERS[:tiers])}
    return small


def build_method_of(method: str, tiers: tuple[Any, ...]) -> Any:
    return METHODS[method].from_settings(method_settings(method, len(tiers)), METHODS)


@cache
def families_that_fit(method: str) -> tuple[str, ...]:
    """The families that a method trains."""
    return tuple(family for family in sorted(TINY_SETTINGS) if shapes_that_fit(method, family))


def datasets_that_fit(method: str, family: str) -> tuple[str, ...]:
    """Small data that a family reads, with a task that a method learns."""
    made = build_method_of(method, shapes_that_fit(method, family)[0])
    readable = (name for name in ("digits", *TINY_DATA) if _can_read(family, name))
    return tuple(name for name in readable if made.check_task(read_data(name).task) is None)


@cache
def _can_read(family: str, dataset: str) -> bool:
    data = read_data(dataset)
    try:
        model = build_model(
            family, MODELS[family], model_settings(family, data), data.input_shape, data.classes, data.tokens,
            data.target_shape, data.task.class_axis,
        )  # fmt: skip
        model.check_output_size()
    except Exception:  # whatever a module raises, as `check` has it
        return False
    return True


def model_settings(family: str, data: Dataset) -> dict[str, Any]:
    """Settings with which a family is tiny and may learn the task of some data."""
    causal = {"causal": data.task.causal} if "causal" in settings_of(MODELS[family], "models") else {}
    return {**TINY_SETTINGS[family], **causal}


@st.composite
def beginnings(draw: Draw, methods: Sequence[str]) -> Document:
    """Tiny recipes of these methods that work."""
    method = draw(st.sampled_from(methods))
    family = draw(st.sampled_from(families_that_fit(method)))
    tiers = draw(st.sampled_from(shapes_that_fit(method, family)))
    shares = draw(st.sampled_from(SHARES[len(tiers)]))
    dataset = draw(st.sampled_from(datasets_that_fit(method, family)))
    document = {
        "seed": draw(st.integers(0, 3)),
        "rounds": draw(st.integers(1, 2)),
        "data": {
            "dataset": dataset,
            "devices": draw(st.integers(len(tiers) + 1, 6)),
            "max_examples": draw(st.integers(3, 8)),
            "test_examples": draw(st.integers(8, 20)),
        },
        "model": {"family": family, **model_settings(family, read_data(dataset))},
        "tiers": [
            {"name": name, "share": share, **one} for name, share, one in zip(TIERS, shares, tiers, strict=False)
        ],
        "training": {"batch_size": draw(st.integers(2, 6))},
        "method": {"name": method, **method_settings(method, len(tiers))},
    }
    if build_method_of(method, tiers).needs_public_data:
        document["data"]["public"] = {"examples": draw(st.integers(6, 10))}
    return document


def _set_speeds(document: Document) -> None:
    for number, tier in enumerate(document["tiers"]):
        tier |= {"speed": 1e6 / (number + 1), "bandwidth": 1e5}


def set_privacy(document: Document) -> None:
    document.setdefault("fleet", {})["sampling"] = "poisson"
    document["privacy"] = {"clip": 1.0, "noise": 0.8, **document.get("privacy", {})}
    if "normalization" in settings_of(MODELS[document["model"]["family"]], "models"):
        document["model"]["normalization"] = "none"
    document["method"] |= _private_settings(document["method"]["name"])


def _private_settings(method: str) -> dict[str, Any]:
    known = settings_of(METHODS[method], "methods")
    return {name: value for name, value in PRIVATE_SETTINGS.items() if name in known}


def _set_privacy_if_covered(document: Document) -> None:
    """Nothing changes for methods of which noise does not cover everything: they are refused."""
    name = document["method"]["name"]
    settings = {**method_settings(name, len(document["tiers"])), **_private_settings(name)}
    if not METHODS[name].from_settings(settings, METHODS).dp_uncovered:
        set_privacy(document)


def _set_two_examples(document: Document) -> None:
    document["data"]["max_examples"] = 1
    document["training"]["batch_size"] = 1


def _set_arms(document: Document) -> None:
    document.setdefault("compare", {}).setdefault("arms", {name: list(OVERRIDES) for name in ARMS})


PRIVATE_SETTINGS = {"weighting": "uniform", "only_seen_rows": False}
"""Settings of methods without which noise would not cover what they upload."""

THEMES: tuple[Callable[[Document], None], ...] = (_set_speeds, _set_privacy_if_covered, _set_two_examples)
"""What is only valid together, so that a single change of a key would hardly ever reach it."""

NEEDED: dict[Place, Callable[[Document], None]] = {
    ("faults", "deadline"): _set_speeds,
    ("faults", "over_selection"): _set_speeds,
    ("fleet", "server_speed"): _set_speeds,
    ("privacy", "clip"): _set_privacy_if_covered,
    ("privacy", "noise"): _set_privacy_if_covered,
    ("privacy", "delta"): _set_privacy_if_covered,
    ("privacy", "target_epsilon"): _set_privacy_if_covered,
    ("privacy", "accountant"): _set_privacy_if_covered,
    ("compare", "baseline"): _set_arms,
}
"""What a key needs of others to have an effect."""


# ---- values that fit the rest of a recipe


@dataclass(frozen=True)
class Beginning:
    """What a recipe began with."""

    method: str
    family: str
    dataset: str
    tiers: tuple[str, ...]

    @property
    def task(self) -> LearningTask:
        return read_data(self.dataset).task


MODEL_VALUES: dict[str, tuple[Any, ...]] = {
    "head": ({"cells": 1}, {"cells": 2}),
    "heads": (1, 2, 4),
    "embedding": (4, 8),
    "groups": (1, 2),
    "layers": (2, 3),
    "depth": (1, 2),
    "stages": (1, 2),
    "exit_after": (0, 1, 2, "every"),
    "columns": ([[3, 4], [2, 3]], [[2], [3]]),
    "held": (1, 2),
}
"""Settings of families that depend on others, and values that mostly go with `TINY_SETTINGS`."""

FITTING_FILES = {
    ("faults", "trace"): "trace.json",
    ("faults", "stragglers"): "speeds.json",
    ("data", "partition"): "partition.json",
}
"""The file that is made for a key."""


def fitting_values(begun: Beginning, document: Document, place: Place, hint: Any) -> st.SearchStrategy[Any]:
    """Values for a key that go with what a recipe began with; else those of its type."""
    plain = _without_numbers(place)
    usual = values(plain, hint)
    tiers = st.sampled_from(begun.tiers)
    match plain:
        case ("data", "dataset"):
            return st.sampled_from([name for name in BUNDLED if _can_read(begun.family, name)])
        case ("data", "preparation") if begun.task.positions or len(read_data(begun.dataset).input_shape) < 3:
            return st.just("plain")  # all others are for images
        case ("data", "partition"):
            return choices("partitions", partial(_fits_partition, begun)).map(partial(_with_file, plain))
        case ("data", "tier_label_correlation") if not begun.task.has_class_labels:
            return st.just(0.0)
        case ("task", "kind"):
            return st.sampled_from([name for name, one in TASKS.items() if begun.task.is_compatible(one)])
        case ("training", "loss"):
            return choices("losses", lambda name: fits_task(registries().losses[name], begun.task))
        case ("evaluation", "metrics"):
            return st.lists(st.sampled_from(begun.task.metrics), min_size=1, max_size=2, unique=True)
        case ("evaluation", "candidates"):
            return st.lists(st.sampled_from(_candidates(begun)), max_size=2, unique=True)
        case ("compare", "candidate"):
            return st.sampled_from(_candidates(begun))
        case ("compare", "metric"):
            return st.just(begun.task.headline)
        case ("compare", "arms"):
            return st.dictionaries(st.sampled_from(ARMS), st.lists(st.sampled_from(OVERRIDES), min_size=1, max_size=2))
        case ("compare", "baseline"):
            return st.sampled_from(ARMS)
        case ("tune", "search"):
            return st.lists(st.sampled_from(("training.epochs", "training.epochs=1,2", "seed=0..3")), max_size=2)
        case ("fleet", "eligible"):
            return st.lists(tiers, max_size=2, unique=True)
        case ("fleet", "device_tiers"):
            return st.lists(tiers, min_size=document["data"]["devices"], max_size=document["data"]["devices"])
        case ("engine", "device"):
            return st.sampled_from(("cpu", "auto"))
        case ("engine", "devices"):
            return st.lists(st.just("cpu"), max_size=2)
        case ("engine", "devices_per_block"):
            return st.one_of(st.integers(1, 3), st.dictionaries(tiers, st.integers(1, 3), max_size=2))
        case ("faults", "trace" | "stragglers"):
            return usual.map(partial(_with_file, plain))
        case ("faults", "outages"):
            return st.lists(_outages(tiers), max_size=2)
        case ("compression", "downlink"):
            return choices("compressors", lambda name: not getattr(registries().compressors[name], "of_updates", False))
        case ("model" | "tiers", name) if name in MODEL_VALUES:
            return st.sampled_from(MODEL_VALUES[name])
        case ("method", "shared_tier"):
            return tiers
        case ("method", name) if _is_table_of_names(hint):
            return st.fixed_dictionaries({tier: fitting(get_args(hint)[1], name) for tier in begun.tiers})
        case ("model" | "tiers" | "method", name):
            small = TINY_METHODS.get(begun.method, {}) if place[0] == "method" else TINY_SETTINGS[begun.family]
            if isinstance(small.get(name), tuple) and Ellipsis in get_args(hint):  # another list may have to be as long
                length = len(small[name])
                return st.lists(fitting(get_args(hint)[0], name), min_size=length, max_size=length)
    return usual


def _without_numbers(place: Place) -> Place:
    """A key of a tier as one of any tier."""
    return tuple(key for key in place if not isinstance(key, int))


def _is_table_of_names(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping) and get_args(hint)[0] is str


def _fits_partition(begun: Beginning, kind: str) -> bool:
    """Partitions by labels or by groups go with data that has them; `own` is for devices that bring theirs."""
    if kind in ("natural", "rows"):
        return read_data(begun.dataset).groups is not None
    return kind in ("iid", "quantity", "file") or (kind != "own" and begun.task.has_class_labels)


def _with_file(place: Place, value: Any) -> Any:
    """A path, or a table with one, that names the file which is made for the key."""
    if isinstance(value, str):
        return FITTING_FILES[place]
    return {**value, "path": FITTING_FILES[place]} if "path" in value else value


@st.composite
def _outages(draw: Draw, tiers: st.SearchStrategy[str]) -> Document:
    first = draw(st.integers(1, 3))
    return {"tier": draw(tiers), "from": first, "to": first + draw(st.integers(0, 2))}


@cache
def _candidates(begun: Beginning) -> tuple[str, ...]:
    """The models that a method evaluates, in the first of the fleets that it trains."""
    tiers = shapes_that_fit(begun.method, begun.family)[0]
    fleet = next(fleet for of_fleet, fleet in _fleets(begun.family) if of_fleet == tiers)
    method = build_method_of(begun.method, tiers)
    return tuple(method.eval_targets(method.start(fleet, 0)))


def _put_fitting(draw: Draw, document: Document, begun: Beginning, place: Place, hint: Any) -> None:
    """Change a key, and with it the others that it only goes with."""
    match place:
        case ("tiers", int(), "share"):
            shares = draw(st.permutations(draw(st.sampled_from(SHARES[len(begun.tiers)]))))
            for tier, share in zip(document["tiers"], shares, strict=True):
                tier["share"] = share
        case ("tiers", int(number), "name"):
            document["tiers"][number]["name"] = draw(st.sampled_from(("tiny", "a.b+c")))
        case ("method", "name"):
            name = draw(st.sampled_from(sorted(METHODS)))
            document["method"] = {"name": name, **method_settings(name, len(begun.tiers))}
        case ("model", "family"):
            family = draw(st.sampled_from(_families_that_read(begun.dataset)))
            document["model"] = {"family": family, **model_settings(family, read_data(begun.dataset))}
            for tier in document["tiers"]:
                _drop_settings(tier)
        case ("tiers", int(number), "family"):
            family = draw(st.sampled_from(_families_that_read(begun.dataset)))
            _drop_settings(document["tiers"][number])
            document["tiers"][number] |= {"family": family, **model_settings(family, read_data(begun.dataset))}
        case _:
            plain = _without_numbers(place)
            if plain in NEEDED:
                NEEDED[plain](document)
            value = draw(fitting_values(begun, document, place, hint))
            _put(document, place, value)
            if plain == ("data", "partition") and value["kind"] == "file":
                document["data"]["devices"] = 4  # as many as the file has


def _families_that_read(dataset: str) -> list[str]:
    return [family for family in sorted(TINY_SETTINGS) if _can_read(family, dataset)]


def _drop_settings(tier: Document) -> None:
    """Leave nothing of a tier but what every family has."""
    for name in set(tier) - set(tier_keys()):
        del tier[name]


# ---- random recipes


@st.composite
def recipes(draw: Draw, methods: Sequence[str] = tuple(sorted(METHODS)), boldness: int = 12) -> Document:
    """Random recipes, as a TOML file has them.

    Parameters
    ----------
    methods : the methods that they begin with.
    boldness : of a hundred changed keys, how many have a value at or beyond the bounds of their type.
    """
    document = draw(beginnings(methods))
    for theme in (
        draw(st.lists(st.sampled_from(THEMES), max_size=2, unique=True)) if draw(st.integers(0, 2)) == 2 else ()
    ):
        theme(document)
    family, method = document["model"]["family"], document["method"]["name"]
    begun = Beginning(method, family, document["data"]["dataset"], tuple(tier["name"] for tier in document["tiers"]))
    keys: dict[Place, Any] = {
        **schema_keys(),
        **{("method", name): hint for name, hint in settings_of(METHODS[method], "methods").items() if name != "parts"},
        **{("model", name): hint for name, hint in settings_of(MODELS[family], "models").items()},
    }
    number = draw(st.integers(0, len(document["tiers"]) - 1))
    own = {**tier_keys(), **settings_of(MODELS[family], "models")}
    keys |= {("tiers", number, name): hint for name, hint in own.items()}
    places = sorted(keys, key=str)
    chosen = draw(st.lists(st.sampled_from(places), max_size=8, unique=True))
    odd_ones = [place for place in chosen if draw(st.integers(0, 99)) >= 100 - boldness]
    loose = [place for place in chosen if place not in odd_ones and draw(st.integers(0, 3)) == 3]
    rest = [place for place in chosen if place not in odd_ones and place not in loose]
    for place in sorted(rest, key=lambda place: place[-1] in ("name", "family")):  # which bring settings of their own
        _put_fitting(draw, document, begun, place, keys[place])
    for place in loose:
        _put(document, place, draw(values(_without_numbers(place), keys[place])))
    for place in odd_ones:
        _put(document, place, draw(odd(keys[place], place)))
    if draw(st.integers(0, 29)) == 29:
        _mangle(draw, document)
    return tomllib.loads(dumps(document))


def _put(document: Document, place: Place, value: Any) -> None:
    inner: Any = document
    for key in place[:-1]:
        inner = inner[key] if isinstance(key, int) else inner.setdefault(key, {})
    alias = {"first": "from", "source": "from"}.get(str(place[-1])) if place[0] == "start" else None
    inner[alias or place[-1]] = value


def _mangle(draw: Draw, document: Document) -> None:
    """Drop a section, add a key, or make a section something else."""
    section = draw(st.sampled_from(sorted(document)))
    match draw(st.integers(0, 3)):
        case 0:
            del document[section]
        case 1:
            document[section] = draw(st.sampled_from(ODD))
        case 2:
            document[draw(st.sampled_from((*ODD_TEXTS, "extra")))] = draw(st.sampled_from(ODD))
        case 3 if isinstance(document[section], dict):
            document[section][draw(st.sampled_from((*ODD_TEXTS, "extra")))] = draw(st.sampled_from(ODD))


# ---- what becomes of a recipe

ABSENT = tuple(name for name in DATASET_INFO if name not in BUNDLED)


class Inconsistent(AssertionError):  # noqa: N818 - named for what is wrong
    """Two things that a recipe's run says do not agree."""


@dataclass(frozen=True)
class Outcome:
    """What became of a recipe: "refused", "ran", "no quorum", "nothing admitted", "no data"."""

    kind: str
    codes: tuple[str, ...] = ()


def try_recipe(document: Document, folder: Path, thorough: bool | None = None) -> Outcome:
    """Check a recipe, and run it if it is not refused.

    Anything but a defined end is raised: an exception of `check` other than `RecipeError`, or any of a run that `check`
    let pass.

    Parameters
    ----------
    document : the recipe.
    folder : an empty one to work in.
    thorough : whether resuming, a round trip through Python and the command line give the same; by default for some.
    """
    lot = int(hashlib.sha256(repr(document).encode()).hexdigest(), 16) % 60
    file, data = folder / "recipe.toml", folder / "data"
    file.write_text(dumps(document), encoding="utf-8")
    refusal = _refusal(file, data)
    if lot % 20 == 1 or thorough:
        _compare_command_line(file, data, refusal)
    if refusal is not None:
        return Outcome("refused", tuple(sorted({issue.code for issue in refusal.issues})))
    if lot % 4 == 2 or thorough:
        plan(file, data_dir=data, registries=registries()).to_dict()
    try:
        finished = run(file, out=folder / "run", data_dir=data, workers=2 if lot == 3 else 1, registries=registries())
    except DataMissing:
        if document["data"].get("dataset") in ABSENT or document["data"].get("public", {}).get("dataset") in ABSENT:
            return Outcome("no data")
        raise
    except NoQuorum:
        return Outcome("no quorum")
    except NothingAdmitted:
        return Outcome("nothing admitted")
    if finished.manifest["status"] != "finished":
        raise Inconsistent(f"the run has ended, and its status is {finished.manifest['status']}")
    list(finished.final)
    if lot % 8 == 4 or thorough:
        _compare_resumed(file, folder, data, finished.manifest)
    return Outcome("ran")


def _refusal(file: Path, data: Path) -> RecipeError | None:
    try:
        check(file, data_dir=data, registries=registries())
    except RecipeError as error:
        if not error.issues or not all(issue.code and issue.message for issue in error.issues):
            raise Inconsistent("a refusal without a reason") from error
        if len(error.lines()) < 2 * len(error.issues):
            raise Inconsistent("a refusal without a place") from error
        return error
    return None


def _compare_command_line(file: Path, data: Path, refusal: RecipeError | None) -> None:
    """`fedloom check --format json` ends with 0 or 4 and prints JSON, unless names of this module are needed."""
    if any(name in file.read_text(encoding="utf-8") for name in TINY_DATA):
        return
    printed, shown = StringIO(), StringIO()
    code: Any = None
    with redirect_stdout(printed), redirect_stderr(shown):
        try:
            main(["check", str(file), "--data-dir", str(data), "--format", "json"])
        except SystemExit as exit:
            code = exit.code
    if code != (0 if refusal is None else 4):
        raise Inconsistent(f"check --format json ends with {code}: {shown.getvalue()[-2000:]}")
    document = json.loads(printed.getvalue())
    if (document["status"] == "ok") != (refusal is None):
        raise Inconsistent("check --format json says something else")


def _compare_resumed(file: Path, folder: Path, data: Path, manifest: Mapping[str, Any]) -> None:
    """A run that stops after its first round, of a recipe that went through Python, ends with the same bits."""
    simulation = Simulation.from_recipe(file, data_dir=data, registries=registries())
    again = Simulation.from_recipe(simulation.to_recipe(), data_dir=data, registries=registries())
    if dumps(again.to_recipe()) != dumps(simulation.to_recipe()):
        raise Inconsistent("from_recipe(to_recipe()) gives another recipe")
    again.to_recipe(folder / "again.toml")
    other = Simulation.from_recipe(folder / "again.toml", data_dir=data, registries=registries())
    rounds = other.rounds()
    next(rounds)
    rounds.close()
    kept = folder / "resumed"
    shutil.copytree(other.folder, kept)
    resumed = resume(kept, data_dir=data, registries=registries())
    for key in ("sha256", "devices_sha256"):
        if resumed.manifest[key] != manifest[key]:
            raise Inconsistent(f"resumed after round 1, {key} differs")


# ---- hunting

QUIET = tuple(HealthCheck)
PATIENCE = 30  # seconds for a recipe
MEMORY = 6 * 2**30


@contextmanager
def hunting_ground() -> Iterator[Callable[[Document], Outcome]]:
    """`try_recipe` in a temporary folder that is emptied after every recipe."""
    before = Path.cwd()
    with TemporaryDirectory(prefix="recipes-") as home:
        os.chdir(home)
        write_files(Path(home))

        def attempt(document: Document) -> Outcome:
            with TemporaryDirectory(dir=home) as folder, warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", category=DeprecationWarning)
                return try_recipe(document, Path(folder))

        try:
            yield attempt
        finally:
            os.chdir(before)


@dataclass
class Finding:
    """A failure: the smallest recipe that has it, and how often it was seen."""

    recipe: str
    trace: str
    times: int = 1


def hunt(count: int, start: int, boldness: int, log: Callable[[str], None]) -> tuple[Counter[str], dict[str, Finding]]:
    """Try random recipes; failures of the same place in the code count as one."""
    outcomes: Counter[str] = Counter()
    findings: dict[str, Finding] = {}
    began = time.perf_counter()

    with hunting_ground() as attempt:

        @seed(start)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=QUIET,
            derandomize=False,
        )
        @given(recipes(boldness))
        def go(document: Document) -> None:
            _try(document, attempt, outcomes, findings, log)

        with suppress(KeyboardInterrupt):  # then what was found until now is printed
            go()
    outcomes["seconds"] = round(time.perf_counter() - began)
    return outcomes, findings


def _try(
    document: Document, attempt: Callable[[Document], Outcome], outcomes: Counter[str], findings: dict[str, Finding],
    log: Callable[[str], None],
) -> None:  # fmt: skip
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
    try:
        outcome = attempt(document)
        outcomes[outcome.kind] += 1
        outcomes.update(f"  {code}" for code in outcome.codes)
    except Exception as error:
        outcomes["failed"] += 1
        key, text = _place_of(error), dumps(document)
        known = findings.get(key)
        if known is None:
            log(f"{key}\n{text}\n{traceback.format_exc()}")
        if known is None or len(text) < len(known.recipe):
            findings[key] = Finding(text, "".join(traceback.format_exception(error)), known.times if known else 0)
        findings[key].times += 1
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if time.process_time() - began > 5:
        log(f"{time.process_time() - began:.1f} s:\n{dumps(document)}")


def sweep(log: Callable[[str], None]) -> tuple[Counter[str], dict[str, Finding]]:
    """Try every key with every odd value, each alone, in a recipe of every method and of every family."""
    outcomes: Counter[str] = Counter()
    findings: dict[str, Finding] = {}
    with hunting_ground() as attempt:
        for document in sweep_documents():
            _try(document, attempt, outcomes, findings, log)
    return outcomes, findings


def sweep_documents() -> Iterator[Document]:
    """Working recipes with one odd value each."""
    plain = beginning("heterofl", "convnet")
    themed = beginning("heterofl", "mlp")
    set_privacy(themed)
    timed = beginning("fedavg", "mlp")
    _set_speeds(timed)
    for place, hint in schema_keys().items():
        base = themed if place[0] == "privacy" else timed if place[0] == "faults" else plain
        yield from (
            _with(base, place, value) for value in unique(one for some in odd_values(hint, place) for one in some)
        )
    for name, hint in tier_keys().items():
        yield from (_with(plain, ("tiers", 1, name), value) for value in unique(odd_values(hint, ("tiers", name))[0]))
    for method in METHODS:
        base = beginning(method, families_that_fit(method)[0])
        for name, hint in settings_of(METHODS[method], "methods").items():
            yield from (_with(base, ("method", name), value) for value in _edges(hint, ("method", name)))
    for family in TINY_SETTINGS:
        base = beginning("standalone", family)
        for name, hint in settings_of(MODELS[family], "models").items():
            yield from (_with(base, ("model", name), value) for value in _edges(hint, ("model", name)))
    for place, kind in (*CHOICES.items(), (("evaluation", "metrics"), "metrics"), (("aggregation",), "aggregation")):
        for name, entry in getattr(registries(), kind).items():
            hints = settings_of(entry, kind)
            usual = {
                one: FILES[0] if hints[one] is str else 2 if hints[one] is int else 0.5
                for one in _required(entry, kind)
            }
            key = "rule" if kind == "aggregation" else "kind"
            for one, hint in {**hints, "": bool}.items():
                for value in _edges(hint, (kind, one)):
                    made = {key: name, **usual, **({one: value} if one else {})}
                    base = timed if place[0] == "faults" else plain
                    yield _with(base, place, [made] if kind == "metrics" else made)


def _edges(hint: Any, place: Place) -> list[Any]:
    edges, other = odd_values(hint, place)
    lists = [[], [1], [1, 1, 1, 1, 1, 1, 1], [3, 2], [0.5, 0.5], ["a"], [[]]]
    return unique([*edges, *lists, {}, {"small": 1.0}] if edges else other[:6])


def unique(values: Iterable[Any]) -> list[Any]:
    """Values without repetition; 1, 1.0 and True are three."""
    return list({repr(value): value for value in values}.values())


def _with(document: Document, place: Place, value: Any) -> Document:
    changed = tomllib.loads(dumps(document))
    _put(changed, place, value)
    return changed


def beginning(method: str, family: str) -> Document:
    """A recipe that works."""
    tiers, dataset = shapes_that_fit(method, family)[0], datasets_that_fit(method, family)[0]
    return {
        "rounds": 2,
        "data": {
            "dataset": dataset, "devices": 4, "max_examples": 5, "test_examples": 12,
            "public": {"examples": 8},
        },
        "model": {"family": family, **model_settings(family, read_data(dataset))},
        "tiers": [{"name": name, "share": 1 / len(tiers), **one} for name, one in zip(TIERS, tiers, strict=False)],
        "training": {"batch_size": 3},
        "method": {"name": method, **method_settings(method, len(tiers))},
    }  # fmt: skip


def _place_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "fedloom" in frame.filename]
    last = frames[-1] if frames else None
    if isinstance(error, RecipeError):
        return f"refused by the run, not by check: {error.issues[0].code} at {error.issues[0].key_path}"
    where = f"{Path(last.filename).name}:{last.lineno}" if last else "?"
    return (
        f"{type(error).__name__} at {where}: {str(error)[:100]!r}"
        if last is None
        else f"{type(error).__name__} at {where}"
    )


def _give_up(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {PATIENCE} s")


def _main() -> int:
    parser = argparse.ArgumentParser(
        description="Try random recipes, and print those that end otherwise than they should."
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--boldness", type=int, default=12, help="percentage of values at or beyond a bound")
    parser.add_argument("--sweep", action="store_true", help="instead: every key with every odd value")
    options = parser.parse_args()
    os.environ.setdefault("FEDLOOM_REPORT", "off")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGVTALRM, _give_up)

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    outcomes, findings = sweep(log) if options.sweep else hunt(options.count, options.seed, options.boldness, log)
    for key, finding in findings.items():
        print(f"{'=' * 20} {key} ({finding.times} times)\n{finding.recipe}\n{finding.trace}")
    for kind, times in sorted(outcomes.items(), key=lambda item: -item[1]):
        print(f"{times:6} {kind}")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(_main())

"""Which way a model runs: found out by trial when it first does, and kept; enough of a kind tell for the rest."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .blocks import Block, Skeleton, SlowBlock, Way, alone, fastest, is_random
from .inspection import layers, switches

if TYPE_CHECKING:
    from .model import Family, Model, Shapes


ENOUGH = 16
"""So many sizes of a kind are tried; if all run alike, further ones are taken to. A fleet has fewer; methods that draw
a sub-net for every step would do little else than try them."""

Fact = TypeVar("Fact")


@dataclass(frozen=True)
class Kind:
    """Nets of a family that differ in whole numbers alone, such as channels, depths and kernels, and are made of the
    same layers."""

    build: "Family"
    settings: tuple[tuple[str, Any], ...]
    layers: frozenset[Any]


def block_of(model: "Model", devices: int, training: bool, tracking: bool = False) -> Block:
    # a skeleton holds its module's constants, and those have a precision
    made = _alone if devices == 1 else _many
    return made(model, training, tracking, torch.get_default_dtype())


@lru_cache(maxsize=256)
def _skeleton(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> Skeleton:
    return Skeleton(model.module().to(dtype), training, tracking)


@lru_cache(maxsize=256)
def _alone(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    return alone(_skeleton(model, training, tracking, dtype), all_shapes(model), trial_examples(model))


@lru_cache(maxsize=256)
def _many(model: "Model", training: bool, tracking: bool, dtype: torch.dtype) -> Block:
    way, reasons = fastest_of(model, training, tracking)
    if reasons:
        warnings.warn(f"a slower way is used ({'; '.join(reasons)})", SlowBlock, stacklevel=2)
    return way(_skeleton(model, training, tracking, dtype))


@lru_cache(maxsize=256)
def fastest_of(model: "Model", training: bool, tracking: bool) -> tuple[Way, tuple[str, ...]]:
    def tried() -> tuple[Way, tuple[str, ...]]:
        skeleton = Skeleton(model.module().double(), training, tracking)
        return fastest(skeleton, all_shapes(model), trial_examples(model))

    return _like_others(_ways(_kind(model, training, tracking), training, tracking), tried)


@lru_cache(maxsize=256)
def trains_at_random(model: "Model") -> bool:
    def tried() -> bool:
        skeleton = _skeleton(model, True, False, torch.get_default_dtype())
        return is_random(skeleton, all_shapes(model), trial_examples(model))

    return _like_others(_draws(_kind(model, training=True, tracking=False)), tried)


def _like_others(known: list[Fact], tried: Callable[[], Fact]) -> Fact:
    """What all of enough others of its kind are; else as a trial finds, which is then known too."""
    if len(known) >= ENOUGH and len(set(known)) == 1:
        return known[0]
    known.append(tried())
    return known[-1]


@lru_cache(maxsize=256)
def _ways(kind: Kind, training: bool, tracking: bool) -> list[tuple[Way, tuple[str, ...]]]:
    """Those that trials have found; a list that grows."""
    return []


@lru_cache(maxsize=256)
def _draws(kind: Kind) -> list[bool]:
    return []


def _kind(model: "Model", training: bool, tracking: bool) -> Kind:
    module = _skeleton(model, training, tracking, torch.get_default_dtype()).module
    return Kind(model.build, switches(dict(model.settings)), layers(module))


def all_shapes(model: "Model") -> "Shapes":
    return {**model.shapes(), **model.statistics()}


def trial_examples(model: "Model") -> Tensor:
    """Two for each of three devices."""
    return model.sample(torch.Generator().manual_seed(0), 3, 2)

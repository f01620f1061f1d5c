"""Which way a model runs: found out by trial when the first of its kind does, and kept."""

import warnings
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .blocks import Block, Skeleton, SlowBlock, Way, alone, fastest, is_random
from .inspection import layers, switches

if TYPE_CHECKING:
    from .model import Family, Model, Shapes


@dataclass(frozen=True)
class Kind:
    """Nets of a family that differ in whole numbers alone, such as channels, depths and kernels, and are made of the
    same layers: a trial of one tells for all. Methods that draw a sub-net for every step would try little else."""

    build: "Family"
    settings: tuple[tuple[str, Any], ...]
    layers: frozenset[Any]
    example: "Model" = field(compare=False)


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
    return _fastest_of_kind(_kind(model, training, tracking), training, tracking)


@lru_cache(maxsize=256)
def _fastest_of_kind(kind: Kind, training: bool, tracking: bool) -> tuple[Way, tuple[str, ...]]:
    model = kind.example
    skeleton = Skeleton(model.module().double(), training, tracking)
    return fastest(skeleton, all_shapes(model), trial_examples(model))


@lru_cache(maxsize=256)
def trains_at_random(model: "Model") -> bool:
    return _kind_trains_at_random(_kind(model, training=True, tracking=False))


@lru_cache(maxsize=256)
def _kind_trains_at_random(kind: Kind) -> bool:
    model = kind.example
    skeleton = _skeleton(model, True, False, torch.get_default_dtype())
    return is_random(skeleton, all_shapes(model), trial_examples(model))


def _kind(model: "Model", training: bool, tracking: bool) -> Kind:
    module = _skeleton(model, training, tracking, torch.get_default_dtype()).module
    return Kind(model.build, switches(dict(model.settings)), layers(module), model)


def all_shapes(model: "Model") -> "Shapes":
    return {**model.shapes(), **model.statistics()}


def trial_examples(model: "Model") -> Tensor:
    """Two for each of three devices."""
    return model.sample(torch.Generator().manual_seed(0), 3, 2)

"""Which way a model runs: found out by trial when it first does, and kept."""

import warnings
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .blocks import Block, Skeleton, SlowBlock, Way, alone, fastest, is_random

if TYPE_CHECKING:
    from .model import Model, Shapes


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
    skeleton = Skeleton(model.module().double(), training, tracking)
    return fastest(skeleton, all_shapes(model), trial_examples(model))


@lru_cache(maxsize=256)
def trains_at_random(model: "Model") -> bool:
    skeleton = _skeleton(model, True, False, torch.get_default_dtype())
    return is_random(skeleton, all_shapes(model), trial_examples(model))


def all_shapes(model: "Model") -> "Shapes":
    return {**model.shapes(), **model.statistics()}


def trial_examples(model: "Model") -> Tensor:
    """Two for each of three devices."""
    return model.sample(torch.Generator().manual_seed(0), 3, 2)

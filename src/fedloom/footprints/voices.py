"""Rings: the entries of a model on which the same voices are heard."""

from collections.abc import Iterable, Mapping

import torch
from torch import Size, Tensor

from ..tensors import Tensors
from .coverage import Contribution, Merge
from .footprint import Footprint, grid


def voices(shapes: Mapping[str, Size], heard: Iterable[tuple[Footprint, int]]) -> dict[str, Tensor]:
    """For every entry the sum of the numbers of those who cover it: ones count, powers of two tell who they are."""
    found = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for footprint, amount in heard:
        for name, block in footprint.blocks.items():
            if name in found:
                found[name][grid(found[name], block)] += amount
    return found


def thin_rings_stay(merge: Merge, least: int) -> Merge:
    """The same, but entries with fewer voices than that stay bit for bit."""

    def merged(whole: Tensors, contributions: Iterable[Contribution]) -> dict[str, Tensor]:
        said = list(contributions)
        shapes = {name: old.shape for name, old in whole.items()}
        count = voices(shapes, ((one.footprint, 1) for one in said if one.weight > 0))
        made = merge(whole, said)
        return {name: torch.where(count[name] >= least, made[name], old) for name, old in whole.items()}

    return merged

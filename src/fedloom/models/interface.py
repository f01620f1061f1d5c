"""What a model reads: numbers of a shape, or the ids of tokens.

The exits and taps of a module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Inputs:
    """One example's shape; where it is made of tokens, how many different ids there are."""

    shape: tuple[int, ...]
    tokens: int | None = None

    def blank(self, *leading: int) -> Tensor:
        """Made-up examples, all zero."""
        return torch.zeros(*leading, *self.shape, dtype=None if self.tokens is None else torch.int64)

    def sample(self, draw: torch.Generator, *leading: int) -> Tensor:
        """Made-up examples, drawn at random."""
        if self.tokens is None:
            return torch.randn(*leading, *self.shape, generator=draw)
        return torch.randint(self.tokens, (*leading, *self.shape), generator=draw)

    def passed_on(self, seen: Tensor) -> "Inputs":
        """What a part of the model reads, that gets `seen` of a batch."""
        return Inputs(tuple(seen.shape[1:]), None if seen.is_floating_point() else self.tokens)


def sequence(input_shape: tuple[int, ...], tokens: int | None) -> tuple[int, int]:
    """The length of a row of tokens and how many different ones there are; other examples are refused."""
    if tokens is None or len(input_shape) != 1:
        raise ValueError(f"it reads rows of tokens, and an example here is numbers of the shape {input_shape}")
    return input_shape[0], tokens


class Outputs(NamedTuple):
    """What a module makes of a batch; a module that returns one tensor has one exit."""

    exits: Mapping[str, Tensor]  # exit name -> logits [K, batch, (length,) classes], shallow to deep
    taps: Mapping[
        str, Tensor
    ]  # stage name -> features [K, batch, channels, ...]; "features" is what the last layer gets

    @property
    def logits(self) -> Tensor:
        return list(self.exits.values())[-1]


def as_outputs(made: Any) -> Outputs:
    return made if isinstance(made, Outputs) else Outputs({"logits": made}, {})

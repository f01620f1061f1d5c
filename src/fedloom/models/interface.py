"""What goes into a model and what comes out of it: numbers or token ids in, exits and taps out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Family = Callable[..., nn.Module]
Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class InputSpec:
    """The shape of one example and, if it consists of tokens, the number of different token ids."""

    shape: tuple[int, ...]
    tokens: int | None = None

    def zeros(self, *leading: int) -> Tensor:
        """All-zero examples behind these leading axes."""
        return torch.zeros(*leading, *self.shape, dtype=None if self.tokens is None else torch.int64)

    def random(self, generator: torch.Generator, *leading: int) -> Tensor:
        """Random examples behind these leading axes."""
        if self.tokens is None:
            return torch.randn(*leading, *self.shape, generator=generator)
        return torch.randint(self.tokens, (*leading, *self.shape), generator=generator)

    def for_submodule(self, batch: Tensor) -> "InputSpec":
        """The input of a submodule that receives `batch` [batch, ...] when the whole module runs."""
        return InputSpec(tuple(batch.shape[1:]), None if batch.is_floating_point() else self.tokens)


def check_token_input(input_shape: tuple[int, ...], tokens: int | None) -> tuple[int, int]:
    """The sequence length and the number of token ids; raises for examples that are not token sequences."""
    if tokens is None or len(input_shape) != 1:
        raise ValueError(f"it needs sequences of tokens, but an example here is numbers of the shape {input_shape}")
    return input_shape[0], tokens


class Outputs(NamedTuple):
    """The outputs of a module for a batch; a module that returns one tensor has one exit."""

    exits: Mapping[str, Tensor]  # exit name -> logits [K, batch, (length,) classes], shallow to deep
    taps: Mapping[str, Tensor]  # stage name -> [K, batch, channels, ...]; "features" is the last layer's input

    @property
    def logits(self) -> Tensor:
        return list(self.exits.values())[-1]


def as_outputs(result: Any) -> Outputs:
    """Wrap what a module's forward returned."""
    return result if isinstance(result, Outputs) else Outputs({"logits": result}, {})

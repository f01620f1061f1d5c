"""Two models, one behind the other, as one: the second gets what the first makes."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .interface import as_outputs
from .model import Model


@dataclass(frozen=True)
class Chain:
    """Builds both. A value, so that equal chains are equal models."""

    first: Model
    second: Model

    def __call__(self, **settings: Any) -> nn.Module:
        return Chained(self.first.module(), self.second.module())


class Chained(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return as_outputs(self.second(as_outputs(self.first(x)).logits)).logits


def chained(first: Model, second: Model) -> Model:
    """Their weights are named `first.…` and `second.…`."""
    family, build = f"{first.family}+{second.family}", Chain(first, second)
    return Model(family, build, (), first.input_shape, second.classes, first.tokens)

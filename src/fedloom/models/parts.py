"""A child of a family's module as a family of its own."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Child:
    """Builds the whole module and hands out one child of it: the same settings give the same weights.

    A value, so that models of equal parts are equal, here and in other processes.
    """

    whole: Callable[..., nn.Module]
    name: str

    def __call__(self, **settings: Any) -> nn.Module:
        return self.whole(**settings).get_submodule(self.name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.whole)

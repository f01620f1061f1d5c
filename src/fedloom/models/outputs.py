"""The exits and taps of a module."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor


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

"""The sizes a model may be cut to: a space of choices, setting by setting (FedSup's supernet, FjORD's widths).

A choice is a plain value of a setting, so every sub-net is the same family at another size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import cost
from .model import Model

Choices = tuple[Any, ...]
"""Of one setting: values to choose from; where the setting is a list, such values for each of its places."""

TRIES = 10_000


@dataclass(frozen=True)
class Space:
    """Setting -> choices, from small to large."""

    choices: tuple[tuple[str, Choices], ...]

    def smallest(self, whole: Model) -> Model:
        return self._resized(whole, lambda values: values[0])

    def largest(self, whole: Model) -> Model:
        return self._resized(whole, lambda values: values[-1])

    def draw(self, whole: Model, draw: np.random.Generator) -> Model:
        return self._resized(whole, lambda values: values[int(draw.integers(len(values)))])

    def draw_within(self, whole: Model, draw: np.random.Generator, macs: float) -> Model:
        """Drawn again and again until it costs no more."""
        for _ in range(TRIES):
            net = self.draw(whole, draw)
            if cost(net).macs <= macs:
                return net
        return self.smallest(whole)

    def count(self) -> int:
        """How many sub-nets there are."""
        return math.prod(len(values) for _, choices in self.choices for values in _places(choices))

    def _resized(self, whole: Model, pick: Callable[[Choices], Any]) -> Model:
        return whole.resized(**{name: _picked(choices, pick) for name, choices in self.choices})


def space_of(models: Sequence[Model]) -> Space:
    """What the sizes of a fleet differ in, freely mixed."""
    settings = [model.spelled_out() for model in models]
    names = {name for one in settings for name, value in one.items() if value != settings[0].get(name)}
    return space({name: _mixed(name, [one[name] for one in settings]) for name in names})


def space(choices: Mapping[str, Choices]) -> Space:
    return Space(tuple(sorted((name, _ascending(values)) for name, values in choices.items())))


def _mixed(name: str, values: Sequence[Any]) -> Choices:
    if not any(isinstance(value, tuple) for value in values):
        return tuple(set(values))
    if len({len(value) if isinstance(value, tuple) else 0 for value in values}) > 1:
        raise ValueError(f"{name} is a list of different length in different sizes, so there is nothing in between")
    return tuple(tuple(set(place)) for place in zip(*values, strict=True))


def _by_place(choices: Choices) -> bool:
    return isinstance(choices[0], tuple)


def _places(choices: Choices) -> Iterator[Choices]:
    yield from choices if _by_place(choices) else (choices,)


def _picked(choices: Choices, pick: Callable[[Choices], Any]) -> Any:
    return tuple(pick(values) for values in choices) if _by_place(choices) else pick(choices)


def _ascending(choices: Choices) -> Choices:
    """None, which stands for all there is, comes last."""
    if _by_place(choices):
        return tuple(_in_order(values) for values in choices)
    return _in_order(choices)


def _in_order(values: Choices) -> Choices:
    return tuple(sorted(values, key=lambda value: (value is None, value if isinstance(value, tuple) else (value,))))

"""The sizes a model may be sliced to: a search space of choices per setting (FedSup's supernet, FjORD's widths).

A choice is a plain value of a setting, so every subnet is the same family at another size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cost import compute_cost
from .model import Model

Choices = tuple[Any, ...]
"""The values of one setting, or, if the setting is a list, a tuple of values for each of its positions."""

TRIES = 10_000


@dataclass(frozen=True)
class SearchSpace:
    """The sizes that a model may be sliced to: choices for some of its settings.

    Parameters
    ----------
    choices : pairs of a setting and its choices, from small to large. `make_space` makes them from a dict.
    """

    choices: tuple[tuple[str, Choices], ...]

    def smallest(self, model: Model) -> Model:
        """The smallest choice of every setting.

        Parameters
        ----------
        model : the model whose settings are changed.
        """
        return self._resize(model, lambda values: values[0])

    def largest(self, model: Model) -> Model:
        """The largest choice of every setting.

        Parameters
        ----------
        model : the model whose settings are changed.
        """
        return self._resize(model, lambda values: values[-1])

    def sample(self, model: Model, generator: np.random.Generator) -> Model:
        """A random choice of every setting.

        Parameters
        ----------
        model : the model whose settings are changed.
        generator : the source of randomness.
        """
        return self._resize(model, lambda values: values[int(generator.integers(len(values)))])

    def sample_within(self, model: Model, generator: np.random.Generator, macs: float) -> Model:
        """Sample until a subnet fits a budget; the smallest one if that never happens.

        Parameters
        ----------
        model : the model whose settings are changed.
        generator : the source of randomness.
        macs : the budget, in multiply-adds of one example.
        """
        for _ in range(TRIES):
            subnet = self.sample(model, generator)
            if compute_cost(subnet).macs <= macs:
                return subnet
        return self.smallest(model)

    def count(self) -> int:
        """The number of subnets."""
        return math.prod(len(values) for _, choices in self.choices for values in _positions(choices))

    def contains(self, net: Model, model: Model) -> bool:
        """True if a net is one of the subnets.

        Parameters
        ----------
        net : the net.
        model : the model whose settings are changed.
        """
        settings, names = net.full_settings(), [name for name, _ in self.choices]
        resized = model.with_settings(**{name: settings[name] for name in names if name in settings})
        return resized.is_equivalent(net) and all(
            _is_choice(settings[name], choices) for name, choices in self.choices if name in settings
        )

    def _resize(self, model: Model, pick: Callable[[Choices], Any]) -> Model:
        return model.with_settings(**{name: _pick(choices, pick) for name, choices in self.choices})


def space_from_models(models: Sequence[Model]) -> SearchSpace:
    """The space spanned by some sizes of a family: every setting in which they differ, in all combinations.

    Parameters
    ----------
    models : the sizes.
    """
    settings = [model.full_settings() for model in models]
    names = {name for values in settings for name, value in values.items() if value != settings[0].get(name)}
    return make_space({name: _combine(name, [values[name] for values in settings]) for name in names})


def make_space(choices: Mapping[str, Choices]) -> SearchSpace:
    """A search space from a dict; the choices are sorted from small to large.

    Parameters
    ----------
    choices : setting -> its choices or, if the setting is a list, the choices of each position.
    """
    return SearchSpace(tuple(sorted((name, _ascending(values)) for name, values in choices.items())))


def _combine(name: str, values: Sequence[Any]) -> Choices:
    if not any(isinstance(value, tuple) for value in values):
        return tuple(set(values))
    if len({len(value) if isinstance(value, tuple) else 0 for value in values}) > 1:
        raise ValueError(f"{name} is a list of different length in different sizes, so there is nothing in between")
    return tuple(tuple(set(position)) for position in zip(*values, strict=True))


def is_per_layer(choices: Choices) -> bool:
    return isinstance(choices[0], tuple)


def _positions(choices: Choices) -> Iterator[Choices]:
    yield from choices if is_per_layer(choices) else (choices,)


def _pick(choices: Choices, pick: Callable[[Choices], Any]) -> Any:
    return tuple(pick(values) for values in choices) if is_per_layer(choices) else pick(choices)


def _is_choice(value: Any, choices: Choices) -> bool:
    """True if a setting's value is among its choices, position by position."""
    if not is_per_layer(choices):
        return value in choices
    return len(value) == len(choices) and all(one in values for one, values in zip(value, choices, strict=True))


def _ascending(choices: Choices) -> Choices:
    if is_per_layer(choices):
        return tuple(_sort(values) for values in choices)
    return _sort(choices)


def _sort(values: Choices) -> Choices:
    """None, which stands for the full size, comes last."""
    return tuple(sorted(values, key=lambda value: (value is None, value if isinstance(value, tuple) else (value,))))

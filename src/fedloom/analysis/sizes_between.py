"""The sizes between the tiers of a run: every width, depth and kernel size that can be cut out of its largest model.

Tiers span a range of each setting in which they differ. A value in between is a choice if the family can build it and
the result is a slice of the largest model.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..footprints import subnet_footprint
from ..models import Model, SearchSpace, make_space

WIDTH_STEP = 100  # fractions are tried in steps of 1 / WIDTH_STEP
MOST_VALUES = 16  # of a whole number between two tiers: layers may have hundreds of channels

Resize = Callable[[Any], Model]
"""From a value of one setting, or of one of its positions, to the model with it."""


def is_slice(small: Model, large: Model) -> bool:
    """True if one size can be built, computes logits and lies in the other.

    Parameters
    ----------
    small : the small size.
    large : the large size.
    """
    try:
        subnet_footprint(small, large)
        small.check_output_size()
    except Exception:  # a model family may raise any exception for a size it cannot build
        return False
    return True


def space_between(models: Sequence[Model], largest: Model) -> SearchSpace:
    """The space of all sizes between some sizes of a family.

    Fractions, such as a width, are tried in steps of 0.01, of which those are left out that give the same shapes as
    another; whole numbers one by one, or in at most 16 steps. What is no number has the values of the sizes themselves,
    and a list that has nothing in between that of the largest.

    Parameters
    ----------
    models : the sizes, with all settings spelled out.
    largest : the one that all are cut out of.
    """
    settings = [model.full_settings() for model in models]
    names = {name for values in settings for name, value in values.items() if value != settings[0].get(name)}
    found = {name: _choices(name, [values[name] for values in settings], largest) for name in sorted(names)}
    return make_space({name: choices for name, choices in found.items() if choices is not None})


def _choices(name: str, values: Sequence[Any], largest: Model) -> tuple[Any, ...] | None:
    """None if a list has no values in between, because lengths differ or its positions depend on each other."""
    if not any(isinstance(value, tuple) for value in values):
        return _values_between(values, lambda value: largest.with_settings(**{name: value}), largest)
    if len({len(value) if isinstance(value, tuple) else 0 for value in values}) > 1:
        return None
    full = tuple(dict(largest.full_settings())[name])
    positions = []
    for index, column in enumerate(zip(*values, strict=True)):

        def resize(value: Any, index: int = index) -> Model:
            return largest.with_settings(**{name: (*full[:index], value, *full[index + 1 :])})

        if not all(is_slice(resize(value), largest) for value in column):
            return None
        positions.append(_values_between(column, resize, largest))
    return tuple(positions)


def _values_between(values: Sequence[Any], resize: Resize, largest: Model) -> tuple[Any, ...]:
    """The given values and those between them whose models are slices with shapes of their own."""
    given = tuple(dict.fromkeys(values))
    shapes = {_shape_key(model) for model in map(resize, given) if is_slice(model, largest)}
    found = list(given)
    for value in _candidates(given):
        model = resize(value)
        if is_slice(model, largest) and (key := _shape_key(model)) not in shapes:
            shapes.add(key)
            found.append(value)
    return tuple(found)


def _candidates(values: Sequence[Any]) -> Iterator[Any]:
    """Values between the given ones; None stands for the full size, so all larger ones lie before it."""
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) + (None in values) < len(values) or not numbers:
        return
    if all(isinstance(number, int) for number in numbers):
        yield from _whole_numbers(int(min(numbers)), None if None in values else int(max(numbers)))
        return
    least, most = min(numbers), max(numbers)
    steps = (step / WIDTH_STEP for step in range(int(least * WIDTH_STEP), int(most * WIDTH_STEP) + 1))
    yield from (value for value in steps if least < value < most)


def _whole_numbers(least: int, most: int | None) -> Iterator[int]:
    """Evenly spaced ones above `least` and below `most`, or above `least` only."""
    count = MOST_VALUES if most is None else most - least - 1
    steps = min(count, MOST_VALUES)
    yield from (least + round(step * count / steps) for step in range(1, steps + 1))


def _shape_key(model: Model) -> tuple[Any, ...]:
    return tuple(model.shapes().items())

"""A model: a family and its settings, as a pure function of the weights of a block of devices.

A family is any function from keyword settings to a plain `nn.Module`. How two models of a family relate is never
written down: it is found by comparing the shapes of their weights.

A child of a family's module as a family of its own.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..seeds import INITIAL_WEIGHTS, number
from ..tensors import Tensors
from . import structure
from .batching import (
    all_shapes,
    block_of,
    fastest_of,
    seeded,
    statistic_slots,
    trains_at_random,
    trial,
    trial_examples,
)
from .interface import Inputs, Outputs


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


Family = Callable[..., nn.Module]
Shapes = Mapping[str, torch.Size]
Fact = TypeVar("Fact")


@dataclass(frozen=True)
class StepSeeds:
    """Training mode, and where its randomness comes from: one seed per device, for this step alone."""

    per_device: tuple[int, ...]
    common: int = 0  # one for all devices of an experiment, for this step


@dataclass(frozen=True)
class Model:
    family: str
    build: Family
    settings: tuple[tuple[str, Any], ...]
    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None  # how many different ones, where inputs are tokens; else they are numbers

    def __call__(self, weights: Tensors, x: Tensor, step_seeds: StepSeeds | None = None) -> Outputs:
        """[K, ...] weights and [K, batch, ...] inputs -> outputs with the devices in front."""
        if step_seeds is None:
            self._require_statistics(weights)
            block = block_of(self, len(x), training=False)
        elif trains_at_random(self):
            block = seeded(block_of(self, 1, training=True), step_seeds.per_device)
        else:
            block = block_of(self, len(x), training=True)
        return block(weights, x)[0]

    def features(self, weights: Tensors, x: Tensor) -> Tensor:
        """The representation [K, batch, d] that the last layer gets; differentiable in the weights.

        As the model is judged, except that batch norm goes by the batch's own statistics: a device has no others.
        """
        made, _ = block_of(self, len(x), training=False, tracking=bool(self.statistics()))(weights, x)
        if "features" not in made.taps:
            raise ValueError(f"{self.family} shows no features: its last layer gets no batch of numbers to look at")
        return made.taps["features"].flatten(2)

    def batch_statistics(self, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
        """What every batch norm sees in this batch: its mean and unbiased variance, [K, channels] each.

        As the model is judged, not as it trains: statistics taken with the width scaler on would be of other numbers.
        """
        return block_of(self, len(x), training=False, tracking=True)(weights, x)[1]

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.input_shape, self.tokens)

    def blank(self, *leading: int) -> Tensor:
        """Made-up inputs, all zero, behind these leading axes."""
        return self.inputs.blank(*leading)

    def sample(self, draw: torch.Generator, *leading: int) -> Tensor:
        """Made-up inputs, drawn at random."""
        return self.inputs.sample(draw, *leading)

    def shapes(self) -> Shapes:
        """Of the weights, which are trained and sent."""
        return _shapes(self)[0]

    def statistics(self) -> Shapes:
        """Of the normalization statistics, which are neither; empty for most normalizations."""
        return _shapes(self)[1]

    def initial(self, seed: int) -> dict[str, Tensor]:
        """The weights as the family draws them."""
        return dict(_initial(self, seed, torch.get_default_dtype()))

    def module(self, seed: int = 0) -> nn.Module:
        """The plain module, drawn from a seed without touching anybody else's randomness."""
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # it outlives whoever first asked for it
            torch.manual_seed(seed)
            return self.build(**dict(self.settings)).to(torch.get_default_dtype())

    def fits_the_data(self) -> None:
        """Raise unless the module makes one logit per class out of examples of the right shape."""
        made = _found(self, structure.logits_made, self.inputs)
        if made != self.classes:
            raise ValueError(f"it makes {made} logits where the data has {self.classes} classes")

    def resized(self, **changes: Any) -> "Model":
        """Another size of the same family."""
        return replace(self, settings=tuple(sorted({**dict(self.settings), **changes}.items())))

    def feature_width(self) -> int:
        """How long the representation of one example is."""
        return _feature_width(self)

    def part(self, name: str) -> "Model":
        """A child of the module as a model of its own, on what it gets when the whole runs; its names lose the prefix.

        Its `classes` are whatever it ends in.
        """
        return _part(self, name)

    def has_parts(self, *names: str) -> bool:
        return set(names) <= set(_found(self, structure.children))

    def part_weights(self, name: str, weights: Tensors) -> dict[str, Tensor]:
        """Those of a child, under the child's own names."""
        _require_part(self, name)
        prefix = f"{name}."
        return {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}

    def is_the_same_as(self, other: "Model") -> bool:
        """Also where one of them leaves to the family what the other says."""
        return self == other or (self.build == other.build and self.spelled_out() == other.spelled_out())

    def spelled_out(self) -> dict[str, Any]:
        """All settings, also those that are left to the family."""
        named = inspect.signature(self.build).parameters
        return {**{name: p.default for name, p in named.items() if p.default is not p.empty}, **dict(self.settings)}

    def label_rows(self) -> tuple[str, ...]:
        """The weights that have one row per class: those of the last layer, or what the module names itself."""
        return _found(self, structure.label_rows, self.classes)

    def head(self) -> tuple[str, ...]:
        """The weights of the last layer: those with exactly one row per class."""
        return tuple(name for name in self.label_rows() if self.shapes()[name][0] == self.classes)

    def behind_last_exit(self) -> tuple[str, ...]:
        """The weights that the last exit depends on: all but those of earlier exits' own heads."""
        return _found(self, structure.behind_last_exit, self.inputs)

    def mixes_examples(self) -> bool:
        """Whether what it makes of an example, when judged, depends on the others in the batch."""
        return _mixes_examples(self)

    def folds(self) -> bool:
        """Whether many devices are meant to run as one wide network; families of text say that they are not."""
        return _found(self, structure.folds)

    def slow_reasons(self) -> tuple[str, ...]:
        """Why many devices train more slowly than they could; empty where they do not."""
        return fastest_of(self, True, False)[1]

    def unsliceable(self) -> tuple[str, ...]:
        """Weights of layers that stack several things on one axis, so that its first part means nothing."""
        return _found(self, structure.unsliceable)

    def _require_statistics(self, weights: Tensors) -> None:
        missing = [name for name in self.statistics() if name not in weights]
        if missing:
            raise ValueError(f"{self.family} is judged with batch-norm statistics; {missing[0]} was not given")


def model(
    family: str,
    build: Family,
    settings: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    tokens: int | None = None,
) -> Model:
    """A model of a family; what the data decides is passed on if the family names it."""
    facts = {"input_shape": input_shape, "classes": classes, "tokens": tokens}
    named = inspect.signature(build).parameters
    known = {name: fact for name, fact in facts.items() if name in named}
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise TypeError(f"{name} = {value!r} cannot be a setting: use a number, a text, a list or a truth value")
    return Model(family, build, tuple(sorted({**known, **settings}.items())), input_shape, classes, tokens)


def _found(model: Model, find: Callable[..., Fact], *facts: Hashable) -> Fact:
    """What an inspection of a fresh module says; asked once."""
    return cast(Fact, _kept(model, find, facts))


@lru_cache(maxsize=8192)
def _kept(model: Model, find: Callable[..., Any], facts: tuple[Hashable, ...]) -> Any:
    return find(model.module(), *facts)


@lru_cache(maxsize=1024)
def _shapes(model: Model) -> tuple[Shapes, Shapes]:
    module = model.module()
    weights = {name: weight.shape for name, weight in module.named_parameters()}
    return weights, {name: holder[key].shape for name, (holder, key) in statistic_slots(module).items()}


@lru_cache(maxsize=32)
def _initial(model: Model, seed: int, dtype: torch.dtype) -> Tensors:
    """Kept, so that ten thousand devices that start alike hold one copy between them."""
    module = model.module(number(seed, INITIAL_WEIGHTS))
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@lru_cache(maxsize=1024)
def _mixes_examples(model: Model) -> bool:
    weights, x = trial(all_shapes(model), trial_examples(model), torch.get_default_dtype())
    with torch.no_grad():
        together, alone = model(weights, x), model(weights, x[:, :1])
    return not torch.allclose(together.logits[:, :1], alone.logits, rtol=1e-3, atol=1e-5)


def _require_part(model: Model, name: str) -> None:
    if not model.has_parts(name):
        known = ", ".join(_found(model, structure.children)) or "none"
        raise ValueError(f"{model.family} has no part {name!r}; its parts are: {known}")


@lru_cache(maxsize=1024)
def _part(model: Model, name: str) -> Model:
    _require_part(model, name)
    inputs = structure.input_of(model.module(), name, model.inputs)
    made = Model(f"{model.family}.{name}", Child(model.build, name), model.settings, inputs.shape, 0, inputs.tokens)
    return replace(made, classes=_found(made, structure.logits_made, inputs))


@lru_cache(maxsize=1024)
def _feature_width(model: Model) -> int:
    weights = {name: torch.zeros(1, *shape) for name, shape in model.shapes().items()}
    with torch.no_grad():
        return model.features(weights, model.blank(1, 2)).shape[-1]

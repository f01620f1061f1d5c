"""A model: a family and its settings, as a pure function of the weights of a block of devices.

A family is any function from keyword settings to a plain `nn.Module`. How two models of a family relate is never
declared: it is found by comparing the shapes of their weights.
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
    batching_mode,
    block_forward,
    is_stochastic,
    seed_each_device,
    statistic_slots,
    trial_batch,
    trial_inputs,
)
from .structure import Family, InputSpec, Outputs, Shapes, as_outputs

InspectedT = TypeVar("InspectedT")


@dataclass(frozen=True)
class StepSeeds:
    """Selects training mode and seeds its random layers: one seed per device, for one training step."""

    per_device: tuple[int, ...]
    common: int = 0  # the same for all devices of an experiment in this step


@dataclass(frozen=True)
class Model:
    """A family at one size. Calling it runs a block of devices; `module()` gives the plain `nn.Module`."""

    family: str
    build: Family
    settings: tuple[tuple[str, Any], ...]
    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None  # number of token ids, if inputs are tokens instead of numbers

    def __call__(self, weights: Tensors, x: Tensor, step_seeds: StepSeeds | None = None) -> Outputs:
        """Run K devices: weights [K, ...] and x [K, batch, ...] -> exits and taps [K, batch, ...].

        With `step_seeds` in training mode. Evaluation needs the normalization statistics among the weights.
        """
        if step_seeds is None:
            self._require_statistics(weights)
            forward = block_forward(self, len(x), training=False)
        elif is_stochastic(self):
            forward = seed_each_device(block_forward(self, 1, training=True), step_seeds.per_device)
        else:
            forward = block_forward(self, len(x), training=True)
        return forward(weights, x)[0]

    def features(self, weights: Tensors, x: Tensor) -> Tensor:
        """The representation [K, batch, d] that the last layer receives; differentiable in the weights.

        In evaluation mode, except that batch norm uses the batch's statistics: a device has no others.
        """
        forward = block_forward(self, len(x), training=False, tracking=bool(self.statistics()))
        outputs, _ = forward(weights, x)
        if "features" not in outputs.taps:
            raise ValueError(f"{self.family} has no features: the input of its last layer is no batch of numbers")
        return outputs.taps["features"].flatten(2)

    def batch_statistics(self, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
        """The mean and unbiased variance that every batch norm sees in this batch, [K, channels] each.

        In evaluation mode: in training the width scaler would change the numbers that are normalized.
        """
        return block_forward(self, len(x), training=False, tracking=True)(weights, x)[1]

    @property
    def inputs(self) -> InputSpec:
        return InputSpec(self.input_shape, self.tokens)

    def zero_inputs(self, *leading: int) -> Tensor:
        """All-zero inputs behind these leading axes."""
        return self.inputs.zeros(*leading)

    def random_inputs(self, generator: torch.Generator, *leading: int) -> Tensor:
        """Random inputs behind these leading axes."""
        return self.inputs.random(generator, *leading)

    def shapes(self) -> Shapes:
        """Of the weights, which are trained and sent."""
        return _shapes(self)[0]

    def statistics(self) -> Shapes:
        """Of the normalization statistics, which are neither trained nor sent; empty for most normalizations."""
        return _shapes(self)[1]

    def initial_weights(self, seed: int) -> dict[str, Tensor]:
        """The weights as the family initializes them."""
        return dict(_initial_weights(self, seed, torch.get_default_dtype()))

    def module(self, seed: int = 0) -> nn.Module:
        """The plain module, initialized from a seed without advancing torch's global generator."""
        with torch.inference_mode(False), torch.random.fork_rng(devices=[]):  # it may outlive the caller's context
            torch.manual_seed(seed)
            return self.build(**dict(self.settings)).to(torch.get_default_dtype())

    def check_output_size(self) -> None:
        """Raise unless the module accepts examples of the data's shape and computes one logit per class."""
        logits = _inspect(self, structure.count_logits, self.inputs)
        if logits != self.classes:
            raise ValueError(f"it makes {logits} logits where the data has {self.classes} classes")

    def with_settings(self, **changes: Any) -> "Model":
        """The same family with some settings changed, such as another size."""
        return replace(self, settings=tuple(sorted({**dict(self.settings), **changes}.items())))

    def full_settings(self) -> dict[str, Any]:
        """All settings, including those left to the family's defaults."""
        named = inspect.signature(self.build).parameters
        return {**{name: p.default for name, p in named.items() if p.default is not p.empty}, **dict(self.settings)}

    def is_equivalent(self, other: "Model") -> bool:
        """True if both are the same model, whether or not they spell out the family's defaults."""
        return self == other or (self.build == other.build and self.full_settings() == other.full_settings())

    def feature_width(self) -> int:
        """The length of one example's representation."""
        return _feature_width(self)

    def submodel(self, name: str) -> "Model":
        """A child of the module as a model of its own, on the input that it receives when the whole module runs.

        Its weight names lose the prefix, and `classes` is the length of its output.
        """
        return _submodel(self, name)

    def has_children(self, *names: str) -> bool:
        return set(names) <= set(_inspect(self, structure.child_names))

    def submodel_weights(self, name: str, weights: Tensors) -> dict[str, Tensor]:
        """The weights of a child under the names that `submodel(name)` uses."""
        _require_child(self, name)
        prefix = f"{name}."
        return {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}

    def label_rows(self) -> tuple[str, ...]:
        """The weights with one row per class: those of the last layer, or those that the module declares."""
        return _inspect(self, structure.label_rows, self.classes)

    def head(self) -> tuple[str, ...]:
        """The weights of the last layer: those with exactly one row per class."""
        return tuple(name for name in self.label_rows() if self.shapes()[name][0] == self.classes)

    def last_exit_weights(self) -> tuple[str, ...]:
        """The weights that the last exit depends on: all but the heads of earlier exits."""
        return _inspect(self, structure.last_exit_weights, self.inputs)

    def is_batch_dependent(self) -> bool:
        """True if, in evaluation, the output for an example depends on the rest of its batch."""
        return _is_batch_dependent(self)

    def is_foldable(self) -> bool:
        """False for families, such as those of text, that declare that their layers cannot be folded."""
        return _inspect(self, structure.is_foldable)

    def fallback_reasons(self) -> tuple[str, ...]:
        """Why many devices train in a slower batching mode; empty if they do not."""
        return batching_mode(self, True, False)[1]

    def unsliceable(self) -> tuple[str, ...]:
        """Weights of layers that stack several things along one axis, so that a slice of it is no smaller layer."""
        return _inspect(self, structure.unsliceable)

    def _require_statistics(self, weights: Tensors) -> None:
        missing = [name for name in self.statistics() if name not in weights]
        if missing:
            raise ValueError(f"{self.family} needs batch-norm statistics for evaluation; {missing[0]} is missing")


def build_model(
    family: str,
    build: Family,
    settings: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    tokens: int | None = None,
) -> Model:
    """A model of a family; properties of the data are passed on if the family has parameters for them."""
    data_properties = {"input_shape": input_shape, "classes": classes, "tokens": tokens}
    named = inspect.signature(build).parameters
    known = {name: value for name, value in data_properties.items() if name in named}
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise TypeError(f"{name} = {value!r} cannot be a setting: use a number, a string, a list or a boolean")
    return Model(family, build, tuple(sorted({**known, **settings}.items())), input_shape, classes, tokens)


def chain_models(first: Model, second: Model) -> Model:
    """A model that feeds the output of `first` to `second`; its weights are named `first.…` and `second.…`."""
    family, build = f"{first.family}+{second.family}", _ChainFamily(first, second)
    return Model(family, build, (), first.input_shape, second.classes, first.tokens)


@dataclass(frozen=True)
class _ChainFamily:
    """Builds both models of a chain. A value, so that equal chains are equal models."""

    first: Model
    second: Model

    def __call__(self, **settings: Any) -> nn.Module:
        return _ChainModule(self.first.module(), self.second.module())


class _ChainModule(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return as_outputs(self.second(as_outputs(self.first(x)).logits)).logits


@dataclass(frozen=True)
class _ChildFamily:
    """Builds the whole module and returns one child, so the same settings give the child the same weights.

    A value, so that equal submodels are equal, also in other processes.
    """

    parent: Family
    name: str

    def __call__(self, **settings: Any) -> nn.Module:
        return self.parent(**settings).get_submodule(self.name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.parent)


@lru_cache(maxsize=1024)
def _submodel(model: Model, name: str) -> Model:
    _require_child(model, name)
    inputs = structure.infer_child_input(model.module(), name, model.inputs)
    family, build = f"{model.family}.{name}", _ChildFamily(model.build, name)
    child = Model(family, build, model.settings, inputs.shape, 0, inputs.tokens)
    return replace(child, classes=_inspect(child, structure.count_logits, inputs))


def _require_child(model: Model, name: str) -> None:
    if not model.has_children(name):
        known = ", ".join(_inspect(model, structure.child_names)) or "none"
        raise ValueError(f"{model.family} has no child module {name!r}; it has: {known}")


def _inspect(model: Model, inspection: Callable[..., InspectedT], *arguments: Hashable) -> InspectedT:
    """Apply a function of `structure` to a fresh module; cached."""
    return cast(InspectedT, _cached_inspection(model, inspection, arguments))


@lru_cache(maxsize=8192)
def _cached_inspection(model: Model, inspection: Callable[..., Any], arguments: tuple[Hashable, ...]) -> Any:
    return inspection(model.module(), *arguments)


@lru_cache(maxsize=1024)
def _shapes(model: Model) -> tuple[Shapes, Shapes]:
    module = model.module()
    weights = {name: weight.shape for name, weight in module.named_parameters()}
    return weights, {name: holder[key].shape for name, (holder, key) in statistic_slots(module).items()}


@lru_cache(maxsize=32)
def _initial_weights(model: Model, seed: int, dtype: torch.dtype) -> Tensors:
    """Cached, so that ten thousand devices with the same initial weights share one copy."""
    module = model.module(number(seed, INITIAL_WEIGHTS))
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


@lru_cache(maxsize=1024)
def _is_batch_dependent(model: Model) -> bool:
    weights, x = trial_batch(all_shapes(model), trial_inputs(model), torch.get_default_dtype())
    with torch.no_grad():
        in_batch, alone = model(weights, x), model(weights, x[:, :1])
    return not torch.allclose(in_batch.logits[:, :1], alone.logits, rtol=1e-3, atol=1e-5)


@lru_cache(maxsize=1024)
def _feature_width(model: Model) -> int:
    weights = {name: torch.zeros(1, *shape) for name, shape in model.shapes().items()}
    with torch.no_grad():
        return model.features(weights, model.zero_inputs(1, 2)).shape[-1]

"""A model: a family and its settings, as a pure function of the weights of a block of devices.

A family is any function from keyword settings to a plain `nn.Module`. How two models of a family relate is never
declared: it is found by comparing the shapes of their weights, and what lies along their axes (`axes.py`).

Parameters with `requires_grad=False` are frozen: constants of the model, as buffers are. They are not among its
weights, so no method trains, sends or aggregates them; every process builds them itself, and a run records their
sha256.
"""

import inspect
import logging
import math
import operator
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..placement import Precision, resident
from ..registry import freeze
from ..seeds import INITIAL_WEIGHTS, number
from ..tensors import Tensors, fingerprint
from . import structure
from .axes import Layout, Layouts, ModelShapes, axis_pairs, covered_entries
from .batching import (
    BlockForward,
    Fold,
    Kernels,
    ModelKind,
    Trials,
    all_shapes,
    batching_mode,
    block_forward,
    compiled_forward,
    find_changed_buffer,
    find_draw_in_evaluation,
    is_interleaved,
    is_stochastic,
    statistic_slots,
    trial_batch,
    trial_inputs,
    why_one_by_one,
)
from .concatenation import find_concatenated_inputs
from .stacked_layers import declared_axes, known_axes
from .structure import (
    Family,
    InputSpec,
    Outputs,
    Shapes,
    as_outputs,
    build_skeleton,
    classes_last,
    layers_of,
    named_weights,
)
from .sub_block import SubBlock, make_sub_block

logger = logging.getLogger(__name__)

InspectedT = TypeVar("InspectedT")


@dataclass(frozen=True)
class StepSeeds:
    """Selects training mode and seeds its random layers: one seed per device, for one training step.

    Parameters
    ----------
    per_device : the seed of each device.
    common : the same for all devices of an experiment in this step.
    running : the indices of the devices that take the step; None: all. A model need not run the others: what it returns
        for them is zero.
    """

    per_device: tuple[int, ...]
    common: int = 0
    running: tuple[int, ...] | None = None

    def sub_block(self) -> SubBlock | None:
        """The devices to run as a smaller block; None: run all."""
        return None if self.running is None else make_sub_block(self.running, len(self.per_device))

    def select(self, devices: Sequence[int]) -> "StepSeeds":
        """The seeds of some of the devices, all of which run.

        Parameters
        ----------
        devices : their indices.
        """
        return StepSeeds(tuple(self.per_device[device] for device in devices), self.common)


@dataclass(frozen=True)
class Model:
    """A family at one size. Calling it runs a block of devices; `module()` gives the plain `nn.Module`.

    Two models are equal if their fields are. `build_model` makes one.

    Parameters
    ----------
    family : the name of the family.
    build : the function that builds the module from its settings.
    settings : the settings as sorted pairs of name and value.
    input_shape : the shape of one prepared example.
    classes : the number of classes, or of other outputs.
    tokens : the number of token ids, if inputs are tokens instead of numbers.
    frozen_from : the larger model whose frozen weights this one has a part of; None: it has its own.
    target_shape : the tokens or pixels of an example that the module predicts one by one; (): the example as a whole;
        None: any, as for a part of a net.
    class_axis : the axis of the module's output that holds the classes: the last, or 1 for pixels. Exits of a model
        have it last in any case.
    precision : what it computes in. Its weights and outputs stay in torch's default dtype (torch's autocast).
    compiled : whether it is compiled by `torch.compile`.
    kernels : what computes it: torch alone, or the lane kernels (`lanes/`) where they can. Results differ by rounding.
    """

    family: str
    build: Family
    settings: tuple[tuple[str, Any], ...]
    input_shape: tuple[int, ...]
    classes: int
    tokens: int | None = None
    frozen_from: "Model | None" = None
    target_shape: tuple[int, ...] | None = None
    class_axis: int = -1
    precision: Precision = "float32"
    compiled: bool = False
    kernels: Kernels = "torch"

    def __call__(self, weights: Tensors, x: Tensor, step_seeds: StepSeeds | None = None) -> Outputs:
        """Run K devices, with `step_seeds` in training mode.

        Evaluation needs the normalization statistics among the weights.

        Parameters
        ----------
        weights : the weights of each device, [K, ...].
        x : the inputs of each device, [K, batch, ...].
        step_seeds : the seeds of a training step, which `Batch.step_seeds` has; None: evaluation mode.

        Returns
        -------
        Exits and taps, [K, batch, ...] each. The last axis of exits is that of the classes.
        """
        if step_seeds is None:
            self._require_statistics(weights)
        elif some := step_seeds.sub_block():
            exits, taps = self(some.take_all(weights), some.take(x), step_seeds.select(some.members))
            return Outputs(some.place_all(exits), some.place_all(taps))
        plain = self.plain
        seeds = step_seeds.per_device if step_seeds and is_stochastic(plain) else None
        forward = self._forward(len(x), training=step_seeds is not None, draws=seeds is not None)
        with self._autocast(x):
            outputs = forward(self._with_frozen(weights, len(x)), x, seeds)[0]
        outputs = self._in_full(outputs)
        return outputs if self.class_axis == -1 else classes_last(outputs, self.class_axis)

    def features(self, weights: Tensors, x: Tensor, step_seeds: StepSeeds | None = None) -> Tensor:
        """The representation [K, batch, d] that the last layer receives; differentiable in the weights.

        In evaluation mode, except that batch norm uses the batch's statistics, even if the weights contain others.
        Those of a training step are among the model's outputs: `model(weights, x, step_seeds).taps["features"]`.

        Parameters
        ----------
        weights : the weights of each device, [K, ...].
        x : the inputs of each device, [K, batch, ...].
        step_seeds : what `Batch.step_seeds` has: devices that do not take the step need not run. None: all run.
        """
        if step_seeds and (some := step_seeds.sub_block()):
            return some.place(self.features(some.take_all(weights), some.take(x)))
        forward = self._forward(len(x), training=False, tracking=bool(self.statistics()))
        with self._autocast(x):
            outputs, _ = forward(self._with_frozen(weights, len(x)), x)
        outputs = self._in_full(outputs)
        if "features" not in outputs.taps:
            raise ValueError(f"{self.family} has no features: the input of its last layer is no batch of numbers")
        return outputs.taps["features"].flatten(2)

    def batch_statistics(self, weights: Tensors, x: Tensor, step_seeds: StepSeeds | None = None) -> dict[str, Tensor]:
        """The mean and unbiased variance that every batch norm sees in this batch, [K, channels] each.

        In evaluation mode: in training the width scaler would change the numbers that are normalized.

        Parameters
        ----------
        weights : the weights of each device, [K, ...].
        x : the inputs of each device, [K, batch, ...].
        step_seeds : what `Batch.step_seeds` has: devices that do not take the step need not run. None: all run.
        """
        if step_seeds and (some := step_seeds.sub_block()):
            return some.place_all(self.batch_statistics(some.take_all(weights), some.take(x)))
        forward = self._forward(len(x), training=False, tracking=True)
        with self._autocast(x):
            statistics = forward(self._with_frozen(weights, len(x)), x)[1]
        return self._in_full(statistics)

    @property
    def plain(self) -> "Model":
        """The same model, not compiled and without autocast."""
        return self if self._is_plain else replace(self, precision="float32", compiled=False)

    def computed(self, precision: Precision, compiled: bool) -> "Model":
        """The same model, computed otherwise.

        Parameters
        ----------
        precision : what it computes in.
        compiled : whether it is compiled.
        """
        return replace(self, precision=precision, compiled=compiled)

    @property
    def _is_plain(self) -> bool:
        return self.precision == "float32" and not self.compiled

    def _forward(self, devices: int, training: bool, tracking: bool = False, draws: bool = False) -> BlockForward:
        if not self.compiled or draws:  # numbers that are drawn for each device cannot be compiled
            return block_forward(self.plain, devices, training, tracking)
        return compiled_forward(self.plain, devices, training, tracking)

    def _autocast(self, x: Tensor) -> AbstractContextManager[Any]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(x.device.type, getattr(torch, self.precision))

    def _in_full(self, tensors: InspectedT) -> InspectedT:
        """Outputs in torch's default dtype, so that losses and sums are not rounded."""
        if self.precision == "float32":
            return tensors
        dtype = torch.get_default_dtype()
        return cast(InspectedT, tree_map(lambda one: one.to(dtype) if one.is_floating_point() else one, tensors))

    @property
    def inputs(self) -> InputSpec:
        """The shape of one example, and the number of token ids."""
        return InputSpec(self.input_shape, self.tokens)

    def zero_inputs(self, *leading: int) -> Tensor:
        """All-zero inputs.

        Parameters
        ----------
        leading : the axes in front of the example's own.
        """
        return self.inputs.zeros(*leading)

    def random_inputs(self, generator: torch.Generator, *leading: int) -> Tensor:
        """Random inputs.

        Parameters
        ----------
        generator : the source of randomness.
        leading : the axes in front of the example's own.
        """
        return self.inputs.random(generator, *leading)

    def shapes(self) -> ModelShapes:
        """The shapes of the weights, which are trained and sent, by name; and what lies along their axes."""
        return _shapes(self)[0]

    def frozen_shapes(self) -> ModelShapes:
        """The shapes of the frozen weights, which are neither trained nor sent; often there are none."""
        return _shapes(self)[2]

    def frozen_weights(self) -> dict[str, Tensor]:
        """The frozen weights, which are the same for every seed of a run.

        What the family loads is taken as it is. What it draws is drawn with seed 0, or is the part of the weights of
        `frozen_from` that this size covers: a small model that drew its own would compute other features.
        """
        return dict(_frozen_weights(self, torch.get_default_dtype()))

    def frozen_sha256(self) -> str:
        """The sha256 of the frozen weights, "" if there are none: equal only if they are equal bit for bit."""
        frozen = self.frozen_weights()
        return fingerprint({"frozen": frozen}) if frozen else ""

    def with_frozen_from(self, other: "Model") -> "Model":
        """The same model with a part of another's frozen weights, where the family draws them; see `frozen_weights`.

        Parameters
        ----------
        other : the model, which is as large in every axis.
        """
        source, alone = other.frozen_from or other, replace(self, frozen_from=None)
        return alone if alone == source or not alone.frozen_shapes() else replace(self, frozen_from=source)

    def statistics(self) -> ModelShapes:
        """The shapes of the normalization statistics, which are neither trained nor sent; often there are none."""
        return _shapes(self)[1]

    def initial_weights(self, seed: int) -> dict[str, Tensor]:
        """The weights as the family initializes them, without the frozen ones.

        Parameters
        ----------
        seed : the seed of the run.
        """
        return dict(_initial_weights(self, seed, torch.get_default_dtype()))

    def module(self, seed: int = 0) -> nn.Module:
        """The plain module, initialized without advancing torch's global generator.

        Parameters
        ----------
        seed : what torch's generator is seeded with for it; frozen weights do not depend on it.
        """
        module = _build_module(self, seed)
        frozen = {name: weight for name, weight in module.named_parameters() if not weight.requires_grad}
        if frozen:
            values = self.frozen_weights()
            with torch.inference_mode(False), torch.no_grad():
                for name, weight in frozen.items():
                    weight.copy_(values[name])
        return module

    def skeleton(self) -> nn.Module:
        """A module for its structure: its weights are arbitrary numbers."""
        build = partial(_build_module, self, 0)
        return build_skeleton(build) if structure.is_own_family(self.build) else build()

    def check_output_size(self) -> None:
        """Raise unless the module trains on examples of the data's shape and computes what the data has targets for."""
        found = _inspect(self, structure.find_output_shape, self.inputs)
        _inspect(self, structure.try_training, self.inputs)
        if self.frozen_shapes() and not self.shapes():
            raise ValueError("it has nothing to train: every parameter has requires_grad=False")
        expected = self.output_shape()
        if found == expected or (self.target_shape is None and found[-1:] == (self.classes,)):
            return
        counts_only = self.target_shape is None or len(found) == len(expected) == 1
        if counts_only and found and self.classes > 1:
            raise ValueError(f"it makes {found[-1]} logits where the data has {self.classes} classes")
        shapes = (f"[batch, {', '.join(map(str, shape))}]".replace(", ]", "]") for shape in (expected, found))
        raise ValueError("its forward must return {} for these targets, and returns {}".format(*shapes))

    @property
    def predicts_pixels(self) -> bool:
        """True if the module predicts every pixel of an example."""
        return len(self.target_shape or ()) > 1

    def predicts_whole_examples(self) -> bool:
        """True if the module makes one prediction for an example, and not one for each of its tokens or pixels."""
        return len(_inspect(self, structure.find_output_shape, self.inputs)) == 1

    def output_shape(self) -> tuple[int, ...]:
        """The shape of what the module must return for one example, such as (classes, height, width) for pixels."""
        positions = self.target_shape or ()
        return (*positions, self.classes) if self.class_axis == -1 else (self.classes, *positions)

    def check_causal(self) -> None:
        """Raise if a prediction depends on later tokens, which hold the answer when the next one is to be predicted."""
        has_later = self.tokens is not None and len(self.input_shape) == 1 and self.input_shape[0] > 1
        if has_later and _inspect(self, structure.sees_later_tokens, self.inputs):
            raise ValueError(
                "its prediction at a token depends on later tokens, among them the one to be predicted; mask them, "
                "such as by causal = true of transformer"
            )

    def check_buffers(self) -> None:
        """Raise if training steps change a buffer that fedloom does not know, which all devices would share."""
        buffer = find_changed_buffer(self)
        if buffer:
            raise ValueError(
                f"its forward changes the buffer {buffer} in training, which all devices would share; keep nothing "
                "from one batch to the next, besides the statistics of torch's batch norm"
            )

    def with_settings(self, **changes: Any) -> "Model":
        """The same family with some settings changed, such as another size.

        Parameters
        ----------
        changes : the new values, by name of the setting.
        """
        changed = replace(self, settings=tuple(sorted({**dict(self.settings), **changes}.items())))
        return changed.with_frozen_from(self) if self.frozen_shapes() else changed

    def full_settings(self) -> dict[str, Any]:
        """All settings, including those left to the family's defaults."""
        named = inspect.signature(self.build).parameters
        return {**{name: p.default for name, p in named.items() if p.default is not p.empty}, **dict(self.settings)}

    def is_equivalent(self, other: "Model") -> bool:
        """True if both are the same model, whether or not they spell out the family's defaults.

        Parameters
        ----------
        other : the model to compare with.
        """
        return self == other or (self.build == other.build and self.full_settings() == other.full_settings())

    def feature_width(self) -> int:
        """The length of one example's representation."""
        return _feature_width(self)

    def submodel(self, name: str) -> "Model":
        """A child of the module as a model of its own, on the input that it receives when the whole module runs.

        Its weight names lose the prefix, and `classes` is the length of its output.

        Parameters
        ----------
        name : the name of the child.
        """
        return _submodel(self, name)

    def has_children(self, *names: str) -> bool:
        """True if the module has all of these children.

        Parameters
        ----------
        names : the names to look for.
        """
        return set(names) <= set(_inspect(self, structure.child_names))

    def submodel_weights(self, name: str, weights: Tensors) -> dict[str, Tensor]:
        """The weights of a child under the names that `submodel(name)` uses.

        Parameters
        ----------
        name : the name of the child.
        weights : the weights of the whole model.
        """
        _require_child(self, name)
        prefix = f"{name}."
        return {key.removeprefix(prefix): weight for key, weight in weights.items() if key.startswith(prefix)}

    def label_rows(self) -> tuple[str, ...]:
        """The weights with one row per class: those of the last layer, or those that the module declares."""
        rows = _inspect(self, structure.label_rows, self.classes)
        return tuple(name for name in rows if name not in self.frozen_shapes())

    def head(self) -> tuple[str, ...]:
        """The weights of the last layer: those with exactly one row per class."""
        return tuple(name for name in self.label_rows() if self.shapes()[name][0] == self.classes)

    def last_exit_weights(self) -> tuple[str, ...]:
        """The weights that learn from the last exit."""
        return _inspect(self, structure.last_exit_weights, self.inputs)

    def layers(self) -> tuple[tuple[str, ...], ...]:
        """The weights of each of the layers that models of unequal depth have more or fewer of, from shallow to deep.

        They are those of the list that the module names in its attribute `layer_list`; empty if it names none.
        """
        return _inspect(self, structure.layer_weights)

    def is_batch_dependent(self) -> bool:
        """True if, in evaluation, the output for an example depends on the rest of its batch."""
        return _is_batch_dependent(self)

    def is_foldable(self) -> bool:
        """False for families, such as those of text, that declare that their layers cannot be folded."""
        return _inspect(self, structure.is_foldable)

    def trains_interleaved(self) -> bool:
        """True if the lane kernels train it, whose weights lie in memory with the devices innermost."""
        return is_interleaved(self, training=True)

    def is_folded(self) -> bool:
        """True if many devices train as one wide network, by torch."""
        return isinstance(batching_mode(self, True, False)[0], Fold)

    def fallback_reasons(self) -> tuple[str, ...]:
        """Why many devices train in a slower batching mode; empty if they do not."""
        return batching_mode(self, True, False)[1]

    def one_by_one_reason(self) -> str | None:
        """Why devices train one at a time, in a line; None if many train at once."""
        return why_one_by_one(self)

    def draws_in_evaluation(self) -> str | None:
        """The layer that draws random numbers in evaluation, which are not seeded; None if there is none."""
        return find_draw_in_evaluation(self)

    def _with_frozen(self, weights: Tensors, devices: int) -> Tensors:
        """The weights of a block of devices and the frozen ones, of which all devices have the same."""
        if not self.frozen_shapes():
            return weights
        like = next(iter(weights.values()))
        frozen = {
            name: resident(weight, like.device)
            .to(like.dtype if weight.is_floating_point() else weight.dtype)
            .expand(devices, *weight.shape)
            for name, weight in self.frozen_weights().items()
        }
        return {**weights, **frozen}

    def _require_statistics(self, weights: Tensors) -> None:
        missing = [name for name in self.statistics() if name not in weights]
        if missing:
            raise ValueError(
                f"{self.family} needs batch-norm statistics for evaluation; {missing[0]} is missing. On a device, pass "
                "with_batchnorm_statistics(client, weights) of fedloom.client"
            )


def build_model(
    family: str,
    build: Family,
    settings: Mapping[str, Any],
    input_shape: tuple[int, ...],
    classes: int,
    tokens: int | None = None,
    target_shape: tuple[int, ...] | None = None,
    class_axis: int = -1,
) -> Model:
    """A model of a family. Properties of the data are passed on if the family has parameters for them.

    Parameters
    ----------
    family : the name of the family.
    build : the function that builds the module from its settings.
    settings : the settings, by name: hashable values, or tables of them.
    input_shape : the shape of one prepared example.
    classes : the number of classes, or of other outputs.
    tokens : the number of token ids, if inputs are tokens.
    target_shape : the tokens or pixels of an example that have a target each; None: not known.
    class_axis : the axis of the module's output that holds the classes.
    """
    data_properties = {"input_shape": input_shape, "classes": classes, "tokens": tokens}
    named = inspect.signature(build).parameters
    known = {name: value for name, value in data_properties.items() if name in named}
    settings = {name: freeze(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    for name, value in settings.items():
        if not isinstance(value, Hashable):
            raise TypeError(f"{name} = {value!r} cannot be a setting: use a number, a string, a list or a boolean")
    chosen = tuple(sorted({**known, **settings}.items()))
    return Model(
        family, build, chosen, input_shape, classes, tokens, target_shape=target_shape, class_axis=class_axis
    )  # fmt: skip


def chain_models(first: Model, second: Model) -> Model:
    """A model that feeds the output of one to another; its weights are named `first.…` and `second.…`.

    Parameters
    ----------
    first : the model that receives the examples.
    second : the model that receives its output.
    """
    family, build = f"{first.family}+{second.family}", _ChainFamily(first, second)
    model = Model(family, build, (), first.input_shape, second.classes, first.tokens, kernels=first.kernels)
    return model.computed(first.precision, first.compiled)


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
    source = model.frozen_from.submodel(name) if model.frozen_from else None
    child = Model(
        family, build, model.settings, inputs.shape, 0, inputs.tokens, source,
        precision=model.precision, compiled=model.compiled, kernels=model.kernels,
    )  # fmt: skip
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
def _shapes(model: Model) -> tuple[ModelShapes, ModelShapes, ModelShapes]:
    """Of weights, statistics and frozen weights."""
    module = model.skeleton()
    named = named_weights(module)
    weights = {name: weight.shape for name, weight in named if weight.requires_grad}
    frozen = {name: weight.shape for name, weight in named if not weight.requires_grad}
    statistics = {name: holder[key].shape for name, (holder, key) in statistic_slots(module).items()}
    layouts = _find_layouts(model, module, {**weights, **frozen, **statistics})
    return ModelShapes(weights, layouts), ModelShapes(statistics, layouts), ModelShapes(frozen, layouts)


def _find_layouts(model: Model, module: nn.Module, shapes: Shapes) -> Layouts:
    """The stacked axes that are traced, known and declared; the later ones take precedence."""
    found: dict[str, dict[int, Layout]] = {}
    for layouts in (_find_concatenations(model, module), known_axes(module), declared_axes(module)):
        for name, axes in layouts.items():
            fitting = {axis: layout for axis, layout in axes.items() if _has_length(layout, shapes.get(name), axis)}
            found[name] = {**found.get(name, {}), **fitting}
    return found


def _has_length(layout: Layout, shape: torch.Size | None, axis: int) -> bool:
    return shape is not None and axis < len(shape) and sum(map(math.prod, layout)) == shape[axis]


def _find_concatenations(model: Model, module: nn.Module) -> Layouts:
    """By tracing; not if enough models of the kind had none, since methods draw a subnet in every step."""
    found: list[Layouts] = []

    def trace() -> bool:
        found.append(find_concatenated_inputs(module, model.inputs))
        return any(found[0].values())

    kind = ModelKind.of(model, module)
    concatenates = _concatenation_trials(kind.build, kind.settings).infer_or_try(kind, trace)
    if concatenates and not found:
        trace()
    return found[0] if found else {}


@lru_cache(maxsize=256)
def _concatenation_trials(build: structure.Family, settings: tuple[tuple[str, Any], ...]) -> Trials[bool]:
    return Trials(is_usual=operator.not_)


def _build_module(model: Model, seed: int) -> nn.Module:
    """The module as the family builds it. A model is built many times: warnings of its libraries are logged once."""
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.inference_mode(False),  # it may outlive the caller's context
        torch.random.fork_rng(devices=[]),
    ):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds accelerators, and takes a millisecond
        module = _in_default_dtype(model.build(**dict(model.settings)))
    for warning in caught:
        _log_warning(model.family, " ".join(str(warning.message).split()))
    return module


def _in_default_dtype(module: nn.Module) -> nn.Module:
    """The module itself if it has that already: `to` goes through all of it."""
    dtype = torch.get_default_dtype()
    held = (tensors.values() for layer in layers_of(module) for tensors in (layer._parameters, layer._buffers))
    done = all(tensor is None or tensor.dtype == dtype for tensors in held for tensor in tensors)
    return module if done else module.to(dtype)


@lru_cache(maxsize=1024)
def _log_warning(family: str, text: str) -> None:
    """Once per family."""
    logger.warning("building %s: %s", family, text)


@lru_cache(maxsize=256)
def _frozen_weights(model: Model, dtype: torch.dtype) -> Tensors:
    """Cached, so that all devices share one copy."""
    with torch.inference_mode(False):  # they may be trained on later
        return _find_frozen_weights(model)


def _find_frozen_weights(model: Model) -> Tensors:
    if not model.frozen_shapes():
        return {}
    own, other = (_frozen_parameters(_build_module(model, seed)) for seed in (0, 1))
    drawn = [name for name, weight in own.items() if not torch.equal(weight, other[name])]
    again = _frozen_parameters(_build_module(model, 0)) if drawn else {}
    for name in drawn:
        if not torch.equal(own[name], again[name]):
            raise ValueError(
                f"the frozen {name} has other values every time, so devices would differ; load it from a file, or draw "
                "it with torch's own generator"
            )
    parts = {name: _part_of_larger(model, name, weight) for name, weight in own.items()}
    return {
        name: parts[name] if name in drawn or torch.equal(weight, parts[name]) else weight
        for name, weight in own.items()
    }


def _part_of_larger(model: Model, name: str, weight: Tensor) -> Tensor:
    """The part of a frozen weight of `frozen_from` that this size covers; `weight` itself if it does not fit in."""
    source = model.frozen_from
    larger = source.frozen_weights().get(name) if source else None
    pairs = axis_pairs(name, model.frozen_shapes(), source.frozen_shapes()) if source and larger is not None else None
    if larger is None or pairs is None or all(pair.is_plain for pair in pairs):
        return structure.part_of(larger, weight)
    if not all(pair.fits() for pair in pairs):
        return weight
    for axis, pair in enumerate(pairs):
        larger = larger[(slice(None),) * axis + (covered_entries(axis, pair, structure.centered),)]
    return larger.contiguous()


def _frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in module.named_parameters() if not weight.requires_grad}


@lru_cache(maxsize=4096)
def exit_names(model: Model) -> tuple[str, ...]:
    """The names of a model's exits, from shallow to deep.

    Parameters
    ----------
    model : the model.
    """
    weights = {**model.initial_weights(0), **{name: torch.ones(shape) for name, shape in model.statistics().items()}}
    block = {name: tensor.unsqueeze(0) for name, tensor in weights.items()}
    with torch.no_grad():
        return tuple(model(block, model.zero_inputs(1, 2)).exits)


def last_exit(model: Model) -> str:
    """The name of the deepest exit.

    Parameters
    ----------
    model : the model.
    """
    return exit_names(model)[-1]


@lru_cache(maxsize=32)
def _initial_weights(model: Model, seed: int, dtype: torch.dtype) -> Tensors:
    """Cached, so that ten thousand devices with the same initial weights share one copy."""
    module = model.module(number(seed, INITIAL_WEIGHTS))
    return {name: weight.detach().clone() for name, weight in module.named_parameters() if weight.requires_grad}


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

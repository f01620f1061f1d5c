"""Run a block of K devices through one module: weights [K, ...] and inputs [K, batch, ...] in, [K, batch, ...] out.

There are three batching modes, from fast to slow. All of them give every device what it would compute alone:

- `fold_devices`: one forward pass of one wide network. The devices' channels lie next to each other,
  [batch, K * channels, ...], and the layers of `layers.py` keep them apart (a convolution uses K times the groups).
- `vmap_devices`: `torch.func.vmap` over the device axis, for modules whose layers cannot be folded.
- `loop_over_devices`: one device after the other; works for every module.

A mode is used only after a trial: when a model first runs, a few devices with random weights must get the same results
as in the loop. Modules that draw random numbers in training, such as dropout, run device by device with a seed each.
"""

import logging
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from .layers import StaticBatchNorm, fold, support_device_axis, unfold
from .structure import Family, Outputs, Shapes, as_outputs, is_foldable, last_layer, layer_kinds, non_size_settings

logger = logging.getLogger(__name__)

BlockOutput = tuple[Outputs, dict[str, Tensor]]
"""The module's outputs, and the batch-norm statistics if they were tracked."""

BlockForward = Callable[[Mapping[str, Tensor], Tensor], BlockOutput]
"""(weights [K, ...], x [K, batch, ...]) -> outputs with the devices in front."""

BatchingMode = Callable[["FunctionalModule"], BlockForward]
Result = TypeVar("Result")

STATISTICS = ("running_mean", "running_var")

TRIALS_PER_KIND = 16
"""After this many models of a kind gave the same answer, further ones are assumed to give it too. A fleet has fewer
sizes, but methods that draw a sub-net in every step would spend most of their time on trials."""


class ModelSpec(Hashable, Protocol):
    """What batching needs to know of a model; hashable, because everything here is cached by model."""

    @property
    def build(self) -> Family: ...
    @property
    def settings(self) -> tuple[tuple[str, Any], ...]: ...
    def module(self) -> nn.Module: ...
    def shapes(self) -> Shapes: ...
    def statistics(self) -> Shapes: ...
    def random_inputs(self, generator: torch.Generator, *leading: int) -> Tensor: ...


@dataclass(frozen=True)
class ModelKind:
    """Models of a family that consist of the same layers and differ only in sizes (channels, depths, kernels)."""

    build: Family
    settings: tuple[tuple[str, Any], ...]
    layers: frozenset[Any]


def block_forward(model: ModelSpec, devices: int, training: bool, tracking: bool = False) -> BlockForward:
    """The function that runs a model for this many devices; with `tracking` it also returns batch-norm statistics."""
    # the dtype is part of the cache key: a functional module holds its module's constants, which have a precision
    build = _single_device_forward if devices == 1 else _multi_device_forward
    return build(model, training, tracking, torch.get_default_dtype())


@lru_cache(maxsize=256)
def _single_device_forward(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> BlockForward:
    module = _functional_module(model, training, tracking, dtype)
    return single_device(module, all_shapes(model), trial_inputs(model))


@lru_cache(maxsize=256)
def _multi_device_forward(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> BlockForward:
    mode, reasons = batching_mode(model, training, tracking)
    if reasons:
        _log_slow_batching(reasons)
    return mode(_functional_module(model, training, tracking, dtype))


@lru_cache(maxsize=256)
def _log_slow_batching(reasons: tuple[str, ...]) -> None:
    """Once per reason, not once per tier."""
    logger.warning("using slower batching (%s)", "; ".join(reasons))


@lru_cache(maxsize=256)
def _functional_module(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> "FunctionalModule":
    return FunctionalModule(model.module().to(dtype), training, tracking)


@lru_cache(maxsize=256)
def batching_mode(model: ModelSpec, training: bool, tracking: bool) -> tuple[BatchingMode, tuple[str, ...]]:
    """The fastest correct mode of a model, and why faster ones failed."""

    def run_trial() -> tuple[BatchingMode, tuple[str, ...]]:
        module = FunctionalModule(model.module().double(), training, tracking)
        return choose_mode(module, all_shapes(model), trial_inputs(model))

    return _infer_or_try(_known_modes(_kind(model, training, tracking), training, tracking), run_trial)


@lru_cache(maxsize=256)
def is_stochastic(model: ModelSpec) -> bool:
    """True if the model draws random numbers in training."""

    def run_trial() -> bool:
        module = _functional_module(model, True, False, torch.get_default_dtype())
        return draws_random_numbers(module, all_shapes(model), trial_inputs(model))

    return _infer_or_try(_known_stochastic(_kind(model, training=True, tracking=False)), run_trial)


def _infer_or_try(known: list[Result], run_trial: Callable[[], Result]) -> Result:
    """The unanimous result of enough earlier models of the kind, or else that of a trial, which is recorded."""
    if len(known) >= TRIALS_PER_KIND and len(set(known)) == 1:
        return known[0]
    known.append(run_trial())
    return known[-1]


@lru_cache(maxsize=256)
def _known_modes(kind: ModelKind, training: bool, tracking: bool) -> list[tuple[BatchingMode, tuple[str, ...]]]:
    """The results of earlier trials: a list that grows."""
    return []


@lru_cache(maxsize=256)
def _known_stochastic(kind: ModelKind) -> list[bool]:
    return []


def _kind(model: ModelSpec, training: bool, tracking: bool) -> ModelKind:
    module = _functional_module(model, training, tracking, torch.get_default_dtype()).module
    return ModelKind(model.build, non_size_settings(dict(model.settings)), layer_kinds(module))


def fold_devices(module: "FunctionalModule") -> BlockForward:
    """All devices as one wide network."""

    def run(weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
        devices = len(x)
        outputs, statistics = module(weights, fold(x))
        return (
            tree_map(lambda tensor: unfold(tensor, devices), outputs),
            {name: tensor.unflatten(0, (devices, -1)) for name, tensor in statistics.items()},
        )

    return run


def vmap_devices(module: "FunctionalModule") -> BlockForward:
    """All devices at once by `torch.func.vmap`."""
    run = vmap(module, randomness="error")
    return lambda weights, x: run(dict(weights), x)


def loop_over_devices(module: "FunctionalModule") -> BlockForward:
    """One device after the other."""

    def run(weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
        outputs = [module({name: weight[k] for name, weight in weights.items()}, x[k]) for k in range(len(x))]
        return cast(BlockOutput, tree_map(lambda *tensors: torch.stack(tensors), *outputs))

    return run


def single_device(module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> BlockForward:
    """A block of one device: images channels-last, which is faster, unless the module needs the contiguous layout."""

    def channels_last(weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
        outputs = module({name: weight[0] for name, weight in weights.items()}, fold(x))
        return cast(BlockOutput, tree_map(lambda tensor: tensor.unsqueeze(0), outputs))

    weights, x = trial_batch(shapes, inputs, torch.get_default_dtype())
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            channels_last({name: weight[:1] for name, weight in weights.items()}, x[:1])
    except RuntimeError:  # such as a .view() of a map that is not contiguous
        return loop_over_devices(module)
    return channels_last


def seed_each_device(forward: BlockForward, seeds: tuple[int, ...]) -> BlockForward:
    """Run device by device, each with its own seed: its random numbers do not depend on the rest of the block."""

    def run(weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
        outputs = []
        with torch.random.fork_rng(devices=[]):
            for k, seed in enumerate(seeds):
                torch.manual_seed(seed)
                outputs.append(forward({name: weight[k : k + 1] for name, weight in weights.items()}, x[k : k + 1]))
        return cast(BlockOutput, tree_map(lambda *tensors: torch.cat(tensors), *outputs))

    return run


def choose_mode(module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> tuple[BatchingMode, tuple[str, ...]]:
    """Try the modes from fast to slow and return the first correct one, and why faster ones failed.

    `module` is in double precision, where rounding cannot be mistaken for an error. A module with a part that declares
    `foldable = False` (its activations have no channel axis) is not folded, and no reason is given for that.
    """
    reasons: list[str] = []
    for mode in (fold_devices, vmap_devices) if is_foldable(module.module) else (vmap_devices,):
        try:
            if _agree(mode(module), loop_over_devices(module), shapes, inputs):
                return mode, tuple(reasons)
            reason = "devices mix"
        except Exception as error:  # a user's module may raise anything, and there is a slower mode
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reasons.append(f"{type(module.module).__name__} does not run with {mode.__name__}: {reason}")
    return loop_over_devices, tuple(reasons)


@torch.no_grad()
def _agree(left: BlockForward, right: BlockForward, shapes: Shapes, inputs: Tensor) -> bool:
    weights, x = trial_batch(shapes, inputs, torch.float64)
    pairs = zip(tree_leaves(left(weights, x)), tree_leaves(right(weights, x)), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs)


def draws_random_numbers(module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> bool:
    """True if a pass advances torch's random number generator, as dropout does."""
    weights, x = trial_batch(shapes, inputs, torch.get_default_dtype())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.get_rng_state()
        loop_over_devices(module)(weights, x)
        return not torch.equal(before, torch.get_rng_state())


def trial_batch(shapes: Shapes, inputs: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """Random weights for as many devices as `inputs` has, and the inputs in this dtype."""
    generator, devices = torch.Generator().manual_seed(0), len(inputs)
    weights = {
        name: torch.rand(devices, *shape, generator=generator, dtype=dtype) - 0.3 for name, shape in shapes.items()
    }
    for name in weights:
        if name.endswith(STATISTICS[1]):
            weights[name] = weights[name].abs() + 0.1
    return weights, inputs.to(dtype) if inputs.is_floating_point() else inputs


def trial_inputs(model: ModelSpec) -> Tensor:
    """Two random examples for each of three devices."""
    return model.random_inputs(torch.Generator().manual_seed(0), 3, 2)


def all_shapes(model: ModelSpec) -> Shapes:
    """Of weights and batch-norm statistics."""
    return {**model.shapes(), **model.statistics()}


class FunctionalModule:
    """A module that takes its weights at every call: `torch.func.functional_call` without its overhead of 0.5 ms.

    Not thread-safe. Buffers other than normalization statistics are constants of the module. The input of the last
    layer is added to the taps as "features" if the module does not provide them itself.
    """

    def __init__(self, module: nn.Module, training: bool, tracking: bool = False):
        support_device_axis(module)
        self.module = module.train(training)
        self.tracking = tracking
        self._norms = [layer for layer in module.modules() if isinstance(layer, StaticBatchNorm)]
        for norm in self._norms:
            norm.tracking = tracking
        self._slots = _weight_slots(module)
        self._statistics = statistic_slots(module)
        self._last_input: Any = None
        last = last_layer(module)
        if last is not None:
            module.get_submodule(last).register_forward_pre_hook(self._remember_input)

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor) -> BlockOutput:
        for name, slots in self._slots.items():
            for holder, key in slots:
                holder[key] = weights[name]
        if self.tracking:
            for norm in self._norms:
                norm.applied = 0
        elif not self.module.training:
            for name, (holder, key) in self._statistics.items():
                holder[key] = weights[name]
        self._last_input = None
        outputs = self._with_features(as_outputs(self.module(x)), len(x))
        return outputs, {name: holder[key] for name, (holder, key) in self._statistics.items()} if self.tracking else {}

    def _remember_input(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._last_input = inputs[0] if inputs else None

    def _with_features(self, outputs: Outputs, batch: int) -> Outputs:
        features, self._last_input = self._last_input, None  # released, because it may hold the whole graph
        if "features" in outputs.taps or not _is_batch(features, batch):
            return outputs
        # channel by channel, so that the channels of folded devices stay separate
        return outputs._replace(taps={**outputs.taps, "features": features.flatten(1)})


def _is_batch(value: Any, batch: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and len(value) == batch


def _weight_slots(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each weight is stored; a weight shared by two layers has one name and two slots."""
    names: dict[int, str] = {}
    slots: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        first_name = names.setdefault(id(weight), name)
        slots.setdefault(first_name, []).append((module.get_submodule(owner)._parameters, key))
    return slots


def statistic_slots(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each batch norm stores the statistics that it is evaluated with."""
    return {
        f"{name}.{key}".lstrip("."): (layer._buffers, key)
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
        for key in STATISTICS
    }

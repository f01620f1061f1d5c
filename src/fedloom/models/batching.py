"""Run a block of K devices through one module: weights [K, ...] and inputs [K, batch, ...] in, [K, batch, ...] out.

There are four batching modes, from fast to slow. All of them give every device what it would compute alone:

- `interleave_devices`: kernels of our own with the devices in the lanes of vectors, if the model asks for them
  (`lanes/`).
- `fold_devices`: one forward pass of one wide network. The devices' channels lie next to each other,
  [batch, K * channels, ...], and the layers of `layers.py` keep them apart (a convolution uses K times the groups).
- `vmap_devices`: `torch.func.vmap` over the device axis, for modules whose layers cannot be folded.
- `loop_over_devices`: one device after the other; works for every module.

A mode is used only after a trial: when a model first runs, a few devices with random weights must get the same results
as in the loop. Modules that draw random numbers in training, such as dropout, get a seed for each device; in every mode
a device draws the numbers that it draws alone (`randomness.py`).
"""

import logging
import operator
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from ..placement import CPU, resident
from .lanes import NoLaneKernelError, interleave
from .layers import StaticBatchNorm, fold, support_device_axis, unfold
from .randomness import (
    CannotDrawError,
    DeviceRandomness,
    DrawRecorder,
    class_name,
    drawing_on_cpu,
    drawing_with,
    find_drawing_layers,
)
from .structure import (
    Family,
    Outputs,
    Shapes,
    as_outputs,
    has_known_layers,
    is_foldable,
    is_own_family,
    last_layer,
    layer_kinds,
    layers_of,
    named_layers,
    non_size_settings,
    own_weights,
)

logger = logging.getLogger(__name__)

BlockOutput = tuple[Outputs, dict[str, Tensor]]
"""The module's outputs, and the batch-norm statistics if they were tracked."""

Seeds = Sequence[int]


class BlockForward(Protocol):
    """(weights [K, ...], x [K, batch, ...]) -> outputs with the devices in front.

    With `seeds`, one per device, for a module that draws random numbers.
    """

    def __call__(self, weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput: ...


BatchingMode = Callable[["FunctionalModule"], BlockForward]
Result = TypeVar("Result")

STATISTICS = ("running_mean", "running_var")

INTERLEAVED, FOLDED, BY_VMAP = "interleaved", "folded", "run by vmap"
"""What a fast mode does to a module, in messages."""

TRIALS_PER_KIND, TRIALS_OF_OWN = 16, 2
"""After this many models of a kind gave the same answer, further ones are assumed to give it too; fewer of our own
families. A fleet has fewer sizes, but methods that draw a subnet in every step would spend most of their time on
trials."""


def trials_per_kind(kind: "ModelKind") -> int:
    return TRIALS_OF_OWN if kind.is_own else TRIALS_PER_KIND


Kernels = Literal["torch", "lanes"]
"""What computes a model: torch alone, or the lane kernels where they can."""


class ModelSpec(Hashable, Protocol):
    """What batching needs to know of a model; hashable, because everything here is cached by model."""

    @property
    def build(self) -> Family: ...
    @property
    def settings(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def kernels(self) -> Kernels: ...
    def module(self) -> nn.Module: ...
    def skeleton(self) -> nn.Module: ...
    def shapes(self) -> Shapes: ...
    def statistics(self) -> Shapes: ...
    def frozen_shapes(self) -> Shapes: ...
    def random_inputs(self, generator: torch.Generator, *leading: int) -> Tensor: ...


@dataclass(frozen=True)
class ModelKind:
    """Models of a family that consist of the same layers and differ only in sizes (channels, depths, kernels).

    Parameters
    ----------
    build : the family.
    settings : its settings that are no sizes.
    layers : the types of its layers, with their settings that are no sizes.
    is_own : whether it is a family of ours, of layers that are torch's or ours.
    """

    build: Family
    settings: tuple[tuple[str, Any], ...]
    layers: frozenset[Any]
    is_own: bool

    @staticmethod
    def of(model: "ModelSpec", module: nn.Module) -> "ModelKind":
        """The kind of a model.

        Parameters
        ----------
        model : the model.
        module : a module of it.
        """
        settings, layers = non_size_settings(dict(model.settings)), layer_kinds(module)
        return ModelKind(model.build, settings, layers, is_own_family(model.build) and has_known_layers(module))


class Trials(Generic[Result]):
    """What trials of earlier models of a family have found.

    Parameters
    ----------
    is_usual : whether a result says that no layer stood in the way.
    """

    def __init__(self, is_usual: Callable[[Result], bool]) -> None:
        self._found: list[tuple[ModelKind, Result]] = []
        self._is_usual = is_usual

    def of(self, kind: ModelKind) -> list[Result]:
        """Those of its kind; of our own families also usual ones of kinds that have these layers among others.

        Parameters
        ----------
        kind : the kind of model.
        """
        return [
            result
            for other, result in self._found
            if other == kind or (kind.is_own and kind.layers <= other.layers and self._is_usual(result))
        ]

    def infer_or_try(self, kind: ModelKind, run_trial: Callable[[], Result]) -> Result:
        """The unanimous result of enough earlier models, or else that of a trial, which is recorded.

        Parameters
        ----------
        kind : the kind of model.
        run_trial : tries the model.
        """
        known = self.of(kind)
        if len(known) >= trials_per_kind(kind) and len(set(known)) == 1:
            return known[0]
        result = run_trial()
        self._found.append((kind, result))
        return result


def block_forward(model: ModelSpec, devices: int, training: bool, tracking: bool = False) -> BlockForward:
    """The function that runs a model for this many devices; with `tracking` it also returns batch-norm statistics."""
    # the dtype is part of the cache key: a functional module holds its module's constants, which have a precision
    alone = devices == 1 and not is_interleaved(model, training, tracking)
    build = _single_device_forward if alone else _multi_device_forward
    return build(model, training, tracking, torch.get_default_dtype())


def is_interleaved(model: ModelSpec, training: bool, tracking: bool = False) -> bool:
    """True if the lane kernels run the model, for any number of devices."""
    return model.kernels == "lanes" and batching_mode(model, training, tracking)[0] is interleave_devices


@lru_cache(maxsize=256)
def compiled_forward(model: ModelSpec, devices: int, training: bool, tracking: bool = False) -> BlockForward:
    """`block_forward`, compiled for this number of devices; as it is where torch cannot compile it."""
    from torch._dynamo.exc import TorchDynamoException  # takes a second to import

    plain = block_forward(model, devices, training, tracking)
    compiled = cast(BlockForward, torch.compile(plain))

    def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        try:
            return compiled(weights, x, seeds)
        except TorchDynamoException as error:
            _warn_not_compiled(model, str(error).partition("\n")[0])
            return plain(weights, x, seeds)

    return run


@lru_cache(maxsize=1024)
def _warn_not_compiled(model: ModelSpec, reason: str) -> None:
    """Once per model and reason."""
    logger.warning("%s is not compiled, which is slower: %s", getattr(model.build, "__name__", "a model"), reason)


@lru_cache(maxsize=256)
def _single_device_forward(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> BlockForward:
    module = _functional_module(model, training, tracking, dtype)
    return single_device(module, all_shapes(model), trial_inputs(model))


@lru_cache(maxsize=256)
def _multi_device_forward(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> BlockForward:
    mode, reasons = batching_mode(model, training, tracking)
    if reasons:
        logger.debug("slower batching of %s: %s", getattr(model.build, "__name__", "a model"), "; ".join(reasons))
    forward = mode(_functional_module(model, training, tracking, dtype))
    if not training or not is_stochastic(model):
        return forward
    one_by_one = seed_each_device(block_forward(model, 1, training, tracking))
    return one_by_one if mode is loop_over_devices else draw_alone_if_needed(forward, one_by_one)


@lru_cache(maxsize=256)
def _functional_module(model: ModelSpec, training: bool, tracking: bool, dtype: torch.dtype) -> "FunctionalModule":
    return FunctionalModule(model.skeleton().to(dtype), training, tracking)


@lru_cache(maxsize=256)
def batching_mode(model: ModelSpec, training: bool, tracking: bool) -> tuple[BatchingMode, tuple[str, ...]]:
    """The fastest correct mode of a model, and why faster ones failed."""
    kind = _kind(model, training, tracking)
    trials = _mode_trials(kind.build, kind.settings, model.kernels, training, tracking)

    def run_trial() -> tuple[BatchingMode, tuple[str, ...]]:
        module = FunctionalModule(model.module().double(), training, tracking)
        # a backward pass takes most of a trial: once for a kind of model if its first one is as fast as can be
        known = trials.of(kind)
        gradients = training and (not known or any(reasons for _, reasons in known))
        stochastic = training and is_stochastic(model)
        in_lanes = model.kernels == "lanes"
        return choose_mode(module, all_shapes(model), trial_inputs(model), stochastic, gradients, in_lanes)

    return trials.infer_or_try(kind, run_trial)


def why_one_by_one(model: ModelSpec) -> str | None:
    """Why devices train one at a time; None if they do not."""
    mode, reasons = batching_mode(model, True, False)
    return reasons[-1].partition(": ")[2] if mode is loop_over_devices else None


@lru_cache(maxsize=256)
def is_stochastic(model: ModelSpec) -> bool:
    """True if the model draws random numbers in training."""

    def run_trial() -> bool:
        module = _functional_module(model, True, False, torch.get_default_dtype())
        return draws_random_numbers(module, all_shapes(model), trial_inputs(model))

    kind = _kind(model, training=True, tracking=False)
    return _draw_trials(kind.build, kind.settings).infer_or_try(kind, run_trial)


@lru_cache(maxsize=256)
def find_draw_in_evaluation(model: ModelSpec) -> str | None:
    """The layer that draws random numbers in evaluation, where it should not; None if there is none."""
    module, shapes, inputs = FunctionalModule(model.module(), training=False), all_shapes(model), trial_inputs(model)
    if not draws_random_numbers(module, shapes, inputs):
        return None
    weights, x = trial_batch(shapes, inputs, torch.get_default_dtype())
    forward, found = loop_over_devices(module), list[str]()
    with _running_layers(module.module) as running:
        record = DrawRecorder(lambda: found.append(_label(running)))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), record:
            forward(weights, x)
    return found[0] if found else "its forward"


@lru_cache(maxsize=256)
def find_changed_buffer(model: ModelSpec) -> str | None:
    """The buffer that every training step changes, such as a running mean; None if there is none.

    One module serves all devices, so they would share what it remembers. What is only computed at first use may stay.
    """
    module = FunctionalModule(model.module(), training=True)
    own = [name for name, _ in module.module.named_buffers() if not name.endswith((*STATISTICS, "num_batches_tracked"))]
    if not own:
        return None
    weights, x = trial_batch(all_shapes(model), trial_inputs(model), torch.get_default_dtype())
    forward, seen = loop_over_devices(module), list[dict[str, Tensor]]()
    for device in range(2):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            forward({name: weight[device : device + 1] for name, weight in weights.items()}, x[device : device + 1])
        seen.append({name: buffer.clone() for name, buffer in module.module.named_buffers()})
    return next((name for name in own if not _same(seen[0].get(name), seen[1].get(name))), None)


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None or left.shape != right.shape:
        return left is right
    return torch.allclose(left.double(), right.double(), rtol=0, atol=0, equal_nan=True)


@lru_cache(maxsize=256)
def _mode_trials(
    build: Family, settings: tuple[tuple[str, Any], ...], kernels: Kernels, training: bool, tracking: bool
) -> Trials[tuple[BatchingMode, tuple[str, ...]]]:
    return Trials(_is_fastest)


def _is_fastest(found: tuple[BatchingMode, tuple[str, ...]]) -> bool:
    """True if no faster mode failed and no layer draws."""
    return found in ((interleave_devices, ()), (fold_devices, ()))


@lru_cache(maxsize=256)
def _draw_trials(build: Family, settings: tuple[tuple[str, Any], ...]) -> Trials[bool]:
    return Trials(is_usual=operator.not_)


@lru_cache(maxsize=256)
def _kind(model: ModelSpec, training: bool, tracking: bool) -> ModelKind:
    return ModelKind.of(model, _functional_module(model, training, tracking, torch.get_default_dtype()).module)


Classes = frozenset[str]
"""Full names of classes of layers."""


@dataclass(frozen=True)
class Fold:
    """All devices as one wide network.

    Parameters
    ----------
    drawing : the classes of layers that draw random numbers.
    apart : those of them that run apart from the rest, by vmap.
    """

    drawing: Classes = frozenset()
    apart: Classes = frozenset()

    def __call__(self, module: "FunctionalModule") -> BlockForward:
        layers = find_drawing_layers(module.module, self.drawing, self.apart)

        def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
            devices = len(x)
            with drawing_with(layers, DeviceRandomness(seeds, axis=1) if seeds else None):
                outputs, statistics = module(weights, fold(x))
            return (
                tree_map(lambda tensor: unfold(tensor, devices), outputs),
                {name: tensor.unflatten(0, (devices, -1)) for name, tensor in statistics.items()},
            )

        return run


def interleave_devices(module: "FunctionalModule") -> BlockForward:
    """All devices as one network, next to each other in the lanes of vectors."""
    run_all = interleave(module, module.module)

    def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        outputs, statistics = cast(BlockOutput, run_all(weights, x))
        # in the order of the module, whose layers may run in another
        return outputs, {name: statistics[name] for name in module.tracked_statistics() if name in statistics}

    return run


@dataclass(frozen=True)
class Vmap:
    """All devices at once by `torch.func.vmap`.

    Parameters
    ----------
    drawing : the classes of layers that draw random numbers.
    channels_last : whether they draw those for maps channels-last, as a single device does.
    """

    drawing: Classes = frozenset()
    channels_last: bool = False

    def __call__(self, module: "FunctionalModule") -> BlockForward:
        layers = find_drawing_layers(module.module, self.drawing)
        deterministic, stochastic = (vmap(module, randomness=kind) for kind in ("error", "different"))

        def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
            with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the fused ones
                if seeds is None:
                    return deterministic(dict(weights), x)
                with drawing_with(layers, DeviceRandomness(seeds, 0, self.channels_last)):
                    return stochastic(dict(weights), x)

        return run


fold_devices, vmap_devices = Fold(), Vmap()


def loop_over_devices(module: "FunctionalModule") -> BlockForward:
    """One device after the other."""

    def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        outputs = []
        with torch.random.fork_rng(devices=[], enabled=seeds is not None):
            for k in range(len(x)):
                if seeds is not None:
                    torch.manual_seed(seeds[k])
                with drawing_on_cpu(x) if seeds is not None else nullcontext():
                    outputs.append(module({name: weight[k] for name, weight in weights.items()}, x[k]))
        return cast(BlockOutput, tree_map(lambda *tensors: torch.stack(tensors), *outputs))

    return run


def single_device(
    module: "FunctionalModule", shapes: Shapes, inputs: Tensor, dtype: torch.dtype | None = None
) -> BlockForward:
    """A block of one device: images channels-last, which is faster, unless the module needs the contiguous layout."""

    def channels_last(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        with torch.random.fork_rng(devices=[], enabled=seeds is not None):
            if seeds is not None:
                torch.manual_seed(seeds[0])
            with drawing_on_cpu(x) if seeds is not None else nullcontext():
                outputs = module({name: weight[0] for name, weight in weights.items()}, fold(x))
        return cast(BlockOutput, tree_map(lambda tensor: tensor.unsqueeze(0), outputs))

    weights, x = trial_batch(shapes, inputs, dtype or torch.get_default_dtype())
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            channels_last({name: weight[:1] for name, weight in weights.items()}, x[:1])
    except RuntimeError:  # such as a .view() of a map that is not contiguous
        return loop_over_devices(module)
    return channels_last


def seed_each_device(forward: BlockForward) -> BlockForward:
    """Run a block by a forward of one device, each with its own seed: the reference for what a device draws."""

    def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        assert seeds is not None
        outputs = [
            forward({name: weight[k : k + 1] for name, weight in weights.items()}, x[k : k + 1], (seed,))
            for k, seed in enumerate(seeds)
        ]
        return cast(BlockOutput, tree_map(lambda *tensors: torch.cat(tensors), *outputs))

    return run


def draw_alone_if_needed(forward: BlockForward, one_by_one: BlockForward) -> BlockForward:
    """Run a block of devices that draw; one by one if a pass, unlike the trial, draws what cannot be split."""

    def run(weights: Mapping[str, Tensor], x: Tensor, seeds: Seeds | None = None) -> BlockOutput:
        try:
            return forward(weights, x, seeds)
        except CannotDrawError:
            return one_by_one(weights, x, seeds)

    return run


def choose_mode(
    module: "FunctionalModule",
    shapes: Shapes,
    inputs: Tensor,
    stochastic: bool = False,
    gradients: bool = False,
    in_lanes: bool = False,
) -> tuple[BatchingMode, tuple[str, ...]]:
    """Try the modes from fast to slow and return the first correct one, and why faster ones failed.

    `module` is in double precision, where rounding cannot be mistaken for an error. A module with a part that declares
    `foldable = False` (its activations have no channel axis) is not folded, and no reason is given for that. With
    `gradients` those must agree too; if it is `stochastic`, every device must draw what it draws alone, in both passes.
    The lane kernels are tried only if they are asked for.
    """
    reasons: dict[str, str] = {}
    agree = _agree_on_draws if stochastic else _agree_on_gradients if gradients else _agree
    for way, mode in _modes_to_try(module, shapes, inputs, stochastic, in_lanes):
        with _running_layers(module.module) as running, warnings.catch_warnings():
            warnings.filterwarnings("error", "There is a performance drop")  # vmap would loop over the devices
            try:
                if agree(mode(module), module, shapes, inputs):
                    reasons.pop(way, None)
                    return mode, tuple(reasons.values())
                reason = "devices mix"
            except Exception as error:  # a user's module may raise anything, and there is a slower mode
                reason = _explain(error, running, way)
        reasons.setdefault(way, f"{type(module.module).__name__} cannot be {way}: {reason}")
    return loop_over_devices, tuple(reasons.values())


def _modes_to_try(
    module: "FunctionalModule", shapes: Shapes, inputs: Tensor, stochastic: bool, in_lanes: bool
) -> Iterator[tuple[str, BatchingMode]]:
    """The modes from fast to slow, each with what it does to a module."""
    drawing = _find_drawing_classes(module, shapes, inputs) if stochastic else frozenset()
    own = frozenset(name for name in drawing if not name.startswith("torch.nn."))
    apart = own - {class_name(layer) for layer in module.module.modules() if not _is_simple(layer)}
    if in_lanes:
        yield INTERLEAVED, interleave_devices
    if is_foldable(module.module):
        yield FOLDED, Fold(drawing)
        if apart:
            yield FOLDED, Fold(drawing, apart)
    yield BY_VMAP, Vmap(drawing)
    if stochastic and inputs.dim() == 5:
        yield BY_VMAP, Vmap(drawing, channels_last=True)


def _is_simple(layer: nn.Module) -> bool:
    return not [*layer.children(), *layer.parameters()]


def _find_drawing_classes(module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> Classes:
    """The classes of layers that draw random numbers themselves."""
    weights, x = trial_batch(shapes, inputs, torch.float64)
    forward, found = single_device(module, shapes, inputs, torch.float64), set[str]()
    with _running_layers(module.module) as running:
        record = DrawRecorder(lambda: found.add(class_name(running[-1])))
        with torch.random.fork_rng(devices=[]), torch.no_grad(), record:
            forward(weights, x[:1])
    return frozenset(found)


@contextmanager
def _running_layers(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The layers that are running, the innermost last; after an error, those that raised it."""
    running: list[nn.Module] = []
    hooks = []
    for layer in module.modules():
        hooks.append(layer.register_forward_pre_hook(lambda own, _: running.append(own)))
        hooks.append(layer.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _explain(error: Exception, running: Sequence[nn.Module], way: str) -> str:
    """Why a mode failed, and in which layer, in a line."""
    layer, text = _label(running), str(error)
    if isinstance(error, CannotDrawError):
        return f"{layer} uses {text}, which cannot be drawn for each device"
    if isinstance(error, NoLaneKernelError):
        return f"{layer}: {text}" if running else text
    operation = re.search(r"aten::(\w+)", text)
    if operation:
        return f"{layer} uses {operation[1]}, which torch cannot run for many devices at once"
    if "escaped from inside" in text:
        return f"{layer} keeps tensors for later, as checkpointing does"
    if "data-dependent control flow" in text or ".item()" in text:
        return f"{layer} branches on the values of a tensor"
    if way == FOLDED:  # what torch says about the shapes tells nothing that a user could change
        return f"{layer} takes only the weights and channels of one device"
    return f"{layer}: {text.splitlines()[0] if text else type(error).__name__}"


def _label(running: Sequence[nn.Module]) -> str:
    if not running:
        return "its forward"
    outermost, innermost = running[0], running[-1]
    names = [name for name, layer in outermost.named_modules() if layer is innermost and name]
    return f"{names[0]} ({type(innermost).__name__})" if names else type(innermost).__name__


def _agree(forward: BlockForward, module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> bool:
    """True if devices get the outputs that each gets alone."""
    weights, x = trial_batch(shapes, inputs, torch.float64)
    with torch.no_grad():
        left, right = forward(weights, x), loop_over_devices(module)(weights, x)
    return _all_close(tree_leaves(left), tree_leaves(right))


def _agree_on_gradients(forward: BlockForward, module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> bool:
    """True if devices get the outputs and gradients that each gets alone.

    Gradients too, because what torch does for many devices at once may differ in its backward pass only.
    """
    return _train_alike(forward, loop_over_devices(module), shapes, inputs)


def _agree_on_draws(forward: BlockForward, module: "FunctionalModule", shapes: Shapes, inputs: Tensor) -> bool:
    """True if devices get the outputs and gradients that each gets alone with its seed.

    Gradients too, because a checkpointed layer draws its numbers again in the backward pass.
    """
    alone = seed_each_device(single_device(module, shapes, inputs, torch.float64))
    return _train_alike(forward, alone, shapes, inputs, range(1, 1 + len(inputs)))


def _train_alike(
    left: BlockForward, right: BlockForward, shapes: Shapes, inputs: Tensor, seeds: Seeds | None = None
) -> bool:
    found = []
    with torch.inference_mode(False), torch.enable_grad():
        weights, x = trial_batch(shapes, inputs.clone(), torch.float64)
        for run in (left, right):
            leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
            results = tree_leaves(run(leaves, x, seeds))
            outputs = [result for result in results if result.requires_grad]
            directions = [torch.linspace(0.5, 1.5, output.numel()).to(output).view_as(output) for output in outputs]
            # a sum, because torch imports sympy, which takes half a second, to check directions that it is given
            parts = [(output * direction).sum() for output, direction in zip(outputs, directions, strict=True)]
            gradients = torch.autograd.grad(torch.stack(parts).sum(), list(leaves.values()), materialize_grads=True)
            found.append((results, gradients))
    largest = max((float(gradient.abs().max()) for gradient in found[1][1] if gradient.numel()), default=0.0)
    return _all_close(found[0][0], found[1][0]) and _all_close(found[0][1], found[1][1], max(1.0, largest))


def _all_close(left: Sequence[Tensor], right: Sequence[Tensor], scale: float = 1.0) -> bool:
    """True but for rounding; `scale` is the size of the numbers that cancel out where the result is zero."""
    pairs = zip(left, right, strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9 * scale) for a, b in pairs)


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
    """Of weights, frozen ones included, and batch-norm statistics."""
    return {**model.shapes(), **model.frozen_shapes(), **model.statistics()}


class FunctionalModule:
    """A module that takes its weights at every call: `torch.func.functional_call` without its overhead of 0.5 ms.

    Not thread-safe. Buffers other than normalization statistics are constants of the module. The input of the last
    layer is added to the taps as "features" if the module does not provide them itself.
    """

    def __init__(self, module: nn.Module, training: bool, tracking: bool = False):
        support_device_axis(module)
        self.module = module.train(training)
        self.tracking = tracking
        layers = layers_of(module)
        self._norms = [layer for layer in layers if isinstance(layer, StaticBatchNorm)]
        for norm in self._norms:
            norm.tracking = tracking
        self._slots = _weight_slots(module)
        self._statistics = statistic_slots(module)
        self._place = CPU
        self._constants = [
            (layer._buffers, key, buffer)
            for layer in layers
            for key, buffer in layer._buffers.items()
            if buffer is not None and not isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ]
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
        if x.device != self._place:
            self._move_constants(x.device)
        self._last_input = None
        outputs = self._with_features(as_outputs(self.module(x)), len(x))
        return outputs, {name: holder[key] for name, (holder, key) in self.tracked_statistics().items()}

    def tracked_statistics(self) -> Mapping[str, tuple[dict[str, Any], str]]:
        """Where each batch norm leaves the statistics of a pass, if they are tracked."""
        return self._statistics if self.tracking else {}

    def _move_constants(self, device: torch.device) -> None:
        """Buffers to where the inputs are; each crosses once per process."""
        for holder, key, buffer in self._constants:
            holder[key] = resident(buffer, device)
        self._place = device

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
    for owner, layer in named_layers(module):
        for key, weight in own_weights(layer):
            first_name = names.setdefault(id(weight), f"{owner}.{key}".lstrip("."))
            slots.setdefault(first_name, []).append((layer._parameters, key))
    return slots


def statistic_slots(module: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each batch norm stores the statistics that it is evaluated with."""
    return {
        f"{name}.{key}".lstrip("."): (layer._buffers, key)
        for name, layer in named_layers(module)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
        for key in STATISTICS
    }

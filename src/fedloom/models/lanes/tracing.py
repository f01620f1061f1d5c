"""Record what a module computes for one device as a list of operations that have kernels.

The module runs once on numbers, and every torch function that touches an activation is recorded. Whatever is not known
here, in every setting, is refused with a reason: nothing is ever computed that only resembles what the module does.
Of a module of known layers, which look at no numbers, only the sizes are followed: convolutions return zeros.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ..layers import GroupNorm, Scaler, StaticBatchNorm, _InstanceNorm
from ..normalization import ParametricNorm
from ..preactresnet import MixedPool
from ..structure import named_layers


class NoLaneKernelError(Exception):
    """A module does something that has no kernel; the message says what."""


@dataclass(frozen=True)
class Value:
    """An activation of one device: [batch, channels, *positions], or [batch, channels * positions] if it is flat."""

    channels: int
    positions: tuple[int, ...] = ()
    flat: bool = False


@dataclass
class Operation:
    """One step: values are numbers, weights are names or None."""

    kind: str
    inputs: tuple[int, ...]
    output: int
    weights: tuple[str | None, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trace:
    """What a module computes; value 0 is the input, `outputs` has the module's structure with values for tensors."""

    batch: int
    values: list[Value]
    operations: list[Operation]
    outputs: Any
    shapes: Mapping[str, tuple[int, ...]]


SHAPE_QUERIES = {
    "__get__",
    "size",
    "dim",
    "__len__",
    "is_floating_point",
    "numel",
    "stride",
    "is_contiguous",
    "get_device",
}


def trace(
    module: Callable[..., Any], layers: nn.Module, weights: Mapping[str, Tensor], x: Tensor, sizes_only: bool = False
) -> Trace:
    """Record a module.

    Parameters
    ----------
    module : runs the layers with weights: (weights, x) -> outputs and statistics.
    layers : its layers.
    weights : the weights of one device.
    x : the inputs of one device, [batch, ...].
    sizes_only : whether what takes time may return zeros, since nothing depends on the numbers.
    """
    recorder = TraceRecorder(weights, x, sizes_only)
    with torch.no_grad(), recorder.leaves(layers), recorder:
        outputs, _ = module(weights, x)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return Trace(len(x), recorder.values, recorder.operations, tree_map(recorder.output, outputs), shapes)


class TraceRecorder(TorchFunctionMode):
    def __init__(self, weights: Mapping[str, Tensor], x: Tensor, sizes_only: bool = False):
        super().__init__()
        self.sizes_only = sizes_only
        self.weights = {id(weight): name for name, weight in weights.items()}
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        self.values = [value_of(x)]
        self.numbers = {id(x): 0}
        self.operations: list[Operation] = []
        self.layer_names: dict[int, str] = {}
        self.batch = len(x)
        self._alive: list[Tensor] = [x, *weights.values()]  # an id must not be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensors = [one for one in (*_flat(args), *kwargs.values()) if isinstance(one, Tensor)]
        like = SIZES.get(func) if self.sizes_only else None
        result = (func if like is None else like)(*args, **kwargs)
        if not any(id(tensor) in self.numbers for tensor in tensors):
            first = self.weights.get(id(tensors[0])) if len(tensors) == 1 else None
            if first is not None and isinstance(result, Tensor) and name in ("flatten", "view", "reshape", "detach"):
                self.weights[id(result)] = first
                self._alive.append(result)
            return result
        if not isinstance(result, Tensor):
            if name in SHAPE_QUERIES:
                return result
            raise NoLaneKernelError(f"{name} has no lane kernel")
        record = RECORDED.get(func)
        if record is None:
            raise NoLaneKernelError(f"{name} has no lane kernel")
        record(self, result, *args, **kwargs)
        return result

    @contextmanager
    def leaves(self, layers: nn.Module) -> Iterator[None]:
        """Record known layers as a whole."""
        held = []
        for name, layer in named_layers(layers):
            self.layer_names[id(layer)] = name
            record = next((r for forward, r in LEAVES.items() if type(layer).forward is forward), None)
            if record is not None:
                layer.forward = self._leaf(layer, record, layer.forward)
                held.append(layer)
        try:
            yield
        finally:
            for layer in held:
                del layer.forward

    def _leaf(self, layer: nn.Module, record: Any, forward: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunction():
                result: Tensor = torch.zeros_like(x) if self.sizes_only and record in KEEP_SIZES else forward(x)
            if result is not x:
                record(self, result, x, layer)
            return result

        return run

    def value(self, tensor: Any) -> int:
        if not isinstance(tensor, Tensor) or id(tensor) not in self.numbers:
            raise NoLaneKernelError("a tensor that is neither an activation nor a weight has no lane kernel")
        return self.numbers[id(tensor)]

    def name(self, weight: Tensor | None) -> str | None:
        if weight is None:
            return None
        if id(weight) not in self.weights:
            raise NoLaneKernelError("a weight that is computed from others has no lane kernel")
        name = self.weights[id(weight)]
        own, used = self.shapes[name], weight.shape
        if used != own and not (used[0] == own[0] and len(used) <= 2 and weight.numel() == own.numel()):
            raise NoLaneKernelError(f"{name} of another shape has no lane kernel")
        return name

    def output(self, tensor: Tensor) -> int:
        return self.value(tensor)

    def add(
        self, kind: str, result: Tensor, inputs: tuple[Tensor, ...], weights: tuple[Tensor | None, ...] = (),
        value: Value | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        numbers = tuple(map(self.value, inputs))
        self.values.append(value or value_of(result))
        self.numbers[id(result)] = len(self.values) - 1
        self._alive.append(result)
        names = tuple(map(self.name, weights))
        self.operations.append(Operation(kind, numbers, len(self.values) - 1, names, settings))

    def same(self, result: Tensor, x: Tensor, value: Value | None = None) -> None:
        """The same numbers in memory, perhaps of another shape."""
        if result is not x or value is not None:
            self.add("alias", result, (x,), value=value)


def value_of(tensor: Tensor) -> Value:
    if tensor.dim() < 2 or not tensor.is_floating_point():
        raise NoLaneKernelError("activations without a channel axis have no lane kernels")
    return Value(tensor.shape[1], tuple(tensor.shape[2:]))


def _flat(values: Any) -> Iterator[Any]:
    for one in values:
        if isinstance(one, tuple | list):
            yield from _flat(one)
        else:
            yield one


def _pair(number: Any, axes: int) -> tuple[int, ...]:
    numbers = tuple(number) if isinstance(number, tuple | list) else (number,)
    return numbers * (axes // len(numbers))


def _conv(axes: int) -> Callable[..., None]:
    def record(
        recorder: TraceRecorder, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
        padding: Any = 0, dilation: Any = 1, groups: int = 1,
    ) -> None:  # fmt: skip
        if any(number != 1 for number in _pair(dilation, axes)):
            raise NoLaneKernelError("a convolution with dilation has no lane kernel")
        if isinstance(padding, str):
            raise NoLaneKernelError(f"a convolution with padding {padding!r} has no lane kernel")
        if x.dim() != axes + 2:
            raise NoLaneKernelError("a convolution without batches has no lane kernel")
        recorder.add(
            "conv", result, (x,), (weight, bias), kernel=tuple(weight.shape[2:]), stride=_pair(stride, axes),
            padding=_pair(padding, axes), groups=groups,
        )  # fmt: skip

    return record


def _linear(recorder: TraceRecorder, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    if x.dim() != 2:
        raise NoLaneKernelError("a linear layer on positions has no lane kernel")
    recorder.add("linear", result, (x,), (weight, bias))


def _relu(recorder: TraceRecorder, result: Tensor, x: Tensor, inplace: bool = False) -> None:
    recorder.add("relu", result, (x,), value=recorder.values[recorder.value(x)])


def _relu6(recorder: TraceRecorder, result: Tensor, x: Tensor, inplace: bool = False) -> None:
    recorder.add("relu6", result, (x,), value=recorder.values[recorder.value(x)])


def _hardtanh(
    recorder: TraceRecorder,
    result: Tensor,
    x: Tensor,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
) -> None:
    if (min_val, max_val) != (0.0, 6.0):
        raise NoLaneKernelError("hardtanh has no lane kernel")
    _relu6(recorder, result, x)


def _max_pool(
    recorder: TraceRecorder, result: Tensor, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> None:  # fmt: skip
    if x.dim() != 4:
        raise NoLaneKernelError("max_pool2d without batches has no lane kernel")
    kernel = _pair(kernel_size, 2)
    step = kernel if stride is None or stride == [] else _pair(stride, 2)
    arguments = (kernel, step, _pair(padding, 2), _pair(dilation, 2), ceil_mode)
    recorder.add("max_pool", result, (x,), arguments=arguments)


def _max_pool1d(
    recorder: TraceRecorder, result: Tensor, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    dilation: Any = 1, ceil_mode: bool = False, return_indices: bool = False,
) -> None:  # fmt: skip
    if x.dim() != 3:
        raise NoLaneKernelError("max_pool1d without batches has no lane kernel")
    kernel = (1, *_pair(kernel_size, 1))
    step = kernel if stride is None or stride == [] else (1, *_pair(stride, 1))
    arguments = (kernel, step, (0, *_pair(padding, 1)), (1, *_pair(dilation, 1)), ceil_mode)
    recorder.add("max_pool", result, (x,), arguments=arguments)


def _avg_pool(
    recorder: TraceRecorder, result: Tensor, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> None:  # fmt: skip
    if x.dim() != 4:
        raise NoLaneKernelError("avg_pool2d without batches has no lane kernel")
    kernel = _pair(kernel_size, 2)
    step = kernel if stride is None or stride == [] else _pair(stride, 2)
    arguments = (kernel, step, _pair(padding, 2), ceil_mode, count_include_pad, divisor_override)
    recorder.add("avg_pool", result, (x,), arguments=arguments)


def _adaptive_avg_pool(recorder: TraceRecorder, result: Tensor, x: Tensor, output_size: Any) -> None:
    if x.dim() != 4 or tuple(result.shape[2:]) != (1, 1):
        raise NoLaneKernelError("adaptive pooling to more than one number has no lane kernel")
    recorder.add("mean", result, (x,))


def _mean(
    recorder: TraceRecorder, result: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, **other: Any
) -> None:
    axes = {axis % x.dim() for axis in (dim if isinstance(dim, tuple | list) else [0 if dim is None else dim])}
    if dim is None or axes != set(range(2, x.dim())) or other:
        raise NoLaneKernelError("a mean over other axes than the positions has no lane kernel")
    recorder.add("mean", result, (x,))


def _flatten(recorder: TraceRecorder, result: Tensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> None:
    if result.shape == x.shape:
        recorder.same(result, x)
    elif result.dim() == 2 and result.shape[0] == x.shape[0] == recorder.batch:
        before = recorder.values[recorder.value(x)]
        recorder.same(result, x, Value(before.channels, before.positions, flat=True))
    else:
        raise NoLaneKernelError("reshaping activations has no lane kernel")


def _reshape(recorder: TraceRecorder, result: Tensor, x: Tensor, *shape: Any, **other: Any) -> None:
    _flatten(recorder, result, x)


def _add(recorder: TraceRecorder, result: Tensor, left: Any, right: Any, alpha: float = 1) -> None:
    shapes = [getattr(one, "shape", None) for one in (left, right)]
    if alpha != 1 or shapes[0] is None or shapes[0] != shapes[1]:
        raise NoLaneKernelError("adding tensors of different shapes has no lane kernel")
    values = [recorder.values[recorder.value(one)] for one in (left, right)]
    if values[0] != values[1]:
        raise NoLaneKernelError("adding tensors of different layouts has no lane kernel")
    recorder.add("add", result, (left, right), value=values[0])


def _divide(recorder: TraceRecorder, result: Tensor, x: Any, by: Any) -> None:
    if not isinstance(by, int | float):
        raise NoLaneKernelError("dividing tensors has no lane kernel")
    recorder.add("scale", result, (x,), value=recorder.values[recorder.value(x)], rate=float(by))


def _same(recorder: TraceRecorder, result: Tensor, x: Tensor, *other: Any, **others: Any) -> None:
    recorder.same(result, x, recorder.values[recorder.value(x)] if result is not x else None)


def _detach(recorder: TraceRecorder, result: Tensor, x: Tensor) -> None:
    recorder.add("detach", result, (x,), value=recorder.values[recorder.value(x)])


def _dropout(
    recorder: TraceRecorder, result: Tensor, x: Tensor, p: float = 0.5, training: bool = True, **other: Any
) -> None:
    if training and p > 0:
        raise NoLaneKernelError("dropout has no lane kernel")
    _same(recorder, result, x)


def _scaler(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: Scaler) -> None:
    recorder.add("scale", result, (x,), value=recorder.values[recorder.value(x)], rate=float(layer.rate))


def _batch_norm(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: StaticBatchNorm) -> None:
    static, name = layer.track_running_stats and not layer.training and not layer.tracking, None
    if layer.tracking:
        name = recorder.layer_names[id(layer)]
        if any(operation.settings.get("tracks") == name for operation in recorder.operations):
            raise NoLaneKernelError(f"{name}, which is applied twice, has no lane kernel that tracks statistics")
    statistics = (layer.running_mean, layer.running_var) if static else ()
    recorder.add(
        "norm", result, (x,), (layer.weight, layer.bias, *statistics), eps=layer.eps, per_example=False, groups=None,
        tracks=name,
    )  # fmt: skip


def _group_norm(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: GroupNorm) -> None:
    recorder.add(
        "norm", result, (x,), (layer.weight, layer.bias), eps=layer.eps, per_example=True, groups=layer.num_groups
    )


def _layer_norm(
    recorder: TraceRecorder, result: Tensor, x: Tensor, normalized_shape: Any, weight: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 1e-5,
) -> None:  # fmt: skip
    """Of features: group norm with one group. That of maps has a weight for every position."""
    if x.dim() != 2 or recorder.values[recorder.value(x)].flat:
        raise NoLaneKernelError("layer norm of positions has no lane kernel")
    recorder.add("norm", result, (x,), (weight, bias), eps=eps, per_example=True, groups=1)


def _instance_norm(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: _InstanceNorm) -> None:
    recorder.add("norm", result, (x,), (layer.weight, layer.bias), eps=layer.eps, per_example=True, groups=x.shape[1])


def _parametric_norm(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: ParametricNorm) -> None:
    weights = (layer.weight, layer.shift, layer.bias)
    recorder.add("parametric", result, (x,), weights, eps=layer.eps, per_example=layer.per_sample)


def _mixed_pool(recorder: TraceRecorder, result: Tensor, x: Tensor, layer: MixedPool) -> None:
    recorder.add("mixed_pool", result, (x,), (layer.maximum,), window=tuple(layer.window))


LEAVES: dict[Any, Callable[..., None]] = {
    Scaler.forward: _scaler,
    StaticBatchNorm.forward: _batch_norm,
    GroupNorm.forward: _group_norm,
    _InstanceNorm.forward: _instance_norm,
    ParametricNorm.forward: _parametric_norm,
    MixedPool.forward: _mixed_pool,
}

KEEP_SIZES = frozenset({_batch_norm, _group_norm, _instance_norm, _parametric_norm})
"""Layers whose outputs have the sizes of their inputs."""

RECORDED: dict[Any, Callable[..., None]] = {
    **dict.fromkeys((torch.conv2d, F.conv2d), _conv(2)),
    **dict.fromkeys((torch.conv1d, F.conv1d), _conv(1)),
    F.linear: _linear,
    **dict.fromkeys((torch.relu, torch.relu_, F.relu, Tensor.relu, Tensor.relu_), _relu),
    F.relu6: _relu6,
    F.hardtanh: _hardtanh,
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool),
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    F.avg_pool2d: _avg_pool,
    F.adaptive_avg_pool2d: _adaptive_avg_pool,
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    **dict.fromkeys((torch.flatten, Tensor.flatten), _flatten),
    **dict.fromkeys((torch.reshape, Tensor.reshape, Tensor.view), _reshape),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__), _add),
    **dict.fromkeys((torch.div, Tensor.div, Tensor.__truediv__), _divide),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _same),
    Tensor.detach: _detach,
    F.dropout: _dropout,
    F.layer_norm: _layer_norm,
}


def _conv2d_zeros(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Zeros of the size of a convolution of maps; what is refused afterwards is computed."""
    if isinstance(padding, str) or x.dim() != 4:
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    across = zip(x.shape[2:], weight.shape[2:], *(_pair(one, 2) for one in (stride, padding, dilation)), strict=True)
    sizes = [(size + 2 * pad - apart * (taps - 1) - 1) // step + 1 for size, taps, step, pad, apart in across]
    return x.new_zeros(len(x), len(weight), *sizes)


SIZES: dict[Any, Callable[..., Tensor]] = dict.fromkeys((torch.conv2d, F.conv2d), _conv2d_zeros)
"""Functions that take time, and what makes zeros of the size of their results."""

"""Find the weights whose inputs are concatenated, as in DenseNet, U-Net or after a bidirectional LSTM, by tracing.

One pass follows what `torch.cat` made through element-wise operations, pooling, transposing and flattening
to the layer that receives it. Where the trace is lost, nothing is found, and the proof of the footprint refuses it.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .axes import Layout, is_plain, plain
from .randomness import DispatchMode
from .stacked_layers import join
from .structure import InputSpec

aten = torch.ops.aten

Dims = dict[int, Layout]
"""The stacked dimensions of an activation."""

CONTRACTIONS = frozenset(
    {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.embedding, aten.mkldnn_rnn_layer}
)
REDUCTIONS = frozenset({aten.mean, aten.sum, aten.amax, aten.amin})
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.PReLU)


def find_concatenated_inputs(module: nn.Module, inputs: InputSpec) -> dict[str, dict[int, Layout]]:
    """The layouts of weights and statistics whose layer receives concatenated channels, by name and axis.

    Nothing if the module cannot run. A weight that receives different things in one pass is left out.

    Parameters
    ----------
    module : the module.
    inputs : what it takes.
    """
    trace = _Trace()
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            _consumers(module, trace),
            trace,
        ):
            warnings.simplefilter("ignore")  # they are given where the module is used
            module.eval()(inputs.zeros(2))
    except Exception:  # a user's module may raise anything, and will again where it is used
        return {}
    return {
        name: {axis: layout for axis, layout in axes.items() if layout is not None and not is_plain(layout)}
        for name, axes in trace.found.items()
    }


class _Trace(DispatchMode):
    """Follows stacked dimensions through the operations of a pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dims: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.found: dict[str, dict[int, Layout | None]] = {}
        self.has_begun = False

    def mark(self, tensor: Tensor, dims: Dims) -> None:
        """Note the stacked dimensions of a tensor."""
        self.has_begun = True
        self.dims[tensor] = dims

    def of(self, tensor: Any) -> Dims:
        return self.dims.get(tensor, {}) if isinstance(tensor, Tensor) else {}

    def layout(self, tensor: Tensor, dim: int) -> Layout:
        dim %= tensor.dim()
        return self.of(tensor).get(dim, plain(tensor.shape[dim]))

    def consume(self, name: str, axis: int, layout: Layout) -> None:
        """Note what a weight receives; None if that is not the same every time."""
        axes = self.found.setdefault(name, {})
        axes[axis] = layout if axes.get(axis, layout) == layout else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is aten.cat:
            self._concatenate(args, kwargs or {}, result)
        elif self.has_begun and packet not in CONTRACTIONS and any(self.of(value) for value in tree_leaves(args)):
            self._follow(packet, args, kwargs or {}, result)
        return result

    def _concatenate(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
        parts = [tensor for tensor in args[0] if tensor.numel() or tensor.dim() == result.dim()]
        layout = tuple(grid for tensor in parts for grid in self.layout(tensor, dim))
        others = {other: each for other, each in self.of(parts[0]).items() if other != dim}
        same = {other: each for other, each in others.items() if all(self.of(t).get(other) == each for t in parts)}
        self.mark(result, {**same, dim: layout})

    def _follow(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        source = next(value for value in tree_leaves(args) if self.of(value))
        rule = RULES.get(packet)
        if rule is not None and source is args[0] and isinstance(result, Tensor):
            self.mark(result, rule(self.of(source), source, result, args[1:], kwargs))
            return
        tensors = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
        for output in tree_leaves(result):
            if isinstance(output, Tensor):
                sources = [(self.of(value), value) for value in tensors if value.dim() == output.dim()]
                self.mark(output, _inherit(sources, output))


def _inherit(sources: Sequence[tuple[Dims, Tensor]], output: Tensor) -> Dims:
    """Dimensions that keep their size keep their layout, if all sources of this size have it: a sum of concatenated
    channels and others has no layout."""
    found: Dims = {}
    for dim, size in enumerate(output.shape):
        layouts = {dims.get(dim) for dims, source in sources if source.shape[dim] == size}
        if len(layouts) == 1:
            layout = layouts.pop()
            found |= {} if layout is None else {dim: layout}
    return found


Rule = Callable[[Dims, Tensor, Tensor, tuple[Any, ...], dict[str, Any]], Dims]
"""(dimensions of the source, source, result, further arguments, keywords) -> dimensions of the result"""


def _permuted(dims: Dims, source: Tensor, order: Sequence[int]) -> Dims:
    return {place: dims[dim % source.dim()] for place, dim in enumerate(order) if dim % source.dim() in dims}


def _transpose(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    order = list(range(source.dim()))
    first, second = args or (0, 1)
    order[first], order[second] = order[second], order[first]
    return _permuted(dims, source, order)


def _permute(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    return _permuted(dims, source, args[0])


def _unsqueeze(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    place = args[0] % result.dim()
    return {dim + (dim >= place): layout for dim, layout in dims.items()}


def _select(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    return _without(dims, [args[0] % source.dim()])


def _squeeze(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    chosen = range(source.dim()) if not args else [args[0]] if isinstance(args[0], int) else args[0]
    return _without(dims, [dim % source.dim() for dim in chosen if source.shape[dim] == 1])


def _reduce(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    chosen = args[0] if args and args[0] else range(source.dim())
    reduced = [dim % source.dim() for dim in ([chosen] if isinstance(chosen, int) else chosen)]
    if result.dim() == source.dim():
        return {dim: layout for dim, layout in dims.items() if dim not in reduced}
    return _without(dims, reduced)


def _without(dims: Dims, removed: Sequence[int]) -> Dims:
    return {dim - sum(other < dim for other in removed): layout for dim, layout in dims.items() if dim not in removed}


def _view(dims: Dims, source: Tensor, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dims:
    """A dimension that stays, or that is flattened together with those behind it, channel by channel."""
    found: Dims = {}
    for start, stop, place in _merged_dims(source.shape, result.shape):
        layout, behind = dims.get(start), source.shape[start + 1 : stop]
        if layout is not None and not any(dim in dims for dim in range(start + 1, stop)):
            inner = math.prod(behind)
            found[place] = layout if inner == 1 else tuple((*grid, inner) for grid in layout)
    return found


def _merged_dims(source: Sequence[int], result: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """The dimensions [start, stop) of the source that are exactly one dimension of the result, with its place."""
    before, after = [1], [1]
    for size in source:
        before.append(before[-1] * size)
    for size in result:
        after.append(after[-1] * size)
    for place, size in enumerate(result):
        if size > 1 and after[place] in before and after[place + 1] in before:
            start = max(dim for dim, product in enumerate(before) if product == after[place])
            yield start, min(dim for dim, product in enumerate(before) if product == after[place + 1]), place


RULES: dict[Any, Rule] = {
    aten.transpose: _transpose,
    aten.t: _transpose,
    aten.permute: _permute,
    aten.unsqueeze: _unsqueeze,
    aten.select: _select,
    aten.squeeze: _squeeze,
    aten.view: _view,
    aten._unsafe_view: _view,
    **dict.fromkeys(REDUCTIONS, _reduce),
}


@contextmanager
def _consumers(module: nn.Module, trace: _Trace) -> Iterator[None]:
    """Notes what the layers of a module receive."""
    hooks = []
    for owner, layer in module.named_modules():
        hooks.append(layer.register_forward_pre_hook(_receive(owner, trace)))
        hooks.append(layer.register_forward_hook(_release(trace)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _receive(owner: str, trace: _Trace) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dim() > 1 and trace.has_begun:
            for name, axis, dim in _received_axes(layer):
                trace.consume(join(owner, name), axis, trace.layout(x, dim))

    return hook


def _received_axes(layer: nn.Module) -> Iterator[tuple[str, int, int]]:
    """(weight, axis, dimension of the input that lies along it)"""
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    if isinstance(layer, nn.Linear):
        yield "weight", 1, -1
    elif _is_depthwise(layer):
        yield from ((name, 0, 1) for name in own)
    elif isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == 1:
        yield "weight", 0 if layer.transposed else 1, 1
    elif isinstance(layer, nn.RNNBase):
        yield from ((name, 1, -1) for name in own if name.startswith("weight_ih_l0"))
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm) and len(layer.normalized_shape) == 1:
        yield from ((name, 0, -1) for name in own)
    elif isinstance(layer, NORMS):
        statistics = [name for name, value in layer.named_buffers(recurse=False) if value.dim() == 1]
        yield from ((name, 0, 1) for name in (*own, *statistics))


def _is_depthwise(layer: nn.Module) -> bool:
    return isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == layer.in_channels == layer.out_channels > 1


def _release(trace: _Trace) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """What a layer makes that is stacked: both directions, or a depthwise convolution of concatenated channels."""

    def hook(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(layer, nn.RNNBase) and layer.bidirectional and isinstance(output, tuple):
            size, sequence = layer.proj_size or layer.hidden_size, output[0]
            if isinstance(sequence, Tensor):
                trace.mark(sequence, {sequence.dim() - 1: (*plain(size), *plain(size))})
        elif _is_depthwise(layer) and isinstance(output, Tensor) and trace.of(args[0]):
            trace.mark(output, {dim: layout for dim, layout in trace.of(args[0]).items() if dim == 1})

    return hook

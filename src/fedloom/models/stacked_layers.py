"""Which axes of a module's weights stack several things.

A module declares them in an attribute `stacked_axes`. Of torch's recurrent and attention layers they are known, of
other attention layers they are recognized by the usual names, and concatenations are found by tracing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .axes import Layout, LayoutError, layouts_of_axes, plain, resolve
from .structure import named_layers, own_weights

StackedAxis = tuple[str, int, Layout]
"""(weight name, axis, layout)"""

GATES: dict[type[nn.Module], int] = {nn.LSTM: 4, nn.GRU: 3, nn.LSTMCell: 4, nn.GRUCell: 3}

HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "nhead", "n_head", "heads")
PROJECTIONS = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
)
PACKED_PROJECTIONS = ("qkv", "to_qkv", "qkv_proj", "Wqkv", "c_attn")
OUTPUTS = ("out_proj", "o_proj", "to_out", "out_lin", "wo", "c_proj", "proj", "out", "dense", "o")


def known_axes(module: nn.Module) -> dict[str, dict[int, Layout]]:
    """The stacked axes of layers that are known or recognized, by weight and axis."""
    return layouts_of_axes(
        (join(path, name), axis, layout)
        for owner, layer in named_layers(module)
        for path, axes in (
            (owner, _channel_axes(layer)),
            (owner, _layer_axes(layer)),
            *_head_axes(module, owner, layer),
        )
        for name, axis, layout in axes
    )


def join(*path: str) -> str:
    """The full name of a weight of a submodule, which may be the module itself."""
    return ".".join(filter(None, path))


def declared_axes(module: nn.Module) -> dict[str, dict[int, Layout]]:
    """The stacked axes that modules declare, by weight and axis; a `LayoutError` if one does not fit its weight."""
    return layouts_of_axes(
        (join(owner, name), axis, layout)
        for owner, layer in named_layers(module)
        for name, axis, layout in _declared_axes(owner, layer)
    )


def _declared_axes(owner: str, layer: nn.Module) -> Iterator[StackedAxis]:
    declared: Mapping[str, Mapping[int, Any]] = getattr(layer, "stacked_axes", None) or {}
    if not declared:
        return
    where = f"stacked_axes of {owner or 'the module'} ({type(layer).__name__})"
    weights = {**dict(layer.named_parameters(remove_duplicate=False)), **dict(layer.named_buffers())}
    for name, axes in declared.items():
        if name not in weights:
            known = ", ".join(weights) or "none"
            raise LayoutError(f"{where} names {name}, which is no weight of it; it has: {known}")
        shape = tuple(weights[name].shape)
        for axis, spec in axes.items():
            if not 0 <= axis < len(shape):
                raise LayoutError(
                    f"{where} names axis {axis} of {name}, whose shape is {shape}; axes are counted from 0"
                )
            try:
                yield name, axis, resolve(spec, shape[axis])
            except LayoutError as error:
                raise LayoutError(
                    f"{where} does not fit axis {axis} of {name}, whose shape is {shape}: {error}; declare the numbers "
                    "of this size of the model"
                ) from error


def _channel_axes(layer: nn.Module) -> Iterator[StackedAxis]:
    """Axes from the third on that are not those of a kernel, as of a class token [1, 1, channels]."""
    if layer._parameters and not hasattr(layer, "kernel_size"):
        for name, weight in own_weights(layer):
            yield from ((name, axis, plain(weight.shape[axis])) for axis in range(2, weight.dim()))


def _layer_axes(layer: nn.Module) -> Iterator[StackedAxis]:
    if isinstance(layer, nn.RNNBase):
        yield from _recurrent_axes(layer)
    elif isinstance(layer, nn.RNNCellBase):
        gates = _gate_count(layer)
        for name, weight in own_weights(layer):
            yield name, 0, ((gates, len(weight) // gates),)
    elif isinstance(layer, nn.MultiheadAttention):
        yield from _attention_axes(layer)


def _gate_count(layer: nn.Module) -> int:
    return next((count for kind, count in GATES.items() if isinstance(layer, kind)), 1)


def _recurrent_axes(layer: nn.RNNBase) -> Iterator[StackedAxis]:
    """The gates of every layer; the input of a later layer is that of both directions, one after the other."""
    gates, outputs = _gate_count(layer), layer.proj_size or layer.hidden_size
    for name, _ in own_weights(layer):
        if name.startswith(("weight_ih", "weight_hh", "bias_ih", "bias_hh")) and gates > 1:
            yield name, 0, ((gates, layer.hidden_size),)
        if name.startswith("weight_ih") and not name.startswith("weight_ih_l0") and layer.bidirectional:
            yield name, 1, ((outputs,), (outputs,))


def _attention_axes(layer: nn.MultiheadAttention) -> Iterator[StackedAxis]:
    grid = (layer.num_heads, layer.embed_dim // layer.num_heads)
    names = {name for name, _ in layer.named_parameters()}
    for name in ("in_proj_weight", "in_proj_bias"):
        if name in names:
            yield name, 0, ((3, *grid),)
    for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
        if name in names:
            yield name, 0, (grid,)
    for name in ("bias_k", "bias_v"):
        if name in names:
            yield name, 2, (grid,)
    if "out_proj.weight" in names:
        yield "out_proj.weight", 1, (grid,)


def _head_axes(module: nn.Module, owner: str, layer: nn.Module) -> Iterator[tuple[str, list[StackedAxis]]]:
    """The heads of attention layers that are built of linear layers with the usual names, by owner of the weights."""
    if not layer._modules or isinstance(layer, nn.MultiheadAttention):
        return
    count = _head_count(layer)
    if count is None:
        return
    children = dict(layer.named_children())
    projections = _packed_axes(children, count) or _projection_axes(children, count)
    if projections:
        size = projections[-1][2][0][-1]  # of the values, which the output takes
        yield owner, projections
        yield _output_projection(module, owner, children, count, size)


def _packed_axes(children: Mapping[str, nn.Module], count: int) -> list[StackedAxis]:
    for name in PACKED_PROJECTIONS:
        rows = _outputs(children.get(name))
        if rows is not None and rows % (3 * count) == 0:
            return list(_output_axes(name, children[name], ((3, count, rows // (3 * count)),)))
    return []


def _projection_axes(children: Mapping[str, nn.Module], count: int) -> list[StackedAxis]:
    """Of queries, keys and values; there may be fewer heads of keys and values, or values of another size."""
    for names in PROJECTIONS:
        query, key, value = (_outputs(children.get(name)) for name in names)
        if query and key and value and query % count == 0 and key % (query // count) == 0:
            size, key_heads = query // count, key * count // query
            if value % key_heads == 0:
                grids = (count, size), (key_heads, size), (key_heads, value // key_heads)
                return [
                    axis
                    for name, grid in zip(names, grids, strict=True)
                    for axis in _output_axes(name, children[name], (grid,))
                ]
    return []


def _output_projection(
    module: nn.Module, owner: str, children: Mapping[str, nn.Module], count: int, size: int
) -> tuple[str, list[StackedAxis]]:
    """Of the layer that takes the heads: a child, or, as in BERT, `output.dense` beside the attention itself."""
    for name in OUTPUTS:
        path, linear = _first_linear(name, children.get(name))
        if linear is not None and _inputs(linear) == count * size:
            return owner, [(f"{path}.weight", _input_axis(linear), ((count, size),))]
    parent = owner.rpartition(".")[0]
    beside = getattr(getattr(module.get_submodule(parent), "output", None), "dense", None) if owner else None
    if isinstance(beside, nn.Module) and _inputs(beside) == count * size:
        return parent, [("output.dense.weight", _input_axis(beside), ((count, size),))]
    return owner, []


def _head_count(layer: nn.Module) -> int | None:
    for holder in (layer, getattr(layer, "config", None)):
        for name in HEAD_COUNTS:
            count = getattr(holder, name, None)
            if isinstance(count, int) and not isinstance(count, bool) and count > 0:
                return count
    return None


def _is_transposed(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D"  # GPT-2's linear layer, with the weight [inputs, outputs]


def _is_linear(layer: nn.Module | None) -> bool:
    return isinstance(layer, nn.Linear) or (layer is not None and _is_transposed(layer) and hasattr(layer, "weight"))


def _outputs(layer: nn.Module | None) -> int | None:
    if layer is None or not _is_linear(layer):
        return None
    return int(layer.weight.shape[1 if _is_transposed(layer) else 0])  # type: ignore[index]


def _inputs(layer: nn.Module) -> int | None:
    return int(layer.weight.shape[_input_axis(layer)]) if _is_linear(layer) else None  # type: ignore[index]


def _input_axis(layer: nn.Module) -> int:
    return 0 if _is_transposed(layer) else 1


def _output_axes(name: str, layer: nn.Module, layout: Layout) -> Iterator[StackedAxis]:
    yield f"{name}.weight", 1 - _input_axis(layer), layout
    if getattr(layer, "bias", None) is not None:
        yield f"{name}.bias", 0, layout


def _first_linear(name: str, layer: nn.Module | None) -> tuple[str, nn.Module | None]:
    """The layer itself, or the first of a sequence, as in `nn.Sequential(nn.Linear(...), nn.Dropout())`."""
    if isinstance(layer, nn.Sequential) and len(layer):
        return f"{name}.0", layer[0] if _is_linear(layer[0]) else None
    return name, layer if _is_linear(layer) else None

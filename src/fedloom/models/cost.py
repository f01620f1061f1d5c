"""The cost of a model: parameters, multiply-adds (MACs), and the FLOPs that HeteroFL publishes.

Multiply-adds are counted from the operations that run, by the formulas of torch's own FLOP counter, so it does not
matter how a forward pass is written: as layers, `F.linear`, `@`, einsum or attention. HeteroFL's tables count a layer's
operations once per parameter tensor (so twice for a layer with weight and bias) and include norms; `published_flops`
follows that convention, layer by layer.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from .model import Model

logger = logging.getLogger(__name__)

CONVOLUTIONS = nn.modules.conv._ConvNd
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)

MACS = "macs_per_output"
"""The attribute with which a layer declares its multiply-adds per output number, where they are not what runs.

It replaces the operations of the layer itself; those of its children are counted as they run."""

_FREE_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_no_update _batch_norm_with_update _embedding_bag
_embedding_bag_forward_only _fused_rms_norm _local_scalar_dense _log_softmax _native_batch_norm_legit
_native_batch_norm_legit_no_training _pack_padded_sequence _pad_packed_sequence _prelu_kernel _safe_softmax _softmax
_to_copy _unique2 _unsafe_index _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
_upsample_nearest_exact2d _weight_norm_interface adaptive_max_pool2d adaptive_max_pool3d addr arange as_strided
avg_pool1d avg_pool2d avg_pool3d bernoulli bincount bucketize cat celu channel_shuffle clone col2im complex
constant_pad_nd copy cummax cummin cumprod cumsum diag_embed embedding empty empty_like empty_permuted empty_strided
erfinv eye fill flip floor_divide fractional_max_pool2d full full_like gather glu hardswish histc im2col index
index_add index_copy index_fill index_put index_select is_same_size isin kthvalue lift_fresh lift_fresh_copy linspace
log_sigmoid_forward logcumsumexp logit masked_fill masked_scatter masked_select max_pool2d_with_indices
max_pool3d_with_indices max_unpool2d max_unpool3d median mish mode multinomial native_batch_norm
native_channel_shuffle native_dropout native_group_norm native_layer_norm new_empty new_empty_strided new_full
new_ones new_zeros nonzero normal ones ones_like pixel_shuffle pixel_unshuffle polar rand rand_like randint randn
randn_like randperm reflection_pad1d reflection_pad2d reflection_pad3d renorm repeat repeat_interleave
replication_pad1d replication_pad2d replication_pad3d resize roll rot90 rrelu_with_noise rsub scalar_tensor scatter
scatter_add scatter_reduce searchsorted select_scatter set slice_scatter softplus sort stack take topk trace tril
tril_indices triu triu_indices uniform unique_consecutive unsafe_split unsafe_split_with_sizes upsample_bicubic2d
upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
zero zeros zeros_like
"""
FREE = frozenset(_FREE_NAMES.split())
"""Operations without products of matrices, beside elementwise ones, reductions and views: they count nothing.

An operation that is neither here nor has a formula is reported, not taken to be free."""


@dataclass(frozen=True)
class Cost:
    """What one example costs in a forward pass of a model.

    Parameters
    ----------
    parameters : the number of weights, frozen ones included.
    macs : multiply-adds: half of the FLOPs that torch's counter finds, except in layers that declare theirs. HeteroFL's
        transformer does, which leaves the products of tokens with tokens out.
    published_flops : operations as HeteroFL's tables count them.
    frozen_parameters : how many of the weights are neither trained nor sent.
    uncounted : operations that ran and for which no number of multiply-adds is known, by name.
    """

    parameters: int
    macs: int
    published_flops: int
    frozen_parameters: int = 0
    uncounted: tuple[str, ...] = ()

    @property
    def trained_parameters(self) -> int:
        """The number of weights that are trained and sent."""
        return self.parameters - self.frozen_parameters

    @property
    def megabytes(self) -> float:
        """The size of the weights in float32, in MiB."""
        return 4 * self.parameters / 2**20


@lru_cache(maxsize=4096)
def compute_cost(model: Model) -> Cost:
    """The cost of one example's forward pass, from the operations that run.

    Parameters
    ----------
    model : the model.
    """
    module, totals = model.module().eval(), [0, 0]
    for weight in module.parameters():
        # attention of frozen weights would run as one fused operation, which has no formula
        weight.requires_grad_(weight.is_floating_point())
    counter = _OperationCounter()

    def count_published(layer: nn.Module, inputs: Any, output: Tensor) -> None:
        macs = _layer_macs(layer, inputs, output)
        totals[0] += macs if hasattr(layer, MACS) else 0
        totals[1] += _published_flops(layer, macs, output) * len(list(layer.parameters(recurse=False)))

    for layer in module.modules():
        layer.register_forward_pre_hook(counter.enter)
        layer.register_forward_hook(counter.leave)
        if _has_published_rule(layer):
            layer.register_forward_hook(count_published)
    with torch.inference_mode(False), torch.enable_grad(), counter:
        module(model.zero_inputs(1))
    frozen = sum(shape.numel() for shape in model.frozen_shapes().values())
    trained = sum(shape.numel() for shape in model.shapes().values())
    macs = totals[0] + counter.flops // 2
    return Cost(trained + frozen, macs, totals[1], frozen, tuple(sorted(counter.uncounted)))


def log_uncounted(models: Iterable[Model], quantity: str) -> None:
    """Say which operations a quantity leaves out that is computed from multiply-adds; nothing if there are none.

    Parameters
    ----------
    models : the models that it is computed for.
    quantity : what it is called, in the plural.
    """
    operations = sorted({operation for model in models for operation in compute_cost(model).uncounted})
    if operations:
        logger.warning("%s leave out %s, whose multiply-adds are not known", quantity, ", ".join(operations))


class _OperationCounter(TorchDispatchMode):
    """Counts FLOPs by the formulas of torch's counter, and remembers operations that have none.

    Not `FlopCounterMode` itself: that hooks every module of the process, also those that other threads train.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.uncounted = 0, set[str]()
        self._layers: list[nn.Module] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; with True torch would import its compiler, which takes seconds."""
        return False

    def enter(self, layer: nn.Module, inputs: Any) -> None:
        self._layers.append(layer)

    def leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        self._layers.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs, operation = kwargs or {}, getattr(func, "overloadpacket", func)
        if _is_free(func):
            return func(*args, **kwargs)
        formula = FORMULAS.get(operation) or flop_registry.get(operation)
        if formula is None and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if self._layers and hasattr(self._layers[-1], MACS):
            return result
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)  # type: ignore[operator]
        else:
            self.uncounted.add(str(operation))
        return result


@cache
def _is_free(func: Any) -> bool:
    """True for operations that multiply no matrices."""
    free_tags = {torch.Tag.pointwise, torch.Tag.inplace_view, getattr(torch.Tag, "reduction", None)}
    if free_tags & {*getattr(func, "tags", ())}:
        return True
    namespace, _, name = str(getattr(func, "_schema", func)).partition("(")[0].partition(".")[0].rpartition("::")
    return getattr(func, "is_view", False) or (namespace == "aten" and name.rstrip("_") in FREE)


def _matrix_vector_flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Of mv(matrix, vector), and of addmv(sum, matrix, vector)."""
    return 2 * int(args[-2].numel())


def _dot_flops(first: Tensor, second: Tensor, **kwargs: Any) -> int:
    return 2 * first.numel()


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _recurrent_flops(x: Tensor, weight: Tensor, recurrent: Tensor, *args: Any, **kwargs: Any) -> int:
    """Of one layer and direction: every step multiplies by both matrices."""
    return 2 * x.shape[0] * x.shape[1] * (weight.numel() + recurrent.numel())


FORMULAS = {
    torch.ops.aten.mv: _matrix_vector_flops,
    torch.ops.aten.addmv: _matrix_vector_flops,
    torch.ops.aten.dot: _dot_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
}
"""Operations that torch's counter has no formula for."""


def _has_published_rule(layer: nn.Module) -> bool:
    return isinstance(layer, (CONVOLUTIONS, nn.Linear, *NORMS)) or hasattr(layer, MACS)


def _layer_macs(layer: nn.Module, inputs: Any, output: Tensor) -> int:
    if hasattr(layer, MACS):
        return output.numel() * int(getattr(layer, MACS))
    if isinstance(layer, CONVOLUTIONS):
        return (inputs[0] if layer.transposed else output).numel() * layer.weight[0].numel()
    return output.numel() * layer.in_features if isinstance(layer, nn.Linear) else 0


def _published_flops(layer: nn.Module, macs: int, output: Tensor) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return macs + (output.numel() if layer.bias is not None else 0)
    return 2 * output.numel() if isinstance(layer, NORMS) else macs

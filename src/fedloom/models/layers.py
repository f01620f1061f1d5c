"""Layers that compute K devices at once: weights [K, ...], activations [batch, K * channels, ...].

Pooling, ReLU, residual adds and flatten(1) work as they are. A layer with weights is replaced by its counterpart in
FOLDED_LAYERS; given the plain weights of one device, the counterpart computes what the plain layer computes.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count
from .structure import named_layers


def fold(x: Tensor) -> Tensor:
    """[K, batch, channels, ...] -> [batch, K * channels, ...]; images channels-last."""
    x = x.transpose(0, 1).flatten(1, 2)
    # .contiguous() would not change the strides of a single channel, which leaves the whole net in the slower layout
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x) if x.dim() == 4 else x


def unfold(x: Tensor, devices: int) -> Tensor:
    """[batch, K * channels, ...] -> [K, batch, channels, ...], a view."""
    unflattened: Tensor = x.unflatten(1, (devices, -1))
    return unflattened.transpose(0, 1)


def support_device_axis(module: nn.Module) -> None:
    """Let a module compute many devices at once, in place. Weight names do not change."""
    for name, layer in named_layers(module):
        layer.__class__ = _folded_class(type(layer))
        if getattr(layer, "track_running_stats", False) and not isinstance(layer, StaticBatchNorm | _InstanceNorm):
            raise ValueError(
                f"{name} ({type(layer).__name__}) has its own way of tracking running statistics, which all devices "
                "would share; use torch's batch norm, or set track_running_stats=False"
            )


def _folded_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The counterpart of a layer class: of torch's own, or of a subclass that inherits torch's forward."""
    counterparts = {**FOLDED_LAYERS, **VMAP_LAYERS}
    if plain in counterparts.values():
        return plain
    for base, folded in counterparts.items():
        if issubclass(plain, base) and plain.forward is base.forward:
            return folded if plain is base else type(plain.__name__, (folded, plain), {})
    return plain


def zero_bias_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer as torch draws it, but with a bias of zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


def exit_rows(heads: str, classifier: str, count: int) -> tuple[str, ...]:
    """The weights with one row per class of a net with an exit after every layer, from shallow to deep.

    Parameters
    ----------
    heads : the name of the list of exits.
    classifier : the name of the linear layer within an exit; "": the exit is one itself.
    count : the number of exits.
    """
    inner = f".{classifier}" if classifier else ""
    return tuple(f"{heads}.{number}{inner}.{key}" for number in range(count) for key in ("weight", "bias"))


def pair_by_stage(**lists: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What a net's lists have for each stage, in the order of the keywords, which are the names of its settings.

    Raises
    ------
    ValueError
        If the lists differ in length.
    """
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"each stage needs an entry in every list, but {found}")
    return list(zip(*lists.values(), strict=True))


def dense_layers(units: Sequence[int]) -> nn.ModuleList:
    """Fully connected layers from each number of units to the next."""
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(units))


def uniform_parameter(inputs: int, *shape: int) -> nn.Parameter:
    """Weights of this shape, drawn as torch draws those of a linear layer with `inputs` inputs."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(nn.init.uniform_(torch.empty(shape), -bound, bound))


class Scaler(nn.Module):
    """Scales up the activations of a narrow layer in training to those of the wide one (HeteroFL, section 3).

    Parameters
    ----------
    rate : the width relative to the widest; activations are divided by it.
    """

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return x / self.rate if self.training and self.rate != 1 else x

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class _Conv(nn.modules.conv._ConvNd):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(0, -(len(self.kernel_size) + 2))
        padding: str | int | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        groups = self.groups * len(weight) // self.out_channels
        return convolve(x, weight, _flat(self.bias), self.stride, padding, self.dilation, groups)


class Conv1d(_Conv, nn.Conv1d):
    pass


class Conv2d(_Conv, nn.Conv2d):
    pass


class Conv3d(_Conv, nn.Conv3d):
    pass


class StaticBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Batch norm that tracks nothing: training uses the batch, evaluation uses statistics passed with the weights.

    With `tracking` it uses the batch and stores its mean and unbiased variance as the running ones. A layer that is
    `applied` several times in a pass stores their mean over these applications.
    """

    tracking = False
    applied = 0

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _flat(self.weight), _flat(self.bias)
        if self.track_running_stats and not self.training and not self.tracking:
            return F.batch_norm(x, _flat(self.running_mean), _flat(self.running_var), weight, bias, eps=self.eps)
        mean = variance = None
        if self.tracking:
            # with momentum 1 torch's kernel stores the batch's statistics: twice as fast as computing them separately
            dtype = torch.promote_types(x.dtype, torch.float32)  # in half precision too
            mean, variance = x.new_zeros(x.shape[1], dtype=dtype), x.new_zeros(x.shape[1], dtype=dtype)
        # not F.batch_norm, which raises for a last batch of one example on a map of one pixel
        x = torch.batch_norm(x, weight, bias, mean, variance, True, 1.0, self.eps, torch.backends.cudnn.enabled)
        if mean is not None and variance is not None:
            self.applied += 1
            self.running_mean = _running_mean(self.running_mean, mean, self.applied)
            self.running_var = _running_mean(self.running_var, variance, self.applied)
        return x


class BatchNorm1d(StaticBatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(StaticBatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(StaticBatchNorm, nn.BatchNorm3d):
    pass


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    """Always uses the example's own statistics: running ones would be shared by all devices."""

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, None, None, _flat(self.weight), _flat(self.bias), True, 0.0, self.eps)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    pass


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    pass


class GroupNorm(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        groups = self.num_groups * x.shape[1] // self.num_channels
        learns = torch.is_grad_enabled() and self.weight is not None and self.weight.requires_grad
        if learns and not x.requires_grad and _is_channels_last(x):
            x = x.contiguous()  # after frozen layers, torch 2.13's backward pass of such a map would crash
        return F.group_norm(x, groups, _flat(self.weight), _flat(self.bias), self.eps)


def _is_channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


class LayerNorm(nn.LayerNorm):
    """Over trailing axes, whether or not the channels are among them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.weight.dim() == len(self.normalized_shape):
            return super().forward(x)
        devices = len(self.weight)
        x = F.layer_norm(unfold(x, devices), self.normalized_shape, eps=self.eps)
        between = [1] * (x.dim() - 1 - len(self.normalized_shape))
        x = x * self.weight.view(devices, *between, *self.normalized_shape)
        if self.bias is not None:
            x = x + self.bias.view(devices, *between, *self.normalized_shape)
        return x.transpose(0, 1).flatten(1, 2)


class RMSNorm(nn.RMSNorm):
    """Over trailing axes, whether or not the channels are among them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight is None or self.weight.dim() == len(self.normalized_shape):
            return super().forward(x)
        devices, is_image = len(self.weight), x.dim() == 4
        layout = torch.channels_last if is_image and x.is_contiguous(memory_format=torch.channels_last) else None
        x = F.rms_norm(unfold(x, devices), list(self.normalized_shape), eps=self.eps)
        between = [1] * (x.dim() - 1 - len(self.normalized_shape))
        x = (x * self.weight.view(devices, *between, *self.normalized_shape)).transpose(0, 1).flatten(1, 2)
        return x.contiguous(memory_format=layout) if layout else x  # torch keeps the layout, but not with this axis


class PReLU(nn.PReLU):
    """One slope for all channels of a device, or one for each."""

    def forward(self, x: Tensor) -> Tensor:
        devices = self.weight.numel() // self.num_parameters
        channels = x.shape[1] // devices
        slopes = self.weight.view(devices, self.num_parameters).expand(devices, channels).flatten()
        return F.prelu(x, slopes if devices > 1 else self.weight.flatten())


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() == 2:
            return F.linear(x, self.weight, self.bias)
        x = unfold(x, len(self.weight)) @ self.weight.mT
        if self.bias is not None:
            # a product instead of a broadcast sum, whose gradient is summed in an order that depends on K
            x = torch.baddbmm(x, x.new_ones(*x.shape[:2], 1), self.bias.unsqueeze(1))
        return x.transpose(0, 1).flatten(1)


class Embedding(nn.Embedding):
    """Not folded, because tokens have no channels; inside `vmap` it leaves the padding untrained, as it does alone."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        if self.padding_idx is None or not torch.is_grad_enabled():
            return found
        # vmap's own rule loses padding_idx, so that padding would be trained in blocks only
        return torch.where((x == self.padding_idx).unsqueeze(-1), found.detach(), found)


FOLDED_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
    nn.InstanceNorm1d: InstanceNorm1d,
    nn.InstanceNorm2d: InstanceNorm2d,
    nn.GroupNorm: GroupNorm,
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.PReLU: PReLU,
    nn.Linear: Linear,
}

VMAP_LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.Embedding: Embedding}
"""Layers that are not folded, but for which `vmap` needs a counterpart."""


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten()


def _running_mean(before: Tensor | None, new: Tensor, count: int) -> Tensor:
    """Add the `count`-th value to a mean."""
    return new if before is None or count == 1 else before + (new - before) / count


# How a net for images ends: as its paper has it, often in the mean of its last map, which forgets where in the image
# something is; or with `head = { cells = 3 }`, the same for every family: norm, activation, average pooling to 3 x 3
# cells, and a linear layer. Norm and activation are left to the net's last block if it ends in them.

Head = Annotated[dict[Literal["cells"], Count], MinLen(1)]
"""The common head's settings: `cells`, the number of cells along each side that the last map is pooled to."""


def cells_of(head: Mapping[Literal["cells"], int] | None) -> int | None:
    """The cells along each side; None for the paper's own end.

    Parameters
    ----------
    head : the setting of a family.
    """
    return None if head is None else head["cells"]


def pool(x: Tensor, cells: int | None) -> Tensor:
    """The features that the classifier receives, [batch, channels * cells * cells], channel by channel.

    Parameters
    ----------
    x : a map, [batch, channels, height, width].
    cells : the cells along each side; None: one mean per channel, as papers have it.
    """
    return x.mean((-2, -1)) if cells is None else pool_to_cells(x, cells).flatten(1)


def pool_to_cells(x: Tensor, cells: int) -> Tensor:
    """Average pooling to cells x cells: equal windows that cover the map, and overlap where it cannot be divided.

    Parameters
    ----------
    x : a map, [batch, channels, height, width].
    cells : the cells along each side.
    """
    height, width = x.shape[-2:]
    if min(height, width) < cells:
        raise ValueError(f"a map of {height} x {width} cannot be pooled to {cells} x {cells} cells")
    stride = height // cells, width // cells
    window = height - (cells - 1) * stride[0], width - (cells - 1) * stride[1]
    return F.avg_pool2d(x, window, stride)


def make_classifier(channels: int, cells: int | None, classes: int) -> nn.Linear:
    """The last layer, on features from `pool`.

    Parameters
    ----------
    channels : the channels of the last map.
    cells : the cells along each side; None: one number per channel.
    classes : the number of classes.
    """
    return zero_bias_linear(channels, classes) if cells is None else CellLinear(channels, cells, classes)


class CellLinear(Linear):
    """A linear layer on the cells of a map, with the weight [classes, channels, cells, cells].

    The channels have an axis of their own, so the weight of a narrow net is a block of the wide net's: all cells of its
    channels, be they the first ones or a rolling window. Takes the weights of one device or of many.
    """

    def __init__(self, channels: int, cells: int, classes: int):
        super().__init__(channels * cells**2, classes)
        self.weight = nn.Parameter(self.weight.detach().unflatten(1, (channels, cells, cells)))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(-3)
        if weight.dim() == 2:
            return F.linear(x, weight, self.bias)
        x = unfold(x, len(weight)) @ weight.mT
        # a product instead of a broadcast sum, whose gradient is summed in an order that depends on K
        x = torch.baddbmm(x, x.new_ones(*x.shape[:2], 1), self.bias.unsqueeze(1))
        return x.transpose(0, 1).flatten(1)


class PooledCellLinear(CellLinear):
    """The same on a map, which it pools itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pool(x, self.weight.shape[-1]))

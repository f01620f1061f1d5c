"""Layers that compute K devices at once: weights [K, ...], activations [batch, K * channels, ...].

Pooling, ReLU, residual adds and flatten(1) work as they are. A layer with weights is replaced by its counterpart in
FOLDED_LAYERS; given the plain weights of one device, the counterpart computes what the plain layer computes.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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
    for name, layer in module.named_modules():
        layer.__class__ = _folded_class(type(layer))
        if getattr(layer, "track_running_stats", False) and not isinstance(layer, StaticBatchNorm | _InstanceNorm):
            raise ValueError(
                f"{name} ({type(layer).__name__}) has its own way of tracking running statistics, which all devices "
                "would share; use torch's batch norm, or set track_running_stats=False"
            )


def _folded_class(plain: type[nn.Module]) -> type[nn.Module]:
    """The folded counterpart of a layer class: of torch's own, or of a subclass that inherits torch's forward."""
    if plain in FOLDED_LAYERS.values():
        return plain
    for base, folded in FOLDED_LAYERS.items():
        if issubclass(plain, base) and plain.forward is base.forward:
            return folded if plain is base else type(plain.__name__, (folded, plain), {})
    return plain


def zero_bias_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer as torch draws it, but with a bias of zero."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.bias)
    return layer


def dense_layers(units: Sequence[int]) -> nn.ModuleList:
    """Fully connected layers from each number of units to the next."""
    return nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(units))


def uniform_parameter(inputs: int, *shape: int) -> nn.Parameter:
    """Weights of this shape, drawn as torch draws those of a linear layer with `inputs` inputs."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


class Scaler(nn.Module):
    """Scales up the activations of a narrow layer in training to those of the wide one (HeteroFL, section 3)."""

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
            mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
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
        return F.group_norm(x, groups, _flat(self.weight), _flat(self.bias), self.eps)


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
    nn.PReLU: PReLU,
    nn.Linear: Linear,
}


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten()


def _running_mean(before: Tensor | None, new: Tensor, count: int) -> Tensor:
    """Add the `count`-th value to a mean."""
    return new if before is None or count == 1 else before + (new - before) / count

"""Layers that compute K devices at once: weights [K, ...], activations [batch, K * channels, ...].

Pooling, ReLU, residual adds and flatten(1) need nothing. A layer with weights needs a rule, listed in RULES; every
rule also takes the plain weights of one device, and then is the plain layer.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fold(x: Tensor) -> Tensor:
    """[K, batch, channels, ...] -> [batch, K * channels, ...]; images channels-last."""
    x = x.transpose(0, 1).flatten(1, 2)
    # .contiguous() would leave a single channel's strides alone, and the whole net in the slower layout
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x) if x.dim() == 4 else x


def unfold(x: Tensor, devices: int) -> Tensor:
    """[batch, K * channels, ...] -> [K, batch, channels, ...], a view."""
    apart: Tensor = x.unflatten(1, (devices, -1))
    return apart.transpose(0, 1)


class Scaler(nn.Module):
    """Makes a narrow layer as loud as the wide one it was cut from, while it trains (HeteroFL, section 3)."""

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
    """Training uses the batch and tracks nothing; judging uses statistics it is given.

    `tracking` uses the batch too, and hands its mean and unbiased variance back in the place of the running ones: the
    mean of them over its `applied` times, where one layer is used several times in a pass.
    """

    tracking = False
    applied = 0

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _flat(self.weight), _flat(self.bias)
        if self.track_running_stats and not self.training and not self.tracking:
            return F.batch_norm(x, _flat(self.running_mean), _flat(self.running_var), weight, bias, eps=self.eps)
        mean = variance = None
        if self.tracking:
            # with momentum 1 torch's own kernel leaves the batch's statistics; twice as fast as asking for them apart
            mean, variance = x.new_zeros(x.shape[1]), x.new_zeros(x.shape[1])
        # not F.batch_norm, which ends the run at a last batch of one example on a map of one pixel
        made = torch.batch_norm(x, weight, bias, mean, variance, True, 1.0, self.eps, torch.backends.cudnn.enabled)
        if mean is not None and variance is not None:
            self.applied += 1
            self.running_mean = _mean_of(self.running_mean, mean, self.applied)
            self.running_var = _mean_of(self.running_var, variance, self.applied)
        return made


class BatchNorm1d(StaticBatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(StaticBatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(StaticBatchNorm, nn.BatchNorm3d):
    pass


class _InstanceNorm(nn.modules.instancenorm._InstanceNorm):
    """Always by the example's own statistics: running ones would be shared by devices that share nothing."""

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
        made = F.layer_norm(unfold(x, devices), self.normalized_shape, eps=self.eps)
        between = [1] * (made.dim() - 1 - len(self.normalized_shape))
        made = made * self.weight.view(devices, *between, *self.normalized_shape)
        if self.bias is not None:
            made = made + self.bias.view(devices, *between, *self.normalized_shape)
        return made.transpose(0, 1).flatten(1, 2)


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
        made = unfold(x, len(self.weight)) @ self.weight.mT
        if self.bias is not None:
            # a product, not a broadcast sum: how a sum's gradient is added up depends on the number of devices
            made = torch.baddbmm(made, made.new_ones(*made.shape[:2], 1), self.bias.unsqueeze(1))
        return made.transpose(0, 1).flatten(1)


RULES: dict[type[nn.Module], type[nn.Module]] = {
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


def give_rules(module: nn.Module) -> None:
    """Let a module compute many devices at once, in place. Weight names do not change."""
    for name, part in module.named_modules():
        part.__class__ = _ruled(type(part))
        if getattr(part, "track_running_stats", False) and not isinstance(part, StaticBatchNorm | _InstanceNorm):
            raise ValueError(
                f"{name} ({type(part).__name__}) tracks running statistics in a way of its own, which devices would "
                "share; use torch's batch norm, or set track_running_stats=False"
            )


def _ruled(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer's class with the rule of the layer whose forward it has, be it torch's own or a user's variant of it."""
    if kind in RULES.values():
        return kind
    for plain, rule in RULES.items():
        if issubclass(kind, plain) and kind.forward is plain.forward:
            return rule if kind is plain else type(kind.__name__, (rule, kind), {})
    return kind


def _flat(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten()


def _mean_of(before: Tensor | None, new: Tensor, count: int) -> Tensor:
    """A mean with one more in it, which makes so many."""
    return new if before is None or count == 1 else before + (new - before) / count

"""Width slices of a family and the normalizations that it can choose by name.

Static batch norm (HeteroFL, section 3) is torch's batch norm as run by `layers.py`: training tracks nothing, and the
devices are asked for its statistics before evaluation. Parametric normalization (FedSup) has no statistics.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .layers import Scaler

Normalization = Literal["static_batch", "group", "instance", "layer", "parametric", "parametric_sample", "none"]


@dataclass(frozen=True)
class WidthSlice:
    """A width slice of a family: how many channels of a layer it keeps, and how they are normalized.

    Parameters
    ----------
    width : the share of the channels of the full size.
    widest : the largest width in the fleet, to which the scaler is relative.
    normalization : the normalization layers.
    scaler : whether to scale up activations in training.
    groups : the number of groups of group normalization.
    norm_widths : a layer has one normalization for each of these widths up to its own (FjORD); empty: one.
    axes : the axes of a map beside its channels: 2 for images, 1 for time series.
    """

    width: float
    widest: float
    normalization: Normalization
    scaler: bool
    groups: int = 4
    norm_widths: tuple[float, ...] = ()
    axes: Literal[1, 2] = 2

    def channels(self, full: int) -> int:
        """The channels that this slice keeps of a layer.

        Parameters
        ----------
        full : the layer's channels at full size; likewise below.
        """
        return kept_channels(full, self.width, self.widest)

    def make_scaler(self) -> Scaler:
        return Scaler(self.width / self.widest if self.scaler else 1.0)

    def make_norm(self, full: int) -> nn.Module:
        norm = make_norm(self.normalization, self.channels(full), self.groups, axes=self.axes)
        if not self.norm_widths:
            return norm
        narrower = {width: self._unused_norm(full, width) for width in self.norm_widths if width < self.width}
        return NormPerWidth({**narrower, self.width: norm}, self.width)

    def make_scaled_norm(self, full: int) -> nn.Module:
        return nn.Sequential(self.make_scaler(), self.make_norm(full))

    def _unused_norm(self, full: int, width: float) -> nn.Module:
        """Held for narrower nets: its weights are sent, but its statistics are not needed here."""
        channels = kept_channels(full, width, self.widest)
        return make_norm(self.normalization, channels, self.groups, statistics=False, axes=self.axes)


def kept_channels(full: int, width: float, widest: float) -> int:
    """HeteroFL's slice: ceil of a fraction of the global model, which is a ceil of a fraction of the full one."""
    widest_channels = _ceil(full * widest)
    return _ceil(widest_channels * (width / widest))


def _ceil(number: float) -> int:
    return max(1, math.ceil(number - 1e-9))  # 0.1 * 30 is 3.0000000000000004, which must not give 4 channels


def make_norm(
    kind: Normalization, channels: int, groups: int = 4, statistics: bool = True, axes: Literal[1, 2] = 2
) -> nn.Module:
    """A normalization layer; `statistics=False` for a batch norm that is never used in evaluation."""
    match kind:
        case "static_batch":
            batch_norm = nn.BatchNorm1d if axes == 1 else nn.BatchNorm2d
            return batch_norm(channels, track_running_stats=statistics)
        case "group":
            # a narrow slice may have fewer channels than groups
            return nn.GroupNorm(math.gcd(groups, channels), channels)
        case "instance":
            return nn.GroupNorm(channels, channels)
        case "layer":
            return nn.GroupNorm(1, channels)
        case "parametric":
            return ParametricNorm(channels)
        case "parametric_sample":
            return ParametricNorm(channels, per_sample=True)
        case "none":
            return nn.Identity()


class ParametricNorm(nn.Module):
    """Subtract a learned shift and divide by the root mean square of the channel (FedSup, parametric normalization).

    Evaluation uses the batch as training does, so an example's output depends on the rest of its batch; with
    `per_sample` each example is normalized by itself. Takes the weights of one device or of many.
    """

    def __init__(self, channels: int, per_sample: bool = False, eps: float = 1e-8):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.per_sample, self.eps = per_sample, eps

    def forward(self, x: Tensor) -> Tensor:
        positions = tuple(range(2, x.dim()))
        along_channels = (-1, *[1] * len(positions))
        weight, shift, bias = (values.reshape(along_channels) for values in (self.weight, self.shift, self.bias))
        shifted = x - shift
        square = shifted.square().mean(positions if self.per_sample else (0, *positions), keepdim=True)
        # A channel that equals its shift everywhere becomes its bias, with a gradient of zero: the root's gradient is
        # infinite there and would turn into NaN, and the true 1 / eps would dominate every other gradient.
        is_constant = square == 0
        root = square.masked_fill(is_constant, 1.0).sqrt()
        scale = (weight / (root + self.eps)).masked_fill(is_constant, 0.0)
        return shifted * scale + bias

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, per_sample={self.per_sample}"


class NormPerWidth(nn.Module):
    """One normalization for each width a net can be sliced to; a slice uses the one of its own width (FjORD)."""

    sliceable = True  # although the wide net's own normalization is another one

    def __init__(self, norms: dict[float, nn.Module], width: float):
        super().__init__()
        self.norms = nn.ModuleDict({_module_key(width): norm for width, norm in norms.items()})
        self.active = _module_key(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[self.active](x)  # type: ignore[no-any-return]


def _module_key(width: float) -> str:
    return f"{width:g}".replace(".", "_")  # a module's name has no dots

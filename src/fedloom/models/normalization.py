"""The normalizations a model can choose by name.

Static batch norm is torch's own batch norm under the rule of `layers.py`: nothing is tracked in training, and one
question to the devices fills its statistics before it is judged. Parametric normalization has none to fill.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .layers import Scaler

Normalization = Literal["static_batch", "group", "instance", "layer", "parametric", "parametric_sample", "none"]


def normalize(kind: Normalization, channels: int, groups: int = 4, judged: bool = True) -> nn.Module:
    """`judged`: whether it is ever given statistics to be judged with."""
    match kind:
        case "static_batch":
            return nn.BatchNorm2d(channels, track_running_stats=judged)
        case "group":
            return nn.GroupNorm(
                math.gcd(groups, channels), channels
            )  # a narrow slice may have fewer channels than groups
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
    """A channel less its learned shift, divided by the root of its mean square (FedSup, parametric normalization).

    Judging uses the batch as training does, so what a model makes of an example depends on the others in its batch;
    `per_sample` looks at each example alone. Takes the weights of one device or of many.
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
        weight, shift, bias = (one.reshape(along_channels) for one in (self.weight, self.shift, self.bias))
        moved = x - shift
        square = moved.square().mean(positions if self.per_sample else (0, *positions), keepdim=True)
        # A channel that is its shift everywhere gives its bias. Its slope is taken to be zero: that of the root is
        # infinite there and would turn into NaN, and the true 1 / eps would drown every other gradient.
        still = square == 0
        root = square.masked_fill(still, 1.0).sqrt()
        scale = (weight / (root + self.eps)).masked_fill(still, 0.0)
        return moved * scale + bias

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, per_sample={self.per_sample}"


class NormPerWidth(nn.Module):
    """A normalization for each width a net can be cut to, of which a cut uses its own (FjORD)."""

    def __init__(self, norms: dict[float, nn.Module], own: float):
        super().__init__()
        self.norms = nn.ModuleDict({_key(width): norm for width, norm in norms.items()})
        self.own = _key(own)

    def forward(self, x: Tensor) -> Tensor:
        return self.norms[self.own](x)  # type: ignore[no-any-return]


def _key(width: float) -> str:
    return f"{width:g}".replace(".", "_")  # a module's name has no dots


@dataclass(frozen=True)
class Cut:
    """A width slice of a family: how many of a layer's channels are kept, and how they are normalized.

    `width` is a share of the full size; `widest` the largest in the fleet, to which the scaler is relative. Where
    `norm_widths` are given, a net holds a normalization for each of them that is no wider than itself.
    """

    width: float
    widest: float
    normalization: Normalization
    scaler: bool
    groups: int = 4
    norm_widths: tuple[float, ...] = ()

    def kept(self, hidden: int) -> int:
        return kept_channels(hidden, self.width, self.widest)

    def scale(self) -> Scaler:
        return Scaler(self.width / self.widest if self.scaler else 1.0)

    def normalize(self, hidden: int) -> nn.Module:
        """For a layer of so many channels at full size."""
        own = normalize(self.normalization, self.kept(hidden), self.groups)
        if not self.norm_widths:
            return own
        narrower = {width: self._unused(hidden, width) for width in self.norm_widths if width < self.width}
        return NormPerWidth({**narrower, self.width: own}, self.width)

    def norm(self, hidden: int) -> nn.Module:
        return nn.Sequential(self.scale(), self.normalize(hidden))

    def _unused(self, hidden: int, width: float) -> nn.Module:
        """Held for narrower nets: its weights travel, but nobody asks for its statistics here."""
        return normalize(self.normalization, kept_channels(hidden, width, self.widest), self.groups, judged=False)


def kept_channels(hidden: int, width: float, widest: float) -> int:
    """HeteroFL's slice: ceil of a share of the global model, itself a ceil of a share of the full one."""
    whole = _ceil(hidden * widest)
    return _ceil(whole * (width / widest))


def _ceil(number: float) -> int:
    return math.ceil(number - 1e-9)  # 0.1 * 30 is 3.0000000000000004, and nobody means 4 channels

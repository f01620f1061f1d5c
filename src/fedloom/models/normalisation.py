"""The normalisations a model can choose by name.

Static batch norm is torch's own batch norm under the rule of `layers.py`: nothing is tracked in training, and one
question to the devices fills its statistics before it is judged.
"""

import math
from typing import Literal

from torch import nn

Normalisation = Literal["static_batch", "group", "instance", "layer", "none"]


def normalise(kind: Normalisation, channels: int, groups: int = 4) -> nn.Module:
    match kind:
        case "static_batch":
            return nn.BatchNorm2d(channels)
        case "group":
            return nn.GroupNorm(
                math.gcd(groups, channels), channels
            )  # a narrow slice may have fewer channels than groups
        case "instance":
            return nn.GroupNorm(channels, channels)
        case "layer":
            return nn.GroupNorm(1, channels)
        case "none":
            return nn.Identity()


def kept_channels(hidden: int, width: float, widest: float) -> int:
    """HeteroFL's slice: ceil of a share of the global model, itself a ceil of a share of the full one."""
    whole = _ceil(hidden * widest)
    return _ceil(whole * (width / widest))


def _ceil(number: float) -> int:
    return math.ceil(number - 1e-9)  # 0.1 * 30 is 3.0000000000000004, and nobody means 4 channels

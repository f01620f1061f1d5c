"""FedHeN's pre-activation ResNet-18: the layers up to its early exit are a simple net inside the complex one.

Acar & Saligrama, FedHeN, 2022. The layout is that of kuangliu's PreActResNet18, without a norm before the classifier;
the exit's pooling is that of Kaya, Hong & Dumitras, Shallow-Deep Networks, ICML 2019.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Natural, Share
from .layers import zero_bias_linear
from .normalization import Normalization, WidthSlice
from .preresnet import preactivation_stages
from .structure import Outputs

ExitPool = Literal["four", "global"]


def preactresnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    stages: Count | None = None,
    exit_after: Natural = 2,
    exit_pool: ExitPool = "four",
    normalization: Normalization = "group",
    groups: Count = 2,
    scaler: bool = False,
    norm_widths: tuple[Share, ...] = (),
) -> nn.Module:
    """`stages` is the depth of this size: all stages, or those up to the exit; `exit_after` 0 means no exit.

    `width` is a fraction of `hidden`; the rest is as in `WidthSlice`.
    """
    kept = stages or len(hidden)
    if exit_after > kept or kept not in (exit_after, len(hidden)):
        raise ValueError(f"a net ends at its exit ({exit_after}) or after all {len(hidden)} stages, not after {kept}")
    sliced = WidthSlice(width, widest, normalization, scaler, groups, norm_widths)
    exits = sliced.channels(hidden[exit_after - 1])
    head = _exit_head(input_shape[1:], exits, exit_after, exit_pool, classes) if exit_after else None
    return PreActResNet(input_shape[0], hidden[:kept], blocks[:kept], sliced, exit_after, head, classes)


def _exit_head(image: tuple[int, ...], channels: int, exit_after: int, pool: ExitPool, classes: int) -> "ExitHead":
    size = [-(-side // 2 ** (exit_after - 1)) for side in image]  # every stage but the first halves, rounding up
    window = size if pool == "global" else [max(1, side // 4) for side in size]
    pooled = math.prod(side // wide for side, wide in zip(size, window, strict=True))
    return ExitHead(channels * pooled, tuple(window), classes)


class MixedPool(nn.Module):
    """Max and average pooling, mixed in a learned proportion: one number for the whole map.

    Takes the weights of one device or of many.
    """

    def __init__(self, window: tuple[int, ...]):
        super().__init__()
        self.window = window
        self.maximum = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        devices = self.maximum.numel()
        share = self.maximum.view(devices, 1).expand(devices, x.shape[1] // devices).reshape(-1, 1, 1)
        largest, mean = F.max_pool2d(x, self.window), F.avg_pool2d(x, self.window)
        return share * largest + (1 - share) * mean

    def extra_repr(self) -> str:
        return f"window={self.window}"


class ExitHead(nn.Module):
    def __init__(self, features: int, window: tuple[int, ...], classes: int):
        super().__init__()
        self.pool = MixedPool(window)
        self.classifier = zero_bias_linear(features, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.pool(x).flatten(1)
        return self.classifier(features), features


class PreActResNet(nn.Module):
    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        blocks: Sequence[int],
        sliced: WidthSlice,
        exit_after: int,
        exit_head: ExitHead | None,
        classes: int,
    ):
        super().__init__()
        self.stem = nn.Conv2d(inputs, sliced.channels(hidden[0]), 3, padding=1, bias=False)
        self.stages = preactivation_stages(hidden, blocks, sliced)
        self.exit_after, self.exit = exit_after, exit_head
        self.classifier = None if len(hidden) == exit_after else zero_bias_linear(sliced.channels(hidden[-1]), classes)

    @property
    def label_rows(self) -> tuple[str, ...]:
        heads = (("exit.classifier", self.exit), ("classifier", self.classifier))
        return tuple(f"{name}.{key}" for name, head in heads if head for key in ("weight", "bias"))

    def forward(self, x: Tensor) -> Outputs:
        x, exits, taps = self.stem(x), {}, {}
        for number, stage in enumerate(self.stages, start=1):
            x = taps[f"stage{number}"] = stage(x)
            if self.exit is not None and number == self.exit_after:
                exits["exit"], taps["features"] = self.exit(x)
        if self.classifier is not None:
            taps["features"] = x.mean((-2, -1))
            exits["full"] = self.classifier(taps["features"])
        return Outputs(exits, taps)

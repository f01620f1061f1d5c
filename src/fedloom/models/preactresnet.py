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
from .layers import Head, cells_of, exit_rows, make_classifier, pair_by_stage, pool, zero_bias_linear
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
    exit_after: Natural | Literal["every"] = 2,
    exit_pool: ExitPool = "four",
    normalization: Normalization = "group",
    groups: Count = 2,
    scaler: bool = False,
    norm_widths: tuple[Share, ...] = (),
    head: Head | None = None,
) -> nn.Module:
    """FedHeN's pre-activation ResNet-18 with an early exit: the layers up to the exit are the simple devices' net.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    hidden : the channels of each stage at full width.
    blocks : the number of residual blocks of each stage.
    stages : the depth of this size: all stages, or those up to an exit; None: all.
    exit_after : the number of stages before the early exit; 0: no exit; "every": an exit after every stage, all of
        one kind, as DepthFL and ScaleFL have them.
    exit_pool : how the exit pools its map: to a "four" by four grid, or to one "global" number per channel.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    groups : the number of groups of group normalization.
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    norm_widths : widths that each get normalization layers of their own, as in FjORD; empty: all sizes share them.
    head : how the net and its exit end: `{ cells = 3 }` normalizes and activates the last map and pools it to 3 x 3
        cells before the classifier; None: as published, the exit as `exit_pool` says, and the full net in the mean of a
        map that is not normalized.
    """
    pair_by_stage(hidden=hidden, blocks=blocks)
    kept = stages or len(hidden)
    ends = range(1, len(hidden) + 1) if exit_after == "every" else (exit_after, len(hidden))
    if kept not in ends or (exit_after != "every" and exit_after > kept):
        raise ValueError(
            f"a net ends at its exit ({exit_after}) or after all {len(hidden)} stages, not after {kept}"
            if exit_after != "every"
            else f"a net of {len(hidden)} stages cannot end after {kept}"
        )
    sliced = WidthSlice(width, widest, normalization, scaler, groups, norm_widths)
    cells = cells_of(head)

    def make_exit(number: int) -> nn.Module:
        if cells is not None:
            return NormalizedHead(hidden[number - 1], sliced, cells, classes)
        channels = sliced.channels(hidden[number - 1])
        return _published_exit(input_shape[1:], channels, number, exit_pool, classes)

    exits: nn.Module | Sequence[nn.Module] | None = None
    if exit_after == "every":
        exits = [make_exit(number) for number in range(1, kept + 1)]
    elif exit_after:
        exits = make_exit(exit_after)
    return PreActResNet(input_shape[0], hidden[:kept], blocks[:kept], sliced, exit_after, exits, cells, classes)


def _published_exit(
    image: tuple[int, ...], channels: int, exit_after: int, exit_pool: ExitPool, classes: int
) -> "ExitHead":
    size = [-(-side // 2 ** (exit_after - 1)) for side in image]  # every stage but the first halves, rounding up
    window = size if exit_pool == "global" else [max(1, side // 4) for side in size]
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


class NormalizedHead(nn.Module):
    def __init__(self, full: int, sliced: WidthSlice, cells: int, classes: int):
        super().__init__()
        self.cells = cells
        self.norm = sliced.make_scaled_norm(full)
        self.classifier = make_classifier(sliced.channels(full), cells, classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = pool(F.relu(self.norm(x)), self.cells)
        return self.classifier(features), features


class PreActResNet(nn.Module):
    """One exit and an end of its own, or a list of exits, the last of which is the end."""

    layer_list = "stages"

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        blocks: Sequence[int],
        sliced: WidthSlice,
        exit_after: int | Literal["every"],
        exits: nn.Module | Sequence[nn.Module] | None,
        cells: int | None,
        classes: int,
    ):
        super().__init__()
        self.stem = nn.Conv2d(inputs, sliced.channels(hidden[0]), 3, padding=1, bias=False)
        self.stages = preactivation_stages(hidden, blocks, sliced)
        self.exit_after = exit_after
        self.exit = exits if isinstance(exits, nn.Module) else None
        self.exits = nn.ModuleList(exits) if isinstance(exits, Sequence) else None
        self.cells, is_full = cells, exit_after != "every" and len(hidden) > exit_after
        self.norm = sliced.make_scaled_norm(hidden[-1]) if is_full and cells is not None else None
        self.classifier = make_classifier(sliced.channels(hidden[-1]), cells, classes) if is_full else None

    @property
    def label_rows(self) -> tuple[str, ...]:
        if self.exits is not None:
            return exit_rows("exits", "classifier", len(self.exits))
        heads = (("exit.classifier", self.exit), ("classifier", self.classifier))
        return tuple(f"{name}.{key}" for name, head in heads if head for key in ("weight", "bias"))

    def forward(self, x: Tensor) -> Outputs:
        x, exits, taps = self.stem(x), {}, {}
        for number, stage in enumerate(self.stages, start=1):
            x = taps[f"stage{number}"] = stage(x)
            if self.exits is not None:
                exits[f"exit{number}"], taps["features"] = self.exits[number - 1](x)
            elif self.exit is not None and number == self.exit_after:
                exits["exit"], taps["features"] = self.exit(x)
        if self.classifier is not None:
            last = x if self.norm is None else F.relu(self.norm(x))
            taps["features"] = pool(last, self.cells)
            exits["full"] = self.classifier(taps["features"])
        return Outputs(exits, taps)

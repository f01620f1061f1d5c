"""FedSup's supernet, based on MobileNetV1: every smaller net is contained in it. Kim & Yun, 2022.

A subnet has the first channels of every layer, the first blocks of every stage and the center of every kernel, so it
is this family at a smaller size and needs no special layers.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import Head, cells_of, make_classifier, pair_by_stage, pool
from .normalization import Normalization, WidthSlice
from .structure import Outputs

PerBlock = Count | tuple[Count, ...]
"""One number for all blocks of a stage, or one per block; those beyond the stage's depth are unused."""

DEPTHS = ((1,), (1, 2), (1, 2), (1, 2))
KERNELS = (3, 5, 7)

SPACES: dict[str, dict[str, tuple[tuple[Any, ...], ...]]] = {
    "code": {"widths": ((32, 64), (64, 128), (128, 256), (512, 1024)), "depths": DEPTHS, "kernels": (KERNELS,) * 4},
    "paper": {
        "widths": ((32, 64), (64, 128), (128, 256), (256, 512, 1024)),
        "depths": DEPTHS,
        "kernels": (KERNELS,) * 4,
    },
    "paper_by_layer": {
        "widths": ((32, 64), (64, 128), (128, 256), (256, 512, 1024)),
        "depths": DEPTHS,
        "kernels": tuple(tuple(product(KERNELS, repeat=max(depths))) for depths in DEPTHS),
    },
}
"""The search spaces, setting -> choices per stage: of the released code, of the paper's Table 5, and the latter with a
kernel size per block, as the paper's text describes it."""


def mobilenet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    stem: Count = 32,
    widths: tuple[PerBlock, ...] = (64, 128, 256, 1024),
    depths: tuple[Count, ...] = (1, 2, 2, 2),
    kernels: tuple[PerBlock, ...] = (7, 7, 7, 7),
    normalization: Normalization = "parametric",
    scaler: bool = False,
    norm_widths: tuple[Share, ...] = (),
    spare_shortcuts: bool = False,
    head: Head | None = None,
) -> nn.Module:
    """FedSup's MobileNet supernet: depthwise separable blocks of elastic width, depth and kernel size.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    stem : the channels of the first convolution.
    widths : the channels of each stage: one number, or one per block.
    depths : the number of blocks of each stage.
    kernels : the kernel size of each stage's depthwise convolutions: one number, or one per block.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    norm_widths : widths that each get normalization layers of their own, as in FjORD; empty: all sizes share them.
    spare_shortcuts : whether every block has a shortcut convolution. A block uses it only if its width changes. If
        `widths` are per block, or equal in neighboring stages, a subnet can change its width where the largest net does
        not, and the largest net must hold the weights for it.
    head : how the net ends: `{ cells = 3 }` normalizes and activates the last map and pools it to 3 x 3 cells before
        the classifier; None: as published, in the mean of a map that is not normalized.
    """
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths)

    def block(before: int, after: int, kernel: int, stride: int) -> SeparableBlock:
        # compares full sizes: fractions of two widths can be the same number of channels
        widens = before != after
        return SeparableBlock(before, after, kernel, stride, sliced, widens, widens or spare_shortcuts)

    stages = pair_by_stage(widths=widths, kernels=kernels, depths=depths)
    sizes = [(_per_block(width, depth), _per_block(kernel, depth)) for width, kernel, depth in stages]
    entry = nn.Conv2d(input_shape[0], sliced.channels(stem), 3, 2, padding=1, bias=False)
    last, cells = sizes[-1][0][-1], cells_of(head)
    classifier = make_classifier(sliced.channels(last), cells, classes)
    first = nn.Sequential(entry, sliced.make_scaled_norm(stem), nn.ReLU6())
    norm = None if cells is None else sliced.make_scaled_norm(last)
    return MobileNet(first, _stages(stem, sizes, block), norm, cells, classifier)


def _per_block(choice: PerBlock, depth: int) -> tuple[int, ...]:
    """The number for each block of a stage."""
    numbers = (choice,) * depth if isinstance(choice, int) else choice[:depth]
    if len(numbers) < depth:
        raise ValueError(f"a stage of {depth} blocks has only {choice}")
    return numbers


def _stages(
    before: int, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]], block: Callable[[int, int, int, int], nn.Module]
) -> nn.ModuleList:
    result = nn.ModuleList()
    for number, (widths, kernels) in enumerate(sizes):
        stage = nn.Sequential()
        for position, (after, kernel) in enumerate(zip(widths, kernels, strict=True)):
            stage.append(block(before, after, kernel, 2 if number > 0 and position == 0 else 1))
            before = after
        result.append(stage)
    return result


class SeparableBlock(nn.Module):
    """A depthwise and a pointwise convolution plus a shortcut without norm."""

    def __init__(
        self, before: int, after: int, kernel: int, stride: int, sliced: WidthSlice, widens: bool, has_shortcut: bool
    ):
        super().__init__()
        inputs, outputs = sliced.channels(before), sliced.channels(after)
        self.depthwise = nn.Conv2d(inputs, inputs, kernel, stride, kernel // 2, groups=inputs, bias=False)
        self.norm1 = sliced.make_scaled_norm(before)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm2 = sliced.make_scaled_norm(after)
        for name, weight in self.norm2.named_parameters():
            if name.endswith("weight"):
                nn.init.zeros_(weight)  # a block starts as its shortcut
        self.stride, self.widens = stride, widens
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if has_shortcut else None
        self.sliceable = has_shortcut and not widens  # although the shortcut is there for narrower nets only

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.pointwise(F.relu6(self.norm1(self.depthwise(x)))))
        # rounds up on a map of odd size, as the strided convolution does
        short = F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x
        if self.shortcut is not None and self.widens:
            short = self.shortcut(short)
        return residual + short  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    def __init__(
        self, stem: nn.Module, stages: nn.ModuleList, norm: nn.Module | None, cells: int | None, classifier: nn.Linear
    ):
        super().__init__()
        self.stem, self.stages, self.norm, self.cells, self.classifier = stem, stages, norm, cells, classifier

    def forward(self, x: Tensor) -> Outputs:
        x, taps = self.stem(x), {}
        for number, stage in enumerate(self.stages, start=1):
            for position, block in enumerate(stage.children(), start=1):
                x = taps[f"stage{number}.block{position}"] = block(x)
        features = pool(x if self.norm is None else F.relu6(self.norm(x)), self.cells)
        return Outputs({"logits": self.classifier(features)}, {**taps, "features": features})

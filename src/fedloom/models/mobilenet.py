"""FedSup's supernet, after MobileNetV1: every narrower, shorter or finer net is a part of it. Kim & Yun, 2022.

A sub-net has the first channels of every layer, the first blocks of every stage and the middle of every kernel, so it
is this family at a smaller size and needs no layer of its own.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .interface import Outputs
from .normalization import Cut, Normalization

PerBlock = Count | tuple[Count, ...]
"""One number for all blocks of a stage, or one for each; those beyond the stage's depth are not used."""

DEPTHS = ((1,), (1, 2), (1, 2), (1, 2))
KERNELS = (3, 5, 7)

SPACES: dict[str, dict[str, tuple[tuple[Any, ...], ...]]] = {
    "code": {
        "widths": ((32, 64), (64, 128), (128, 256), (512, 1024)),
        "depths": DEPTHS,
        "kernels": (KERNELS,) * 4,
    },
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
"""The sub-nets that may be drawn: setting -> its choices by stage. As released; as in the paper's Table 5; and that
with a kernel of its own for each block, as its text has it."""


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
) -> nn.Module:
    """`widths`, `depths` and `kernels` are stage by stage; `width` is a share of all channels, in the same layers, and
    the rest is as in `Cut`.

    `spare_shortcuts` gives every block a shortcut convolution, used or not. A block has use for one only where its
    width changes; but where `widths` are block by block, or equal in neighbouring stages, a sub-net can change its
    width where the largest net does not, and then the largest net must hold the weights for it.
    """
    cut = Cut(width, widest, normalization, scaler, norm_widths=norm_widths)

    def block(before: int, after: int, kernel: int, stride: int) -> SeparableBlock:
        # of the sizes before they are cut: a share of two widths can be the same number of channels
        widens = before != after
        return SeparableBlock(before, after, kernel, stride, cut, widens, widens or spare_shortcuts)

    sizes = list(zip(_per_block(widths, depths), _per_block(kernels, depths), strict=True))
    entry = nn.Conv2d(input_shape[0], cut.kept(stem), 3, 2, padding=1, bias=False)
    head = nn.Linear(cut.kept(sizes[-1][0][-1]), classes)
    nn.init.zeros_(head.bias)
    return MobileNet(nn.Sequential(entry, cut.norm(stem), nn.ReLU6()), _stages(stem, sizes, block), head)


def _per_block(choices: tuple[PerBlock, ...], depths: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Stage by stage, the number for each of its blocks."""
    made = []
    for choice, depth in zip(choices, depths, strict=True):
        each = (choice,) * depth if isinstance(choice, int) else choice[:depth]
        if len(each) < depth:
            raise ValueError(f"a stage of {depth} blocks has only {choice} to choose from")
        made.append(each)
    return made


def _stages(
    before: int, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]], block: Callable[[int, int, int, int], nn.Module]
) -> nn.ModuleList:
    made = nn.ModuleList()
    for number, (widths, kernels) in enumerate(sizes):
        stage = nn.Sequential()
        for position, (after, kernel) in enumerate(zip(widths, kernels, strict=True)):
            stage.append(block(before, after, kernel, 2 if number > 0 and position == 0 else 1))
            before = after
        made.append(stage)
    return made


class SeparableBlock(nn.Module):
    """A convolution of each channel alone, then one across channels, beside a shortcut that has no norm."""

    def __init__(self, before: int, after: int, kernel: int, stride: int, cut: Cut, widens: bool, has_shortcut: bool):
        super().__init__()
        inputs, outputs = cut.kept(before), cut.kept(after)
        self.depthwise = nn.Conv2d(inputs, inputs, kernel, stride, kernel // 2, groups=inputs, bias=False)
        self.norm1 = cut.norm(before)
        self.pointwise = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.norm2 = cut.norm(after)
        for name, weight in self.norm2.named_parameters():
            if name.endswith("weight"):
                nn.init.zeros_(weight)  # a block starts as its shortcut
        self.stride, self.widens = stride, widens
        self.shortcut = nn.Conv2d(inputs, outputs, 1, bias=False) if has_shortcut else None

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm2(self.pointwise(F.relu6(self.norm1(self.depthwise(x)))))
        # rounds up on a map of odd size, as the strided convolution does
        short = F.avg_pool2d(x, self.stride, ceil_mode=True) if self.stride > 1 else x
        if self.shortcut is not None and self.widens:
            short = self.shortcut(short)
        return made + short  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    def __init__(self, stem: nn.Module, stages: nn.ModuleList, classifier: nn.Linear):
        super().__init__()
        self.stem, self.stages, self.classifier = stem, stages, classifier

    def forward(self, x: Tensor) -> Outputs:
        x, taps = self.stem(x), {}
        for number, stage in enumerate(self.stages, start=1):
            for position, block in enumerate(stage.children(), start=1):
                x = taps[f"stage{number}.block{position}"] = block(x)
        features = x.mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {**taps, "features": features})

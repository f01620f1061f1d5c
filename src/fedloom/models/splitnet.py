"""FedIN's nets A to E: an extractor and a classifier that all devices share, and between them as much as each can run.

Chan et al., FedIN, 2023, Table I. Devices differ in the number of identity blocks of the middle.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Natural, Share
from . import layers
from .interface import Outputs
from .normalization import Cut, Normalization

Pool = Literal["intermediate", "classifier"]


def splitnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    channels: Count = 64,
    extra: tuple[Natural, Natural] = (2, 3),
    tied: bool = False,
    conv_bias: bool = True,
    normalization: Normalization = "static_batch",
    scaler: bool = False,
    pool: Pool = "intermediate",
) -> nn.Module:
    """`channels` of the stem decide those of all stages; `extra` identity blocks follow the first two stages' own.

    `tied` applies one identity block as often as there would be several. `pool` is the part that averages the last
    map, so it decides whether the classifier gets a vector or a map. The rest is as in `Cut`.
    """
    cut = Cut(width, widest, normalization, scaler)
    stem = nn.Conv2d(input_shape[0], cut.kept(channels), 3, padding=1, bias=conv_bias)
    extractor = nn.Sequential(stem, cut.norm(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    stages = _stages(channels, (*extra, 0), tied, conv_bias, cut)
    kind = nn.Linear if pool == "intermediate" else PoolingLinear
    classifier = kind(cut.kept(16 * channels), classes)
    nn.init.zeros_(classifier.bias)
    return SplitNet(extractor, Intermediate(stages, pool == "intermediate"), classifier)


def _stages(channels: int, extra: Sequence[int], tied: bool, bias: bool, cut: Cut) -> nn.ModuleList:
    """Every stage has twice the channels of the one before, and all but the first halve the map."""
    made, before = nn.ModuleList(), channels
    for number, count in enumerate(extra):
        middle, after = channels * 2**number, 4 * channels * 2**number
        stage = nn.Sequential(SplitBlock(before, middle, after, 2 if number else 1, True, bias, cut))
        for position in range(count):
            again = tied and position > 0
            stage.append(stage[1] if again else SplitBlock(after, middle, after, 1, False, bias, cut))
        made.append(stage)
        before = after
    return made


class SplitBlock(nn.Module):
    """A narrow convolution of single pixels, then a wide one, beside what they were given."""

    def __init__(self, before: int, middle: int, after: int, stride: int, projects: bool, bias: bool, cut: Cut):
        super().__init__()
        inputs, inner, outputs = (cut.kept(size) for size in (before, middle, after))
        self.conv1 = nn.Conv2d(inputs, inner, 1, stride, bias=bias)
        self.norm1 = cut.norm(middle)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=bias)
        self.norm2 = cut.norm(after)
        self.shortcut: nn.Module | None = None
        if projects:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=bias), cut.norm(after))

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(made + (x if self.shortcut is None else self.shortcut(x)))


class Intermediate(nn.Module):
    def __init__(self, stages: nn.ModuleList, pools: bool):
        super().__init__()
        self.stages, self.pools = stages, pools

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.mean((-2, -1)) if self.pools else x


class PoolingLinear(layers.Linear):
    """Classifies the mean of a map. Takes the weights of one device or of many."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean((-2, -1)))


class SplitNet(nn.Module):
    def __init__(self, extractor: nn.Module, intermediate: nn.Module, classifier: nn.Linear):
        super().__init__()
        self.extractor, self.intermediate, self.classifier = extractor, intermediate, classifier

    def forward(self, x: Tensor) -> Outputs:
        extracted = self.extractor(x)
        features = self.intermediate(extracted)
        return Outputs({"logits": self.classifier(features)}, {"extractor": extracted, "features": features})

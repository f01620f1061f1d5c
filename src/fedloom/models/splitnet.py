"""FedIN's nets A to E: a shared extractor and classifier, and between them stages of different depth per device.

Chan et al., FedIN, 2023, Table I. Devices differ in the number of identity blocks of the first two stages.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Natural, Share
from . import layers
from .normalization import Normalization, WidthSlice
from .structure import Outputs

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
    """The stem's `channels` determine those of all stages; `extra` is the number of identity blocks of stages 1 and 2.

    With `tied`, the identity blocks of a stage are one block applied several times. `pool` is the child that averages
    the last map, so the classifier receives a vector or a map. The rest is as in `WidthSlice`.
    """
    sliced = WidthSlice(width, widest, normalization, scaler)
    stem = nn.Conv2d(input_shape[0], sliced.channels(channels), 3, padding=1, bias=conv_bias)
    extractor = nn.Sequential(stem, sliced.make_scaled_norm(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    stages = _stages(channels, (*extra, 0), tied, conv_bias, sliced)
    kind = nn.Linear if pool == "intermediate" else PoolingLinear
    classifier = kind(sliced.channels(16 * channels), classes)
    nn.init.zeros_(classifier.bias)
    return SplitNet(extractor, Intermediate(stages, pool == "intermediate"), classifier)


def _stages(channels: int, extra: Sequence[int], tied: bool, bias: bool, sliced: WidthSlice) -> nn.ModuleList:
    """Every stage doubles the channels of the one before, and all but the first halve the map."""
    result, before = nn.ModuleList(), channels
    for number, count in enumerate(extra):
        middle, after = channels * 2**number, 4 * channels * 2**number
        stage = nn.Sequential(SplitBlock(before, middle, after, 2 if number else 1, True, bias, sliced))
        for position in range(count):
            is_repeated = tied and position > 0
            stage.append(stage[1] if is_repeated else SplitBlock(after, middle, after, 1, False, bias, sliced))
        result.append(stage)
        before = after
    return result


class SplitBlock(nn.Module):
    """A narrow 1x1 convolution and a wide 3x3 one plus a shortcut."""

    def __init__(
        self, before: int, middle: int, after: int, stride: int, projects: bool, bias: bool, sliced: WidthSlice
    ):
        super().__init__()
        inputs, inner, outputs = (sliced.channels(size) for size in (before, middle, after))
        self.conv1 = nn.Conv2d(inputs, inner, 1, stride, bias=bias)
        self.norm1 = sliced.make_scaled_norm(middle)
        self.conv2 = nn.Conv2d(inner, outputs, 3, padding=1, bias=bias)
        self.norm2 = sliced.make_scaled_norm(after)
        self.shortcut: nn.Module | None = None
        if projects:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=bias), sliced.make_scaled_norm(after)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


class Intermediate(nn.Module):
    def __init__(self, stages: nn.ModuleList, pools: bool):
        super().__init__()
        self.stages, self.pools = stages, pools

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.mean((-2, -1)) if self.pools else x


class PoolingLinear(layers.Linear):
    """A linear layer on the mean of a map. Takes the weights of one device or of many."""

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

"""FedIN's nets A to E: a shared extractor and classifier, and between them stages of different depth per device.

Chan et al., FedIN, 2023, Table I. Devices differ in the number of identity blocks of the first two stages.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Natural, Share
from . import layers
from .layers import CellLinear, Head, PooledCellLinear, cells_of
from .layers import pool as pool_map
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
    head: Head | None = None,
) -> nn.Module:
    """FedIN's nets A to E: a shared extractor and classifier, and between them stages that differ in depth.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    channels : the channels of the stem at full width, which determine those of all stages.
    extra : the number of identity blocks of stages 1 and 2, in which the devices' nets differ.
    tied : whether the identity blocks of a stage are one block applied several times.
    conv_bias : whether convolutions have a bias.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    pool : the part that averages the last map: with "intermediate" the classifier receives a vector, with "classifier"
        a map.
    head : how the net ends: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None: to its mean.
    """
    sliced = WidthSlice(width, widest, normalization, scaler)
    stem = nn.Conv2d(input_shape[0], sliced.channels(channels), 3, padding=1, bias=conv_bias)
    extractor = nn.Sequential(stem, sliced.make_scaled_norm(channels), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
    stages = _stages(channels, (*extra, 0), tied, conv_bias, sliced)
    classifier = _classifier(sliced.channels(16 * channels), cells_of(head), classes, pool)
    return SplitNet(extractor, Intermediate(stages, pool == "intermediate", cells_of(head)), classifier)


def _classifier(channels: int, cells: int | None, classes: int, pool: Pool) -> nn.Linear:
    if cells is not None:
        return (CellLinear if pool == "intermediate" else PooledCellLinear)(channels, cells, classes)
    classifier = (nn.Linear if pool == "intermediate" else PoolingLinear)(channels, classes)
    nn.init.zeros_(classifier.bias)
    return classifier


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
    def __init__(self, stages: nn.ModuleList, pools: bool, cells: int | None):
        super().__init__()
        self.stages, self.pools, self.cells = stages, pools, cells

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return pool_map(x, self.cells) if self.pools else x


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

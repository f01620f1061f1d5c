"""FedGKT's nets: a small residual net for devices, and a deep one for the server that starts at its feature maps.

He, Annavaram & Avestimehr, NeurIPS 2020. The bottleneck blocks are those of He et al., CVPR 2016.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import Head, cells_of, make_classifier, pair_by_stage, pool
from .normalization import Normalization, WidthSlice
from .structure import Outputs

EXPANSION = 4


def bottleneck(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    stem: Count | None = 16,
    planes: tuple[Count, ...] = (16,),
    blocks: tuple[Count, ...] = (2,),
    normalization: Normalization = "static_batch",
    head: Head | None = None,
) -> nn.Module:
    """FedGKT's residual net of bottleneck blocks: small on devices, deep on the server.

    Parameters
    ----------
    width : the share of channels, without those of the input, that this size keeps, the leading ones; 1 is the full
        model.
    stem : the channels of the first convolution; None: the input is a feature map, as on FedGKT's server.
    planes : the inner channels of the blocks of each stage; a block has four times as many outputs.
    blocks : the number of blocks of each stage.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    head : how the net ends: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None: to its mean.
    """
    sliced = WidthSlice(width, widest, normalization, scaler=False)
    inputs = input_shape[0] if stem is None else sliced.channels(stem)
    extractor = None if stem is None else _extractor(input_shape[0], stem, sliced)
    cells = cells_of(head)
    classifier = make_classifier(sliced.channels(EXPANSION * planes[-1]), cells, classes)
    return BottleneckNet(extractor, _stages(inputs, planes, blocks, sliced), cells, classifier)


def _extractor(inputs: int, stem: int, sliced: WidthSlice) -> nn.Sequential:
    conv = nn.Conv2d(inputs, sliced.channels(stem), 3, padding=1, bias=False)
    return nn.Sequential(conv, sliced.make_norm(stem), nn.ReLU())


def _stages(inputs: int, planes: Sequence[int], blocks: Sequence[int], sliced: WidthSlice) -> nn.ModuleList:
    """Every stage but the first halves the map, and the first block of a stage widens it."""
    result = nn.ModuleList()
    for number, (inner, count) in enumerate(pair_by_stage(planes=planes, blocks=blocks)):
        stage = nn.Sequential()
        for position in range(count):
            stage.append(Bottleneck(inputs, inner, 2 if number and not position else 1, position == 0, sliced))
            inputs = sliced.channels(EXPANSION * inner)
        result.append(stage)
    return result


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions plus a shortcut, which is a convolution where shapes differ.

    `inputs` counts actual input channels, `planes` the inner channels at full width.
    """

    def __init__(self, inputs: int, planes: int, stride: int, projects: bool, sliced: WidthSlice):
        super().__init__()
        inner, outputs = sliced.channels(planes), sliced.channels(EXPANSION * planes)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = sliced.make_norm(planes)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = sliced.make_norm(planes)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = sliced.make_norm(EXPANSION * planes)
        self.shortcut: nn.Module | None = None
        if projects:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, sliced.make_norm(EXPANSION * planes))

    def forward(self, x: Tensor) -> Tensor:
        residual = F.relu(self.norm1(self.conv1(x)))
        residual = F.relu(self.norm2(self.conv2(residual)))
        residual = self.norm3(self.conv3(residual))
        return F.relu(residual + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckNet(nn.Module):
    def __init__(self, extractor: nn.Module | None, stages: nn.ModuleList, cells: int | None, classifier: nn.Linear):
        super().__init__()
        self.extractor, self.stages, self.cells, self.classifier = extractor, stages, cells, classifier

    def forward(self, x: Tensor) -> Outputs:
        extracted = x = x if self.extractor is None else self.extractor(x)
        for stage in self.stages:
            x = stage(x)
        features = pool(x, self.cells)
        return Outputs({"logits": self.classifier(features)}, {"extractor": extracted, "features": features})

"""FedGKT's nets: a small residual net for a device, and for the server a long one that starts at its feature maps.

He, Annavaram & Avestimehr, NeurIPS 2020. The blocks are those of He et al., CVPR 2016, with a narrow middle.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .interface import Outputs
from .normalization import Cut, Normalization

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
) -> nn.Module:
    """`planes` are the narrow channels of each stage's blocks. Without a `stem` the input is a feature map already.

    `width` is a share of all channels but the input's.
    """
    cut = Cut(width, widest, normalization, scaler=False)
    inputs = input_shape[0] if stem is None else cut.kept(stem)
    extractor = None if stem is None else _extractor(input_shape[0], stem, cut)
    classifier = nn.Linear(cut.kept(EXPANSION * planes[-1]), classes)
    nn.init.zeros_(classifier.bias)
    return BottleneckNet(extractor, _stages(inputs, planes, blocks, cut), classifier)


def _extractor(inputs: int, stem: int, cut: Cut) -> nn.Sequential:
    conv = nn.Conv2d(inputs, cut.kept(stem), 3, padding=1, bias=False)
    return nn.Sequential(conv, cut.normalize(stem), nn.ReLU())


def _stages(inputs: int, planes: Sequence[int], blocks: Sequence[int], cut: Cut) -> nn.ModuleList:
    """Every stage but the first halves the map, and every first block widens it."""
    made = nn.ModuleList()
    for number, (narrow, count) in enumerate(zip(planes, blocks, strict=True)):
        stage = nn.Sequential()
        for position in range(count):
            stage.append(Bottleneck(inputs, narrow, 2 if number and not position else 1, position == 0, cut))
            inputs = cut.kept(EXPANSION * narrow)
        made.append(stage)
    return made


class Bottleneck(nn.Module):
    """Narrows, convolves and widens again, beside a shortcut that is a convolution where shapes differ.

    `inputs` are the channels it gets; `planes` those of its narrow middle before the cut.
    """

    def __init__(self, inputs: int, planes: int, stride: int, projects: bool, cut: Cut):
        super().__init__()
        inner, outputs = cut.kept(planes), cut.kept(EXPANSION * planes)
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.norm1 = cut.normalize(planes)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.norm2 = cut.normalize(planes)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.norm3 = cut.normalize(EXPANSION * planes)
        self.shortcut: nn.Module | None = None
        if projects:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, cut.normalize(EXPANSION * planes))

    def forward(self, x: Tensor) -> Tensor:
        made = F.relu(self.norm1(self.conv1(x)))
        made = F.relu(self.norm2(self.conv2(made)))
        made = self.norm3(self.conv3(made))
        return F.relu(made + (x if self.shortcut is None else self.shortcut(x)))


class BottleneckNet(nn.Module):
    def __init__(self, extractor: nn.Module | None, stages: nn.ModuleList, classifier: nn.Linear):
        super().__init__()
        self.extractor, self.stages, self.classifier = extractor, stages, classifier

    def forward(self, x: Tensor) -> Outputs:
        extracted = x = x if self.extractor is None else self.extractor(x)
        for stage in self.stages:
            x = stage(x)
        features = x.mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {"extractor": extracted, "features": features})

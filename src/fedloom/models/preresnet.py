"""HeteroFL's pre-activation ResNet for CIFAR. Diao, Ding & Tarokh, ICLR 2021; blocks (1, 1, 1, 2) give Table 8."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .interface import Outputs
from .normalization import Cut, Normalization


def preresnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    normalization: Normalization = "static_batch",
    scaler: bool = True,
    norm_widths: tuple[Share, ...] = (),
) -> nn.Module:
    """`width` is a share of `hidden`; the rest is as in `Cut`."""
    cut = Cut(width, widest, normalization, scaler, norm_widths=norm_widths)
    return PreResNet(input_shape[0], hidden, blocks, classes, cut)


def pre_stages(hidden: Sequence[int], blocks: Sequence[int], cut: Cut) -> nn.ModuleList:
    """Every stage but the first halves the map in its first block."""
    stages, before = nn.ModuleList(), hidden[0]
    for number, (after, count) in enumerate(zip(hidden, blocks, strict=True)):
        stage = nn.Sequential()
        for position in range(count):
            stage.append(PreBlock(before, after, 2 if number > 0 and position == 0 else 1, cut))
            before = after
        stages.append(stage)
    return stages


class PreBlock(nn.Module):
    """Normalise, then convolve, twice; where shapes differ the shortcut convolves what the first norm made."""

    def __init__(self, before: int, after: int, stride: int, cut: Cut):
        super().__init__()
        inputs, outputs = cut.kept(before), cut.kept(after)
        self.norm1 = cut.norm(before)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = cut.norm(after)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        differs = stride != 1 or before != after
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if differs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        short = x if self.shortcut is None else self.shortcut(active)
        made = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return made + short  # type: ignore[no-any-return]


class PreResNet(nn.Module):
    def __init__(self, inputs: int, hidden: Sequence[int], blocks: Sequence[int], classes: int, cut: Cut):
        super().__init__()
        self.stem = nn.Conv2d(inputs, cut.kept(hidden[0]), 3, padding=1, bias=False)
        self.stages = pre_stages(hidden, blocks, cut)
        self.norm = cut.norm(hidden[-1])
        self.classifier = nn.Linear(cut.kept(hidden[-1]), classes)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Outputs:
        x, taps = self.stem(x), {}
        for number, stage in enumerate(self.stages):
            x = taps[f"stage{number + 1}"] = stage(x)
        features = F.relu(self.norm(x)).mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {**taps, "features": features})

"""HeteroFL's pre-activation ResNet for CIFAR. Diao, Ding & Tarokh, ICLR 2021; blocks (1, 1, 1, 2) give Table 8."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import Scaler
from .model import Outputs
from .normalisation import Normalisation, kept_channels, normalise


def preresnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    normalisation: Normalisation = "static_batch",
    scaler: bool = True,
) -> nn.Module:
    """`width` is a share of `hidden`; `widest` the largest width in the fleet, to which the scaler is relative."""
    channels = [kept_channels(size, width, widest) for size in hidden]
    rate = width / widest if scaler else 1.0

    def norm(size: int) -> nn.Module:
        return nn.Sequential(Scaler(rate), normalise(normalisation, size))

    return PreResNet(input_shape[0], channels, blocks, classes, norm)


Norm = Callable[[int], nn.Module]
"""A normalisation for so many channels."""


def pre_stages(channels: Sequence[int], blocks: Sequence[int], norm: Norm) -> nn.ModuleList:
    """Every stage but the first halves the map in its first block."""
    stages, before = nn.ModuleList(), channels[0]
    for number, (after, count) in enumerate(zip(channels, blocks, strict=True)):
        stage = nn.Sequential()
        for position in range(count):
            stage.append(PreBlock(before, after, 2 if number > 0 and position == 0 else 1, norm))
            before = after
        stages.append(stage)
    return stages


class PreBlock(nn.Module):
    """Normalise, then convolve, twice; where shapes differ the shortcut convolves what the first norm made."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm):
        super().__init__()
        self.norm1 = norm(before)
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm2 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        differs = stride != 1 or before != after
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if differs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        short = x if self.shortcut is None else self.shortcut(active)
        made = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return made + short  # type: ignore[no-any-return]


class PreResNet(nn.Module):
    def __init__(self, inputs: int, channels: Sequence[int], blocks: Sequence[int], classes: int, norm: Norm):
        super().__init__()
        self.stem = nn.Conv2d(inputs, channels[0], 3, padding=1, bias=False)
        self.stages = pre_stages(channels, blocks, norm)
        self.norm = norm(channels[-1])
        self.classifier = nn.Linear(channels[-1], classes)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Outputs:
        x, taps = self.stem(x), {}
        for number, stage in enumerate(self.stages):
            x = taps[f"stage{number + 1}"] = stage(x)
        features = F.relu(self.norm(x)).mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {**taps, "features": features})

"""HeteroFL's convolutional net for MNIST. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6."""

from torch import Tensor, nn

from ..settings import Count, Share
from .layers import Scaler
from .model import Outputs
from .normalisation import Normalisation, kept_channels, normalise


def convnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    normalisation: Normalisation = "static_batch",
    scaler: bool = True,
) -> nn.Module:
    """`width` is a share of `hidden`; `widest` the largest width in the fleet, to which the scaler is relative."""
    channels = [kept_channels(size, width, widest) for size in hidden]
    rate = width / widest if scaler else 1.0
    return ConvNet(input_shape[0], channels, classes, normalisation, rate)


class ConvNet(nn.Module):
    def __init__(self, inputs: int, channels: list[int], classes: int, normalisation: Normalisation, rate: float):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), Scaler(rate), normalise(normalisation, after), nn.ReLU()
            )
            for before, after in zip([inputs, *channels], channels, strict=False)
        )
        self.classifier = nn.Linear(channels[-1], classes)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Outputs:
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
        features = x.mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {"features": features})

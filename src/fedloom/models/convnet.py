"""HeteroFL's convolutional net for MNIST. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..settings import Count, Share
from .layers import zero_bias_linear
from .normalization import Normalization, WidthSlice
from .structure import Outputs


def convnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    normalization: Normalization = "static_batch",
    scaler: bool = True,
    norm_widths: tuple[Share, ...] = (),
) -> nn.Module:
    """`width` is a fraction of `hidden`; the rest is as in `WidthSlice`."""
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths)
    return ConvNet(input_shape[0], hidden, classes, sliced)


class ConvNet(nn.Module):
    def __init__(self, inputs: int, hidden: Sequence[int], classes: int, sliced: WidthSlice):
        super().__init__()
        channels = [sliced.channels(size) for size in hidden]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), sliced.make_scaler(), sliced.make_norm(size), nn.ReLU()
            )
            for before, after, size in zip([inputs, *channels], channels, hidden, strict=False)
        )
        self.classifier = zero_bias_linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Outputs:
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
        features = x.mean((-2, -1))
        return Outputs({"logits": self.classifier(features)}, {"features": features})

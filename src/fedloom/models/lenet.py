"""LeNets: convolutions without padding, then fully connected layers.

FedHeNN's nets (Makhija, Ho & Ghosh, ICML 2022), which differ in the number of layers, have dropout 0.6; that of
LG-FedAvg (Liang et al., 2020) has convolutions (6, 16) and layers (120, 100).
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Share
from .layers import dense_layers, zero_bias_linear
from .normalization import kept_channels
from .structure import Outputs


def lenet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    convs: tuple[Count, ...] = (64, 64),
    kernels: tuple[Count, ...] = (5, 5),
    pooled: Count | None = None,
    hidden: tuple[Count, ...] = (120, 64),
    dropout: Fraction = 0.0,
) -> nn.Module:
    """The first `pooled` convolutions (default: all) are followed by a pooling that halves the map.

    `kernels` beyond the last convolution are unused. Dropout is applied after the last of the `hidden` layers. `width`
    is a fraction of all channels and hidden units.
    """
    if len(kernels) < len(convs):
        raise ValueError(f"{len(convs)} convolutions have only the kernels {kernels}")
    after, units = ([kept_channels(size, width, widest) for size in sizes] for sizes in (convs, hidden))
    channels = [input_shape[0], *after]
    halvings = len(convs) if pooled is None else pooled
    positions = _positions(input_shape[1:], kernels[: len(convs)], halvings)
    layers = [nn.Conv2d(*sizes, kernel) for sizes, kernel in zip(pairwise(channels), kernels, strict=False)]
    return LeNet(layers, halvings, [channels[-1] * positions, *units], classes, dropout)


def _positions(image: tuple[int, ...], kernels: Sequence[int], halvings: int) -> int:
    """The number of positions of the feature map after all convolutions."""
    result = 1
    for side in image:
        for number, kernel in enumerate(kernels):
            side = (side - kernel + 1) // (2 if number < halvings else 1)
        if side < 1:
            raise ValueError(f"nothing is left of images of {image} after convolutions with kernels {tuple(kernels)}")
        result *= side
    return result


class LeNet(nn.Module):
    def __init__(self, convs: Sequence[nn.Module], halvings: int, units: Sequence[int], classes: int, dropout: float):
        super().__init__()
        self.convs, self.halvings, self.dropout = nn.ModuleList(convs), halvings, dropout
        self.hidden = dense_layers(units)
        self.classifier = zero_bias_linear(units[-1], classes)

    def forward(self, x: Tensor) -> Outputs:
        for number, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            x = F.max_pool2d(x, 2) if number < self.halvings else x
        features = x.flatten(1)
        for layer in self.hidden:
            features = F.relu(layer(features))
        x = F.dropout(features, self.dropout, self.training) if self.dropout else features
        return Outputs({"logits": self.classifier(x)}, {"features": features})

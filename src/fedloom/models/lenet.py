"""LeNets: convolutions without padding, then fully connected layers.

FedHeNN's nets (Makhija, Ho & Ghosh, ICML 2022), which differ in the number of layers, have dropout 0.6; that of
LG-FedAvg (Liang et al., 2020) has convolutions (6, 16) and layers (120, 100).
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Share
from .layers import Head, cells_of, dense_layers, make_classifier, pool
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
    head: Head | None = None,
) -> nn.Module:
    """LeNet: convolutions without padding, then fully connected layers; the nets of FedHeNN and LG-FedAvg.

    Parameters
    ----------
    width : the share of channels and hidden units that this size keeps, the leading ones; 1 is the full model.
    convs : the channels of each convolution at full width.
    kernels : the kernel size of each convolution; those beyond the last convolution are unused.
    pooled : how many of the first convolutions are followed by a pooling that halves the map; None: all.
    hidden : the units of each fully connected layer at full width.
    dropout : the dropout probability before the classifier.
    head : how the net ends: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier, without the fully
        connected layers of `hidden`; None: these layers on the whole map.
    """
    if len(kernels) < len(convs):
        raise ValueError(f"{len(convs)} convolutions have only the kernels {kernels}")
    after, units = ([kept_channels(size, width, widest) for size in sizes] for sizes in (convs, hidden))
    channels = [input_shape[0], *after]
    halvings = len(convs) if pooled is None else pooled
    positions = _positions(input_shape[1:], kernels[: len(convs)], halvings)
    layers = [nn.Conv2d(*sizes, kernel) for sizes, kernel in zip(pairwise(channels), kernels, strict=False)]
    if head is not None:
        return LeNet(layers, halvings, [channels[-1]], classes, dropout, cells_of(head))
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
    def __init__(
        self,
        convs: Sequence[nn.Module],
        halvings: int,
        units: Sequence[int],
        classes: int,
        dropout: float,
        cells: int | None = None,
    ):
        super().__init__()
        self.convs, self.halvings, self.dropout = nn.ModuleList(convs), halvings, dropout
        self.cells, self.hidden = cells, dense_layers(units)
        self.classifier = make_classifier(units[-1], cells, classes)

    def forward(self, x: Tensor) -> Outputs:
        for number, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            x = F.max_pool2d(x, 2) if number < self.halvings else x
        features = x.flatten(1) if self.cells is None else pool(x, self.cells)
        for layer in self.hidden:
            features = F.relu(layer(features))
        x = F.dropout(features, self.dropout, self.training) if self.dropout else features
        return Outputs({"logits": self.classifier(x)}, {"features": features})

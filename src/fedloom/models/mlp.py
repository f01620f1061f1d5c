"""A multilayer perceptron; the default is that of LG-FedAvg for MNIST (Liang et al., 2020)."""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import dense_layers, zero_bias_linear
from .normalization import kept_channels
from .structure import Outputs


def mlp(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (512, 256, 256, 128),
    softmax: bool = False,
) -> nn.Module:
    """Multilayer perceptron: fully connected layers with ReLU; the default is LG-FedAvg's for MNIST.

    Parameters
    ----------
    width : the share of hidden units that this size keeps, the leading ones; 1 is the full model.
    hidden : the units of each hidden layer at full width.
    softmax : whether the net ends in a softmax, to which the loss then applies another one, as in LG-FedAvg's code.
        Gradients are smaller and never vanish; predictions do not depend on it.
    """
    units = [math.prod(input_shape), *(kept_channels(size, width, widest) for size in hidden)]
    return Perceptron(units, classes, softmax)


class Perceptron(nn.Module):
    def __init__(self, units: Sequence[int], classes: int, softmax: bool = False):
        super().__init__()
        self.hidden = dense_layers(units)
        self.classifier = zero_bias_linear(units[-1], classes)
        self.softmax = softmax

    def forward(self, x: Tensor) -> Outputs:
        features = x.flatten(1)
        for layer in self.hidden:
            features = F.relu(layer(features))
        logits = self.classifier(features)
        return Outputs({"logits": logits.softmax(1) if self.softmax else logits}, {"features": features})

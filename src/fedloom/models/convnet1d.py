"""A convolutional net for time series: HeteroFL's convnet with one axis instead of two.

Signals of sensors are usually classified by a few convolutions along time; widths are slices as in HeteroFL.
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import zero_bias_linear
from .normalization import Normalization, WidthSlice
from .structure import Outputs


def convnet1d(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 128),
    kernel: Count = 5,
    normalization: Normalization = "static_batch",
    scaler: bool = True,
    norm_widths: tuple[Share, ...] = (),
) -> nn.Module:
    """Convolutional net for time series [channels, length]: convolutions with normalization, ReLU and pooling.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    hidden : the channels of each convolution at full width.
    kernel : the steps that a convolution covers, an odd number.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    norm_widths : widths that each get normalization layers of their own, as in FjORD; empty: all sizes share them.
    """
    if len(input_shape) != 2:
        raise ValueError(f"it needs time series [channels, length], but an example here has the shape {input_shape}")
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd, so that a convolution keeps the length, not {kernel}")
    shortest = 2 ** (len(hidden) - 1)
    if input_shape[1] < shortest:
        raise ValueError(
            f"{len(hidden)} convolutions need a length of at least {shortest}, not {input_shape[1]}; "
            "pass a shorter `hidden`"
        )
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths, axes=1)
    return ConvNet1d(input_shape[0], hidden, kernel, classes, sliced)


class ConvNet1d(nn.Module):
    def __init__(self, inputs: int, hidden: Sequence[int], kernel: int, classes: int, sliced: WidthSlice):
        super().__init__()
        channels = [sliced.channels(size) for size in hidden]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(before, after, kernel, padding=kernel // 2),
                sliced.make_scaler(),
                sliced.make_norm(size),
                nn.ReLU(),
            )
            for before, after, size in zip([inputs, *channels], channels, hidden, strict=False)
        )
        self.classifier = zero_bias_linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Outputs:
        for number, block in enumerate(self.blocks):
            x = block(F.max_pool1d(x, 2) if number else x)
        features = x.mean(-1)
        return Outputs({"logits": self.classifier(features)}, {"features": features})

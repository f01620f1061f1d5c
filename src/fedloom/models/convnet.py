"""HeteroFL's convolutional net for MNIST. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..settings import Count, Share
from .layers import Head, cells_of, make_classifier, pool
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
    head: Head | None = None,
) -> nn.Module:
    """HeteroFL's convolutional net for MNIST: 3 x 3 convolutions, each followed by normalization and ReLU.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    hidden : the channels of each convolution at full width.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    norm_widths : widths that each get normalization layers of their own, as in FjORD; empty: all sizes share them.
    head : how the net ends: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None: to its mean.
    """
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths)
    return ConvNet(input_shape[0], hidden, classes, sliced, cells_of(head))


class ConvNet(nn.Module):
    def __init__(self, inputs: int, hidden: Sequence[int], classes: int, sliced: WidthSlice, cells: int | None):
        super().__init__()
        channels = [sliced.channels(size) for size in hidden]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), sliced.make_scaler(), sliced.make_norm(size), nn.ReLU()
            )
            for before, after, size in zip([inputs, *channels], channels, hidden, strict=False)
        )
        self.cells = cells
        self.classifier = make_classifier(channels[-1], cells, classes)

    def forward(self, x: Tensor) -> Outputs:
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
        features = pool(x, self.cells)
        return Outputs({"logits": self.classifier(features)}, {"features": features})

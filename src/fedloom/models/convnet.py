"""HeteroFL's convolutional net for MNIST. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from ..settings import Count, Share
from .layers import Head, cells_of, exit_rows, make_classifier, pool
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
    depth: Count | None = None,
    exit_after: Literal["every"] | None = None,
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
    head : how the net and its exits end: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None:
        to its mean.
    depth : the number of convolutions of this size, the first ones; None: all. Sizes of unequal depth need exits.
    exit_after : "every": a classifier after every convolution, as DepthFL and ScaleFL have them; None: one at the end.
    """
    kept = depth or len(hidden)
    if kept > len(hidden) or (kept < len(hidden) and exit_after is None):
        raise ValueError(
            f"a net of {len(hidden)} convolutions cannot end after {kept}"
            + (' without an exit there; set exit_after = "every"' if kept < len(hidden) else "")
        )
    hidden = hidden[:kept]
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths)
    return ConvNet(input_shape[0], hidden, classes, sliced, cells_of(head), exit_after == "every")


class ConvNet(nn.Module):
    layer_list = "blocks"

    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        classes: int,
        sliced: WidthSlice,
        cells: int | None,
        every_exit: bool,
    ):
        super().__init__()
        channels = [sliced.channels(size) for size in hidden]
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), sliced.make_scaler(), sliced.make_norm(size), nn.ReLU()
            )
            for before, after, size in zip([inputs, *channels], channels, hidden, strict=False)
        )
        self.cells = cells
        self.exits = nn.ModuleList(make_classifier(size, cells, classes) for size in channels) if every_exit else None
        self.classifier = None if every_exit else make_classifier(channels[-1], cells, classes)

    @property
    def label_rows(self) -> tuple[str, ...] | None:
        """Those of all exits; None where there is one classifier, the last layer."""
        return None if self.exits is None else exit_rows("exits", "", len(self.exits))

    def forward(self, x: Tensor) -> Outputs:
        exits = {}
        for number, block in enumerate(self.blocks):
            x = block(nn.functional.max_pool2d(x, 2) if number else x)
            if self.exits is not None:
                features = pool(x, self.cells)
                exits[f"exit{number + 1}"] = self.exits[number](features)
        if self.classifier is not None:
            features = pool(x, self.cells)
            exits["logits"] = self.classifier(features)
        return Outputs(exits, {"features": features})

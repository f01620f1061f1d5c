"""A small U-Net for segmentation, whose skip connections add instead of concatenating.

Ronneberger, Fischer & Brox, MICCAI 2015; sums as in LinkNet (Chaurasia & Culurciello, 2017). A narrow size keeps the
leading channels of every layer, and a sum of leading channels is the leading part of the sum.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .normalization import Normalization, WidthSlice
from .structure import Outputs


def unet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (16, 32, 64),
    early_exit: bool = False,
    decoder: bool = True,
    normalization: Normalization = "group",
    groups: Count = 4,
    scaler: bool = True,
) -> nn.Module:
    """U-Net with additive skip connections, for segmentation: it predicts a class for every pixel.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    hidden : the channels of each resolution at full width, from the image's own down; each halves height and width.
    early_exit : whether the coarsest map also predicts the pixels, for methods about early exits.
    decoder : whether this size has the way back up; without it, it ends at its early exit.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    groups : the number of groups of group normalization.
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    """
    if len(input_shape) != 3:
        raise ValueError(f"it needs images, but an example here has the shape {input_shape}")
    if not decoder and not early_exit:
        raise ValueError("without its decoder it ends at its early exit: set early_exit = true")
    sliced = WidthSlice(width, widest, normalization, scaler, groups)
    return UNet(input_shape[0], hidden, classes, sliced, early_exit, decoder)


class UNet(nn.Module):
    def __init__(
        self, inputs: int, hidden: Sequence[int], classes: int, sliced: WidthSlice, early_exit: bool, decoder: bool
    ):
        super().__init__()
        channels = [sliced.channels(size) for size in hidden]
        sizes = zip([inputs, *channels], hidden, strict=False)
        self.down = nn.ModuleList(_convolution(before, size, sliced) for before, size in sizes)
        self.exit = _head(channels[-1], classes) if early_exit else None
        upward = list(pairwise(reversed(hidden))) if decoder else []
        self.reduce = nn.ModuleList(_convolution(sliced.channels(size), less, sliced) for size, less in upward)
        self.merge = nn.ModuleList(_convolution(sliced.channels(less), less, sliced) for _, less in upward)
        self.classifier = _head(channels[0], classes) if decoder else None

    @property
    def label_rows(self) -> tuple[str, ...]:
        heads = (("exit", self.exit), ("classifier", self.classifier))
        return tuple(f"{name}.{key}" for name, head in heads if head is not None for key in ("weight", "bias"))

    def forward(self, x: Tensor) -> Outputs:
        size, maps, exits, taps = x.shape[-2:], list[Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            maps.append(x)
        if self.exit is not None:
            taps["features"] = x
            exits["exit"] = F.interpolate(self.exit(x), size=size, mode="nearest")
        for reduce, merge, skip in zip(self.reduce, self.merge, reversed(maps[:-1]), strict=False):
            x = merge(F.interpolate(reduce(x), size=skip.shape[-2:], mode="nearest") + skip)
        if self.classifier is not None:
            taps["features"] = x
            exits["full"] = self.classifier(x)
        return Outputs(exits, taps)


def _head(inputs: int, classes: int) -> nn.Conv2d:
    """Logits of every pixel, with a bias of zero."""
    head = nn.Conv2d(inputs, classes, 1)
    nn.init.zeros_(head.bias)  # type: ignore[arg-type]
    return head


def _convolution(inputs: int, full: int, sliced: WidthSlice) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, sliced.channels(full), 3, padding=1), sliced.make_scaler(), sliced.make_norm(full), nn.ReLU()
    )

"""HeteroFL's pre-activation ResNet for CIFAR. Diao, Ding & Tarokh, ICLR 2021; blocks (1, 1, 1, 2) give Table 8."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Share
from .layers import Head, cells_of, make_classifier, pair_by_stage, pool
from .normalization import Normalization, WidthSlice
from .structure import Outputs


def preresnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    width: Share = 1.0,
    widest: Share = 1.0,
    hidden: tuple[Count, ...] = (64, 128, 256, 512),
    blocks: tuple[Count, ...] = (2, 2, 2, 2),
    normalization: Normalization = "static_batch",
    scaler: bool = True,
    norm_widths: tuple[Share, ...] = (),
    head: Head | None = None,
) -> nn.Module:
    """HeteroFL's pre-activation ResNet for CIFAR; blocks (1, 1, 1, 2) give the sizes of its Table 8.

    Parameters
    ----------
    width : the share of channels that this size keeps, the leading ones; 1 is the full model.
    hidden : the channels of each stage at full width.
    blocks : the number of residual blocks of each stage.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    norm_widths : widths that each get normalization layers of their own, as in FjORD; empty: all sizes share them.
    head : how the net ends: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None: to its mean.
    """
    sliced = WidthSlice(width, widest, normalization, scaler, norm_widths=norm_widths)
    return PreResNet(input_shape[0], hidden, blocks, classes, sliced, cells_of(head))


def preactivation_stages(hidden: Sequence[int], blocks: Sequence[int], sliced: WidthSlice) -> nn.ModuleList:
    """Every stage but the first halves the map in its first block."""
    stages, before = nn.ModuleList(), hidden[0]
    for number, (after, count) in enumerate(pair_by_stage(hidden=hidden, blocks=blocks)):
        stage = nn.Sequential()
        for position in range(count):
            stage.append(PreActivationBlock(before, after, 2 if number > 0 and position == 0 else 1, sliced))
            before = after
        stages.append(stage)
    return stages


class PreActivationBlock(nn.Module):
    """Norm, ReLU, convolution, twice; where shapes differ, the shortcut convolves the first activation."""

    def __init__(self, before: int, after: int, stride: int, sliced: WidthSlice):
        super().__init__()
        inputs, outputs = sliced.channels(before), sliced.channels(after)
        self.norm1 = sliced.make_scaled_norm(before)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = sliced.make_scaled_norm(after)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        differs = stride != 1 or before != after
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if differs else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        short = x if self.shortcut is None else self.shortcut(active)
        residual = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return residual + short  # type: ignore[no-any-return]


class PreResNet(nn.Module):
    def __init__(
        self,
        inputs: int,
        hidden: Sequence[int],
        blocks: Sequence[int],
        classes: int,
        sliced: WidthSlice,
        cells: int | None,
    ):
        super().__init__()
        self.stem = nn.Conv2d(inputs, sliced.channels(hidden[0]), 3, padding=1, bias=False)
        self.stages = preactivation_stages(hidden, blocks, sliced)
        self.norm = sliced.make_scaled_norm(hidden[-1])
        self.cells = cells
        self.classifier = make_classifier(sliced.channels(hidden[-1]), cells, classes)

    def forward(self, x: Tensor) -> Outputs:
        x, taps = self.stem(x), {}
        for number, stage in enumerate(self.stages):
            x = taps[f"stage{number + 1}"] = stage(x)
        features = pool(F.relu(self.norm(x)), self.cells)
        return Outputs({"logits": self.classifier(features)}, {**taps, "features": features})

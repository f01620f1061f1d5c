"""A convolutional net of columns that read those before them, after Rusu et al., Progressive Neural Networks, 2016."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count
from .layers import Head, cells_of, exit_rows, make_classifier, pool, uniform_parameter
from .normalization import Normalization, make_norm
from .structure import Outputs

KERNEL = 3


def columnnet(
    *,
    input_shape: tuple[int, int, int],
    classes: int,
    columns: tuple[tuple[Count, ...], ...] = ((8, 16, 32), (8, 16, 32), (16, 32, 64)),
    held: Count | None = None,
    lateral_gradient: bool = True,
    normalization: Normalization = "static_batch",
    head: Head | None = None,
) -> nn.Module:
    """A convolutional net of columns: a smaller size is the first columns, which compute the same inside a larger one.

    A layer of a column convolves the maps of this column and of all before it, and has a normalization of its own. An
    exit after each column adds to the logits of the exit before it, which learns nothing from that: a larger size
    starts from the answer of the smaller one and learns a correction.

    Parameters
    ----------
    columns : the channels of every column, layer by layer; all have as many layers.
    held : the number of columns of this size, the first ones; None: all.
    lateral_gradient : whether a column learns from what the columns behind it make of its maps; if not, the first one
        is trained as if it were alone.
    normalization : the normalization layers: "static_batch" (HeteroFL's batch norm without running statistics),
        "group", "instance", "layer", "parametric" (FedSup's), "parametric_sample" (the same for each example), or
        "none".
    head : how the columns end: `{ cells = 3 }` pools the last map to 3 x 3 cells before the classifier; None: to its
        mean.
    """
    if len({len(column) for column in columns}) != 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise ValueError(f"all columns must have as many layers, but these have {lengths}")
    kept = held or len(columns)
    if kept > len(columns):
        raise ValueError(f"a net of {len(columns)} columns has no {kept}")
    return ColumnNet(input_shape[0], columns[:kept], classes, lateral_gradient, normalization, cells_of(head))


class ColumnNet(nn.Module):
    """Built column by column, so that all sizes draw the same initial weights for the columns that they share."""

    def __init__(
        self,
        inputs: int,
        columns: Sequence[Sequence[int]],
        classes: int,
        lateral_gradient: bool,
        normalization: Normalization,
        cells: int | None,
    ):
        super().__init__()
        read = [[inputs, *(column[layer] for layer in range(len(column) - 1))] for column in columns]
        self.columns = nn.ModuleList(
            Column(read[: number + 1], channels, classes, lateral_gradient, normalization, cells)
            for number, channels in enumerate(columns)
        )
        self.cells = cells

    @property
    def label_rows(self) -> tuple[str, ...]:
        """Those of all exits."""
        return exit_rows("columns", "classifier", len(self.columns))

    def forward(self, x: Tensor) -> Outputs:
        columns = cast(Sequence[Column], self.columns)
        maps = [x] * len(columns)
        for number in range(len(columns[0].layers)):
            maps = [F.max_pool2d(one, 2) for one in maps] if number else maps
            maps = [column.layers[number](maps) for column in columns]
        exits: dict[str, Tensor] = {}
        before: Tensor | None = None
        for number, (column, one) in enumerate(zip(columns, maps, strict=True)):
            features = pool(one, self.cells)
            logits = column.classifier(features)
            before = exits[f"exit{number + 1}"] = logits if before is None else before.detach() + logits
        return Outputs(exits, {"features": features})


class Column(nn.Module):
    """The layers of a column and its classifier. `read`: the inputs of each layer, of every column that it reads."""

    def __init__(
        self,
        read: Sequence[Sequence[int]],
        channels: Sequence[int],
        classes: int,
        lateral_gradient: bool,
        normalization: Normalization,
        cells: int | None,
    ):
        super().__init__()
        inputs = [sizes if number else sizes[:1] for number, sizes in enumerate(zip(*read, strict=True))]
        self.layers = nn.ModuleList(
            ColumnLayer(sizes, size, lateral_gradient, normalization)
            for sizes, size in zip(inputs, channels, strict=True)
        )
        self.classifier = make_classifier(channels[-1], cells, classes)


class ColumnLayer(nn.Module):
    """One layer of a column: a convolution of all maps that it reads, the column's own last; normalization and ReLU.

    The first layer of every column reads the same input.
    """

    def __init__(self, inputs: Sequence[int], channels: int, lateral_gradient: bool, normalization: Normalization):
        super().__init__()
        self.convs = nn.ModuleList(_conv(size, channels, sum(inputs)) for size in inputs)
        self.norm = make_norm(normalization, channels)
        self.lateral_gradient = lateral_gradient

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        *lateral, own = maps[: len(self.convs)]
        total = self.convs[-1](own)
        for conv, one in zip(self.convs, lateral, strict=False):
            total = total + conv(one if self.lateral_gradient else one.detach())
        return F.relu(self.norm(total))


def _conv(before: int, after: int, read: int) -> nn.Conv2d:
    """Part of a convolution of all `read` channels that a column reads."""
    conv = nn.Conv2d(before, after, KERNEL, padding=1, bias=False)
    conv.weight = uniform_parameter(read * KERNEL**2, *conv.weight.shape)
    return conv

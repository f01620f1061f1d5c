"""What a data set's preparation does to examples outside of training, as a part of the exported module: whoever uses
the model hands over examples as they are stored, and cannot prepare them in another way than they were in training."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Preparation


class Prepared(nn.Module):
    """[batch, channels, height, width] bytes, or numbers -> a model's input. Tokens need no preparation."""

    rows: Tensor | None
    columns: Tensor | None
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, preparation: Preparation, stored_shape: tuple[int, ...], stored_dtype: torch.dtype):
        super().__init__()
        self.factor = 1 / 255 if stored_dtype == torch.uint8 else 1.0
        image, plain = len(stored_shape) == 3, preparation == Preparation()
        resized = image and preparation.size is not None and stored_shape[1:] != preparation.size
        rows, columns = (None, None) if not resized else _resizing(stored_shape[1:], preparation.size)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        grey = image and not plain and stored_shape[0] == 1
        self.repeats = (preparation.channels or 1) if grey else 1
        normalises = image and bool(preparation.mean)
        self.register_buffer("mean", torch.tensor(preparation.mean).view(-1, 1, 1) if normalises else None)
        self.register_buffer("std", torch.tensor(preparation.std).view(-1, 1, 1) if normalises else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        x = x * self.factor if self.factor != 1 else x
        if self.rows is not None and self.columns is not None:
            x = self.rows @ x @ self.columns
        x = x.repeat(1, self.repeats, 1, 1) if self.repeats > 1 else x
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std


def preparing(preparation: Preparation, stored: Tensor) -> nn.Module:
    """For examples that are stored like these."""
    if stored.dtype != torch.uint8 and not stored.is_floating_point():
        return nn.Identity()
    return Prepared(preparation, tuple(stored.shape[1:]), stored.dtype)


def _resizing(before: tuple[int, ...], after: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Resizing is linear, and along each side by itself: two matrices, which every runtime multiplies alike."""
    assert after is not None
    left, right = (_one_side(old, new) for old, new in zip(before, after, strict=True))
    return left, right.mT.contiguous()


def _one_side(before: int, after: int) -> Tensor:
    """[after, before]: what becomes of an image that is one, whose width stays."""
    each = torch.eye(before, dtype=torch.float64).view(1, 1, before, before)
    return F.interpolate(each, (after, before), mode="bilinear", align_corners=False, antialias=True)[0, 0].float()

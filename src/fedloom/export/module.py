"""A trained model as a plain module: its own weights, no device axis, nothing that only training needs.

What a data set's preparation does to examples outside of training, as a part of the exported module: whoever uses
the model hands over examples as they are stored, and cannot prepare them in another way than they were in training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Preparation
from ..models import Model, Scaler
from ..models.interface import as_outputs
from ..models.normalization import NormPerWidth
from ..tensors import Tensors
from .folding import fold, foldable, replace_part


class ExportModule(nn.Module):
    """[batch, ...] inputs -> the logits of the last exit. `prepare` makes inputs of examples as they are stored."""

    def __init__(self, net: nn.Module, prepare: nn.Module | None = None):
        super().__init__()
        self.prepare = nn.Identity() if prepare is None else prepare
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return as_outputs(self.net(self.prepare(x))).logits


def build_export_module(model: Model, weights: Tensors, prepare: nn.Module | None = None) -> ExportModule:
    """A model with these weights, which include the statistics it is judged with."""
    module = model.module()
    missing = [name for name in (*model.shapes(), *model.statistics()) if name not in weights]
    if missing:
        raise ValueError(f"{model.family} cannot be exported without {missing[0]}")
    given = {name: weights[name] for name in (*model.shapes(), *model.statistics())}
    module.load_state_dict(given, strict=False)
    return ExportModule(_simplified(module, model), prepare).eval().requires_grad_(False)


def build_empty_module(model: Model, prepare: nn.Module | None = None) -> ExportModule:
    """The same module without its weights, to load an exported file into."""
    return ExportModule(_simplified(model.module(), model), prepare).eval().requires_grad_(False)


def _simplified(module: nn.Module, model: Model) -> nn.Module:
    """Without what acts in training alone, or is held for other sizes."""
    fold(module, foldable(model))
    _replace(module, Scaler, lambda part: nn.Identity())
    _replace(module, NormPerWidth, lambda part: part.norms[part.active])
    for part in module.modules():
        part._non_persistent_buffers_set.clear()  # constants travel with the weights
    return module


def _replace(module: nn.Module, kind: type[nn.Module], by: Callable[..., nn.Module]) -> None:
    for name, part in list(module.named_modules()):
        if isinstance(part, kind) and name:
            replace_part(module, name, by(part))


class Prepared(nn.Module):
    """[batch, channels, height, width] bytes, or numbers -> a model's input. Tokens need no preparation."""

    rows: Tensor | None
    columns: Tensor | None
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, preparation: Preparation, stored_shape: tuple[int, ...], stored_dtype: torch.dtype):
        super().__init__()
        self.factor = 1 / 255 if stored_dtype == torch.uint8 else 1.0
        image, build_export_module = len(stored_shape) == 3, preparation == Preparation()
        resized = image and preparation.size is not None and stored_shape[1:] != preparation.size
        rows, columns = (None, None) if not resized else _resizing(stored_shape[1:], preparation.size)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        grey = image and not build_export_module and stored_shape[0] == 1
        self.repeats = (preparation.channels or 1) if grey else 1
        normalizes = image and bool(preparation.mean)
        self.register_buffer("mean", torch.tensor(preparation.mean).view(-1, 1, 1) if normalizes else None)
        self.register_buffer("std", torch.tensor(preparation.std).view(-1, 1, 1) if normalizes else None)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        x = x * self.factor if self.factor != 1 else x
        if self.rows is not None and self.columns is not None:
            x = self.rows @ x @ self.columns
        x = x.repeat(1, self.repeats, 1, 1) if self.repeats > 1 else x
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std


def build_preparation(preparation: Preparation, stored: Tensor) -> nn.Module:
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

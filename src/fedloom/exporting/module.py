"""A trained model as a plain module for export: no device axis, and nothing that only training needs.

The module includes the preparation of the data set, so it takes examples as they are stored and they cannot be prepared
differently than in training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data import Preparation
from ..models import Model, Scaler
from ..models.normalization import NormPerWidth
from ..models.structure import as_outputs
from ..tensors import Tensors
from .fusion import find_fusable, fuse, replace_submodule


class ExportModule(nn.Module):
    """A trained model for export: [batch, ...] examples -> the logits of the last exit.

    Parameters
    ----------
    net : the model's module.
    prepare : turns stored examples into the net's input; None: they are its input.
    class_names : the name of each logit, for the file's metadata; (): they have none.
    """

    def __init__(self, net: nn.Module, prepare: nn.Module | None = None, class_names: tuple[str, ...] = ()):
        super().__init__()
        self.class_names = class_names
        self.prepare = nn.Identity() if prepare is None else prepare
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return as_outputs(self.net(self.prepare(x))).logits


def build_export_module(
    model: Model, weights: Tensors, prepare: nn.Module | None = None, class_names: tuple[str, ...] = ()
) -> ExportModule:
    """The module of a trained model.

    Parameters
    ----------
    model : the model.
    weights : its weights, which include the normalization statistics; frozen ones, if any are among them, are used too.
    prepare : turns stored examples into the model's input; None: they are its input.
    class_names : the name of each class, for the file's metadata.
    """
    module = model.module()
    missing = [name for name in (*model.shapes(), *model.statistics()) if name not in weights]
    if missing:
        raise ValueError(f"{model.family} cannot be exported without {missing[0]}")
    frozen = (name for name in model.frozen_shapes() if name in weights)
    state = {name: weights[name] for name in (*model.shapes(), *model.statistics(), *frozen)}
    module.load_state_dict(state, strict=False)
    return ExportModule(_simplify(module, model), prepare, class_names).eval().requires_grad_(False)


def build_empty_module(model: Model, prepare: nn.Module | None = None) -> ExportModule:
    """The same module with arbitrary weights, to load an exported file into.

    Parameters
    ----------
    model : the model.
    prepare : turns stored examples into the model's input; None: they are its input.
    """
    return ExportModule(_simplify(model.module(), model), prepare).eval().requires_grad_(False)


def _simplify(module: nn.Module, model: Model) -> nn.Module:
    """Remove what is only used in training or by other sizes, and fuse batch norms."""
    fuse(module, find_fusable(model))
    _replace_all(module, Scaler, lambda scaler: nn.Identity())
    _replace_all(module, NormPerWidth, lambda norm: norm.norms[norm.active])
    for layer in module.modules():
        layer._non_persistent_buffers_set.clear()  # constants are stored with the weights
    return module


def _replace_all(module: nn.Module, kind: type[nn.Module], replace: Callable[..., nn.Module]) -> None:
    for name, layer in list(module.named_modules()):
        if isinstance(layer, kind) and name:
            replace_submodule(module, name, replace(layer))


class PreparationModule(nn.Module):
    """A data set's preparation outside of training: stored images, time series or rows -> inputs.

    Parameters
    ----------
    preparation : the preparation.
    stored_shape : the shape of one stored example.
    stored_dtype : its type; bytes are divided by 255.
    """

    rows: Tensor | None
    columns: Tensor | None
    mean: Tensor | None
    std: Tensor | None

    def __init__(self, preparation: Preparation, stored_shape: tuple[int, ...], stored_dtype: torch.dtype):
        super().__init__()
        self.factor = 1 / 255 if stored_dtype == torch.uint8 else 1.0
        is_image = len(stored_shape) == 3
        is_resized = is_image and preparation.size is not None and stored_shape[1:] != preparation.size
        rows, columns = (None, None) if not is_resized else _resize_matrices(stored_shape[1:], preparation.size)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)
        is_gray = is_image and stored_shape[0] == 1
        self.repeats = (preparation.channels or 1) if is_gray else 1
        per_channel = (-1, *[1] * (len(stored_shape) - 1))
        for name in ("mean", "std"):
            numbers = getattr(preparation, name)
            self.register_buffer(name, torch.tensor(numbers).view(per_channel) if numbers else None)

    @property
    def steps(self) -> tuple[str, ...]:
        """What it does, in words and in this order."""
        resized = self.rows is not None and self.columns is not None
        steps = {
            "division by 255": self.factor != 1,
            "resizing": resized,
            f"repeating of gray to {self.repeats} channels": self.repeats > 1,
            "normalization": self.mean is not None,
        }
        return tuple(step for step, is_done in steps.items() if is_done)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.float32)
        x = x * self.factor if self.factor != 1 else x
        if self.rows is not None and self.columns is not None:
            x = self.rows @ x @ self.columns
        x = x.repeat(1, self.repeats, 1, 1) if self.repeats > 1 else x
        return x if self.mean is None or self.std is None else (x - self.mean) / self.std


def build_preparation(preparation: Preparation, stored: Tensor) -> nn.Module:
    """A data set's preparation outside of training, as a module; tokens need none.

    Parameters
    ----------
    preparation : the preparation.
    stored : some stored examples, for their shape and dtype.
    """
    if stored.dtype != torch.uint8 and not stored.is_floating_point():
        return nn.Identity()
    return PreparationModule(preparation, tuple(stored.shape[1:]), stored.dtype)


def _resize_matrices(before: tuple[int, ...], after: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Resizing is linear and separable, so it is a product with two matrices, which every runtime computes alike."""
    assert after is not None
    left, right = (_resize_matrix(old, new) for old, new in zip(before, after, strict=True))
    return left, right.mT.contiguous()


def _resize_matrix(before: int, after: int) -> Tensor:
    """[after, before]: the resized identity matrix."""
    identity = torch.eye(before, dtype=torch.float64).view(1, 1, before, before)
    return F.interpolate(identity, (after, before), mode="bilinear", align_corners=False, antialias=True)[0, 0].float()

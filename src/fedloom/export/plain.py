"""A trained model as a plain module: its own weights, no device axis, nothing that only training needs."""

from collections.abc import Callable

from torch import Tensor, nn

from ..models import Model, Scaler
from ..models.normalisation import NormPerWidth
from ..models.outputs import as_outputs
from ..tensors import Tensors
from .folding import fold, foldable, replace_part


class Plain(nn.Module):
    """[batch, ...] inputs -> the logits of the last exit. `prepare` makes inputs of examples as they are stored."""

    def __init__(self, net: nn.Module, prepare: nn.Module | None = None):
        super().__init__()
        self.prepare = nn.Identity() if prepare is None else prepare
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return as_outputs(self.net(self.prepare(x))).logits


def plain(model: Model, weights: Tensors, prepare: nn.Module | None = None) -> Plain:
    """A model with these weights, which include the statistics it is judged with."""
    module = model.module()
    missing = [name for name in (*model.shapes(), *model.statistics()) if name not in weights]
    if missing:
        raise ValueError(f"{model.family} cannot be exported without {missing[0]}")
    given = {name: weights[name] for name in (*model.shapes(), *model.statistics())}
    module.load_state_dict(given, strict=False)
    return Plain(_simplified(module, model), prepare).eval().requires_grad_(False)


def unfilled(model: Model, prepare: nn.Module | None = None) -> Plain:
    """The same module without its weights, to load an exported file into."""
    return Plain(_simplified(model.module(), model), prepare).eval().requires_grad_(False)


def _simplified(module: nn.Module, model: Model) -> nn.Module:
    """Without what acts in training alone, or is held for other sizes."""
    fold(module, foldable(model))
    _replace(module, Scaler, lambda part: nn.Identity())
    _replace(module, NormPerWidth, lambda part: part.norms[part.own])
    for part in module.modules():
        part._non_persistent_buffers_set.clear()  # constants travel with the weights
    return module


def _replace(module: nn.Module, kind: type[nn.Module], by: Callable[..., nn.Module]) -> None:
    for name, part in list(module.named_modules()):
        if isinstance(part, kind) and name:
            replace_part(module, name, by(part))

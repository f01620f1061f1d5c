"""Batch norm that is judged with fixed statistics is one factor and one shift a channel, and so is part of the
convolution or linear layer before it, where nobody else looks at what that layer makes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..models import Model
from ..models.interface import as_outputs

Pair = tuple[str, str]
"""The name of a layer, and of the batch norm behind it."""

FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
BATCH_NORM = nn.modules.batchnorm._BatchNorm


@lru_cache(maxsize=1024)
def foldable(model: Model) -> tuple[Pair, ...]:
    """The batch norms of a model that can become part of the layer before them: seen in one pass."""
    module, seen = model.module().eval(), _Watch()
    hooks = [hook for name, part in module.named_modules() for hook in seen.hooks(name, part)]
    with torch.no_grad(), seen:
        made = as_outputs(module(model.zero_inputs(2)))
    for hook in hooks:
        hook.remove()
    shown = {id(logits) for logits in made.exits.values()}
    return tuple(pair for pair in seen.pairs(shown) if not _shares(module, pair[0]))


def fold(module: nn.Module, pairs: Iterable[Pair]) -> None:
    """Put each pair's batch norm into its layer, in place; of the norm nothing is left."""
    for name, norm_name in pairs:
        layer, norm = module.get_submodule(name), module.get_submodule(norm_name)
        assert isinstance(norm, BATCH_NORM)
        weight, bias = folded(layer, norm)
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        replace_part(module, norm_name, nn.Identity())


def folded(layer: nn.Module, norm: BATCH_NORM) -> tuple[Tensor, Tensor]:
    """In double precision, so that rounding happens once."""
    mean, variance = norm.running_mean, norm.running_var
    assert isinstance(layer.weight, Tensor) and mean is not None and variance is not None
    factor, shift = (variance.double() + norm.eps).rsqrt(), torch.zeros_like(mean, dtype=torch.float64)
    if norm.affine:
        factor, shift = factor * norm.weight.double(), norm.bias.double()
    before = layer.bias.double() if isinstance(layer.bias, Tensor) else torch.zeros_like(shift)
    weight = layer.weight.double() * factor.view(-1, *[1] * (layer.weight.dim() - 1))
    bias = (before - mean.double()) * factor + shift
    return weight.to(layer.weight.dtype).detach(), bias.to(layer.weight.dtype).detach()


def replace_part(module: nn.Module, name: str, part: nn.Module) -> None:
    """Also where one part stands at several places."""
    old = module.get_submodule(name)
    for owner in list(module.modules()):
        for key, child in list(owner.named_children()):
            if child is old:
                setattr(owner, key, part)


class _Watch(TorchFunctionMode):
    """Sees who uses what a layer makes. Tensors are kept while it looks, so that no two have the same id."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, str] = {}  # tensor -> the layer that made it
        self._uses: Counter[int] = Counter()
        self._fed: dict[str, list[int]] = defaultdict(list)  # norm -> the tensors it got
        self._kept: list[Any] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if any(isinstance(one, Tensor) for one in tree_leaves(made)):  # else it asked for a shape or the like
            self._kept.append(made)
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor):
                    self._uses[id(one)] += 1
        return made

    def hooks(self, name: str, part: nn.Module) -> list[Any]:
        def after(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self._made[id(output)] = name

        def before(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._fed[name].append(id(inputs[0]))

        if isinstance(part, FOLDABLE):
            return [part.register_forward_hook(after)]
        if isinstance(part, BATCH_NORM) and part.track_running_stats:
            return [part.register_forward_pre_hook(before)]
        return []

    def pairs(self, shown: set[int]) -> list[Pair]:
        """Norms that get all that one layer makes, whenever it makes something, and nothing else."""
        found = []
        for norm, fed in self._fed.items():
            makers = {self._made.get(one, "") for one in fed}
            (maker, *others) = makers
            all_made = {one for one, name in self._made.items() if name == maker}
            if not others and maker and all_made == set(fed) - shown and all(self._uses[one] == 1 for one in fed):
                found.append((maker, norm))
        return found


def _shares(module: nn.Module, name: str) -> bool:
    """Whether another layer has the same weights."""
    own = {id(one) for one in module.get_submodule(name).parameters(recurse=False)}
    places = [id(one) for part in module.modules() for one in part.parameters(recurse=False)]
    return any(places.count(one) > 1 for one in own)

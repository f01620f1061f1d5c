"""Fuse batch norms into the convolution or linear layer before them, as `torch.nn.utils.fusion` does for one pair.

With fixed statistics a batch norm is one factor and one shift per channel, so it can be part of the layer before it if
nothing else uses that layer's output.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..models import Model
from ..models.structure import as_outputs

LayerAndNorm = tuple[str, str]
"""The name of a layer and of the batch norm after it."""

FUSABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
BATCH_NORM = nn.modules.batchnorm._BatchNorm


@lru_cache(maxsize=1024)
def find_fusable(model: Model) -> tuple[LayerAndNorm, ...]:
    """The batch norms of a model that can be fused, found by observing one pass."""
    module, observer = model.module().eval(), _DataFlow()
    hooks = [hook for name, layer in module.named_modules() for hook in observer.add_hooks(name, layer)]
    with torch.no_grad(), observer:
        outputs = as_outputs(module(model.zero_inputs(2)))
    for hook in hooks:
        hook.remove()
    exits = {id(logits) for logits in outputs.exits.values()}
    return tuple(pair for pair in observer.fusable_pairs(exits) if not _shares_weights(module, pair[0]))


def fuse(module: nn.Module, pairs: Iterable[LayerAndNorm]) -> None:
    """Fuse each pair in place; the norm becomes an identity."""
    for name, norm_name in pairs:
        layer, norm = module.get_submodule(name), module.get_submodule(norm_name)
        assert isinstance(norm, BATCH_NORM)
        weight, bias = _fused_weights(layer, norm)
        layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
        replace_submodule(module, norm_name, nn.Identity())


def _fused_weights(layer: nn.Module, norm: BATCH_NORM) -> tuple[Tensor, Tensor]:
    """In double precision, so that there is only one rounding."""
    mean, variance = norm.running_mean, norm.running_var
    assert isinstance(layer.weight, Tensor) and mean is not None and variance is not None
    factor, shift = (variance.double() + norm.eps).rsqrt(), torch.zeros_like(mean, dtype=torch.float64)
    if norm.affine:
        factor, shift = factor * norm.weight.double(), norm.bias.double()
    before = layer.bias.double() if isinstance(layer.bias, Tensor) else torch.zeros_like(shift)
    weight = layer.weight.double() * factor.view(-1, *[1] * (layer.weight.dim() - 1))
    bias = (before - mean.double()) * factor + shift
    return weight.to(layer.weight.dtype).detach(), bias.to(layer.weight.dtype).detach()


def replace_submodule(module: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace a submodule at every place where it is used."""
    old = module.get_submodule(name)
    for owner in list(module.modules()):
        for key, child in list(owner.named_children()):
            if child is old:
                setattr(owner, key, replacement)


class _DataFlow(TorchFunctionMode):
    """Records which tensors layers produce and where they are used. Tensors are kept alive, so that ids are unique."""

    def __init__(self) -> None:
        super().__init__()
        self._producers: dict[int, str] = {}  # tensor id -> the layer that produced it
        self._uses: Counter[int] = Counter()
        self._norm_inputs: dict[str, list[int]] = defaultdict(list)  # norm -> ids of the tensors it received
        self._alive: list[Any] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):  # otherwise a shape or the like was read
            self._alive.append(result)
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor):
                    self._uses[id(leaf)] += 1
        return result

    def add_hooks(self, name: str, layer: nn.Module) -> list[Any]:
        def after(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self._producers[id(output)] = name

        def before(norm: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._norm_inputs[name].append(id(inputs[0]))

        if isinstance(layer, FUSABLE):
            return [layer.register_forward_hook(after)]
        if isinstance(layer, BATCH_NORM) and layer.track_running_stats:
            return [layer.register_forward_pre_hook(before)]
        return []

    def fusable_pairs(self, exits: set[int]) -> list[LayerAndNorm]:
        """Norms that receive every output of one layer, are its only use, and receive nothing else."""
        pairs = []
        for norm, inputs in self._norm_inputs.items():
            producer, *others = {self._producers.get(tensor, "") for tensor in inputs}
            produced = {tensor for tensor, name in self._producers.items() if name == producer}
            is_only_use = produced == set(inputs) - exits and all(self._uses[tensor] == 1 for tensor in inputs)
            if not others and producer and is_only_use:
                pairs.append((producer, norm))
        return pairs


def _shares_weights(module: nn.Module, name: str) -> bool:
    """True if another layer has one of this layer's weights."""
    weights = {id(weight) for weight in module.get_submodule(name).parameters(recurse=False)}
    all_weights = [id(weight) for layer in module.modules() for weight in layer.parameters(recurse=False)]
    return any(all_weights.count(weight) > 1 for weight in weights)

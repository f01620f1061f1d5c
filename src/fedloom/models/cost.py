"""What a model costs: parameters, multiply-adds, and HeteroFL's own count of FLOPs.

HeteroFL's tables add a layer's operations once for each of its parameter tensors (so a layer with weight and bias
counts twice) and count norms; that convention is kept apart, under its own name.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from .model import Model

CONVOLUTIONS = nn.modules.conv._ConvNd
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)

MACS = "macs_per_output"
"""The attribute by which any other layer says how many multiply-adds are behind each number that it makes."""


@dataclass(frozen=True)
class Cost:
    parameters: int
    macs: int
    published_flops: int

    @property
    def megabytes(self) -> float:
        return 4 * self.parameters / 2**20


@lru_cache(maxsize=4096)
def cost(model: Model) -> Cost:
    """Of one example, forwards; found by watching every layer once."""
    module, found = model.module().eval(), [0, 0]

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        macs = _macs(layer, output)
        found[0] += macs
        found[1] += _published(layer, macs, output) * len(list(layer.parameters(recurse=False)))

    hooks = [part.register_forward_hook(watch) for part in module.modules() if _is_counted(part)]
    with torch.no_grad():
        module(model.blank(1))
    for hook in hooks:
        hook.remove()
    return Cost(sum(shape.numel() for shape in model.shapes().values()), found[0], found[1])


def _is_counted(layer: nn.Module) -> bool:
    return isinstance(layer, (CONVOLUTIONS, nn.Linear, *NORMS)) or hasattr(layer, MACS)


def _macs(layer: nn.Module, output: Tensor) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return output.numel() * layer.weight[0].numel()
    if isinstance(layer, nn.Linear):
        return output.numel() * layer.in_features
    return output.numel() * int(getattr(layer, MACS, 0))


def _published(layer: nn.Module, macs: int, output: Tensor) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return macs + (output.numel() if layer.bias is not None else 0)
    return 2 * output.numel() if isinstance(layer, NORMS) else macs

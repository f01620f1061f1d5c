"""The cost of a model: parameters, multiply-adds (MACs), and the FLOPs that HeteroFL publishes.

HeteroFL's tables count a layer's operations once per parameter tensor (so twice for a layer with weight and bias) and
include norms; `published_flops` follows that convention.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from .model import Model

CONVOLUTIONS = nn.modules.conv._ConvNd
NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)

MACS = "macs_per_output"
"""The attribute with which any other layer declares its multiply-adds per output number."""


@dataclass(frozen=True)
class Cost:
    parameters: int
    macs: int
    published_flops: int

    @property
    def megabytes(self) -> float:
        return 4 * self.parameters / 2**20


@lru_cache(maxsize=4096)
def compute_cost(model: Model) -> Cost:
    """Of one example's forward pass, counted with a hook on every layer."""
    module, totals = model.module().eval(), [0, 0]

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        macs = _macs(layer, output)
        totals[0] += macs
        totals[1] += _published_flops(layer, macs, output) * len(list(layer.parameters(recurse=False)))

    hooks = [layer.register_forward_hook(count) for layer in module.modules() if _is_counted(layer)]
    with torch.no_grad():
        module(model.zero_inputs(1))
    for hook in hooks:
        hook.remove()
    return Cost(sum(shape.numel() for shape in model.shapes().values()), totals[0], totals[1])


def _is_counted(layer: nn.Module) -> bool:
    return isinstance(layer, (CONVOLUTIONS, nn.Linear, *NORMS)) or hasattr(layer, MACS)


def _macs(layer: nn.Module, output: Tensor) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return output.numel() * layer.weight[0].numel()
    if isinstance(layer, nn.Linear):
        return output.numel() * layer.in_features
    return output.numel() * int(getattr(layer, MACS, 0))


def _published_flops(layer: nn.Module, macs: int, output: Tensor) -> int:
    if isinstance(layer, CONVOLUTIONS):
        return macs + (output.numel() if layer.bias is not None else 0)
    return 2 * output.numel() if isinstance(layer, NORMS) else macs

"""A block of devices as one network whose activations have the devices innermost: the batching mode "interleaved"."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..structure import has_known_layers
from .layout import ArrangedWeights, filled
from .tracing import NoLaneKernelError, Trace, trace

if TYPE_CHECKING:
    from .program import Program

PROGRAMS = 32
"""How many shapes of blocks are remembered for a module."""


FEW = 2
"""Examples that a module of known layers is recorded with."""

SPREAD = 16
"""Into so many parts a single device's examples are spread if its net is too narrow to fill vectors."""


def interleave(
    module: Callable[[Mapping[str, Tensor], Tensor], Any], layers: nn.Module
) -> Callable[[Mapping[str, Tensor], Tensor], Any]:
    """A function (weights [K, ...], x [K, batch, ...]) that runs a module for all devices at once by lane kernels.

    It raises `NoLaneKernelError` where the module does something that has none.

    Parameters
    ----------
    module : runs the layers for one device: (weights, x) -> outputs and statistics.
    layers : its layers.
    """
    programs: OrderedDict[Any, Program] = OrderedDict()
    arranged: defaultdict[Any, ArrangedWeights] = defaultdict(ArrangedWeights)

    def find(weights: Mapping[str, Tensor], x: Tensor) -> "Program":
        key = x.shape, x.dtype
        program = programs.get(key)
        if program is None:
            program = programs[key] = _build(module, layers, weights, x, arranged[len(x), x.dtype])
            if len(programs) > PROGRAMS:
                programs.popitem(last=False)
        return program

    def run(weights: Mapping[str, Tensor], x: Tensor) -> Any:
        devices, program = len(x), find(weights, x)
        examples = x.shape[1]
        if devices == 1 and program.is_narrow and examples >= 2 * SPREAD and not torch.is_grad_enabled():
            # the examples in the lanes, as if each sixteenth were a device's: the same bits, sooner
            spread = _repeat_last(x[0], -examples % SPREAD).view(SPREAD, -1, *x.shape[2:])
            found = find(weights, spread)(weights, spread)
            return tree_map(lambda tensor: tensor.flatten(0, 1)[:examples].unsqueeze(0), found)
        missing = program.devices - devices
        if not missing:
            return program(weights, x)
        full = {name: _repeat_last(weights[name], missing) for name in program.weights}
        found = program(full, _repeat_last(x, missing))
        return tree_map(lambda tensor: tensor[:devices], found)

    return run


def _build(
    module: Any, layers: nn.Module, weights: Mapping[str, Tensor], x: Tensor, arranged: ArrangedWeights
) -> "Program":
    from .program import Program

    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        raise NoLaneKernelError(f"{x.dtype} on {x.device} has no lane kernels")
    found = _trace(module, layers, weights, x[0].detach())
    return Program(found, filled(len(x)), x.dtype, layers.training, arranged)


def _trace(module: Any, layers: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Trace:
    """Record the module of one device: of known layers the sizes, with a few examples."""
    is_known = has_known_layers(layers)
    few = x[:FEW] if is_known else x
    first = {name: weight[0].detach() for name, weight in weights.items()}
    if not is_known:
        first = {name: weight.contiguous() for name, weight in first.items()}
    return replace(trace(module, layers, first, few.contiguous(), sizes_only=is_known), batch=len(x))


def _repeat_last(tensor: Tensor, times: int) -> Tensor:
    return torch.cat([tensor, tensor[-1:].expand(times, *tensor.shape[1:])])

"""A block of devices as one network whose activations have the devices innermost: the batching mode "interleaved"."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .layout import filled
from .tracing import NoLaneKernelError, Trace, trace

if TYPE_CHECKING:
    from .program import Program

PROGRAMS = 32
"""How many shapes of blocks are remembered for a module."""


FEW = 2
"""Examples that a module of our own is recorded with."""

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

    def find(weights: Mapping[str, Tensor], x: Tensor) -> "Program":
        key = x.shape, x.dtype
        program = programs.get(key)
        if program is None:
            program = programs[key] = _build(module, layers, weights, x)
            if len(programs) > PROGRAMS:
                programs.popitem(last=False)
        return program

    def run(weights: Mapping[str, Tensor], x: Tensor) -> Any:
        devices, program = len(x), find(weights, x)
        examples = x.shape[1]
        if devices == 1 and program.is_narrow and examples >= 2 * SPREAD and not torch.is_grad_enabled():
            # the examples in the lanes, as if each sixteenth were a device's: the same bits, sooner
            spread = _repeat_last(x[0], -examples % SPREAD).view(SPREAD, -1, *x.shape[2:])
            # all of them: a module is recorded with every weight, also with those that it does not use
            weights = {name: weight.expand(SPREAD, *weight.shape[1:]) for name, weight in weights.items()}
            found = find(weights, spread)(weights, spread)
            return tree_map(lambda tensor: tensor.flatten(0, 1)[:examples].unsqueeze(0), found)
        missing = program.devices - devices
        if not missing:
            return program(weights, x)
        full = {name: _repeat_last(weights[name], missing) for name in program.weights}
        found = program(full, _repeat_last(x, missing))
        return tree_map(lambda tensor: tensor[:devices], found)

    return run


def _build(module: Any, layers: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> "Program":
    from .program import Program

    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        raise NoLaneKernelError(f"{x.dtype} on {x.device} has no lane kernels")
    return Program(_trace(module, layers, weights, x[0].detach()), filled(len(x)), x.dtype)


def _trace(module: Any, layers: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Trace:
    """Record the module of one device: with a few examples if it is our own, which treats more of them alike."""
    few = x[:FEW] if type(layers).__module__.startswith("fedloom.models.") else x
    first = {name: weight[0].detach().contiguous() for name, weight in weights.items()}
    return replace(trace(module, layers, first, few.contiguous()), batch=len(x))


def _repeat_last(tensor: Tensor, times: int) -> Tensor:
    return torch.cat([tensor, tensor[-1:].expand(times, *tensor.shape[1:])])

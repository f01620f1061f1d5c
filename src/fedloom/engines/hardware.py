"""Where tensors are computed: what this machine has, and what is used of it."""

from dataclasses import dataclass

import torch

from ..placement import find_devices, hardware_name

CPU = "CPU"


@dataclass(frozen=True)
class ComputeHardware:
    """What can compute on this machine.

    Parameters
    ----------
    available : all that torch finds, the CPU first.
    used : what fedloom trains and evaluates on unless `engine.device` or `--device` names another.
    """

    available: tuple[str, ...]
    used: str

    @property
    def unused(self) -> tuple[str, ...]:
        """What torch finds besides it."""
        return tuple(name for name in self.available if name != self.used)

    def __str__(self) -> str:
        if not self.unused:
            return f"{self.used}; torch finds nothing else"
        return f"{self.used}; with --device also {', '.join(self.unused)}"


def find_hardware() -> ComputeHardware:
    """What torch finds on this machine, and what is used without a device in the recipe: the CPU."""
    found = [f"{name} ({hardware_name(torch.device(name))})" for name in find_devices()]
    return ComputeHardware((CPU, *found), CPU)

"""Where tensors are computed: what this machine has, and what is used of it."""

from dataclasses import dataclass

import torch

CPU = "CPU"


@dataclass(frozen=True)
class ComputeHardware:
    """What can compute on this machine.

    Parameters
    ----------
    available : all that torch finds, the CPU first.
    used : what fedloom trains and evaluates on.
    """

    available: tuple[str, ...]
    used: str

    @property
    def unused(self) -> tuple[str, ...]:
        """What torch finds and fedloom does not use."""
        return tuple(name for name in self.available if name != self.used)

    def __str__(self) -> str:
        if not self.unused:
            return f"{self.used}; torch finds nothing else"
        return f"{self.used}; torch also finds {', '.join(self.unused)}, which fedloom does not use"


def find_hardware() -> ComputeHardware:
    """What torch finds on this machine, and what is used: the CPU, whatever else there is."""
    found = [f"CUDA ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("MPS")
    return ComputeHardware((CPU, *found), CPU)

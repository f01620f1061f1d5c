"""Which kernels compute a model: torch's, or those with devices in the lanes of vectors (`lanes/`).

The choice follows from the model and the recipe alone, never from a timing, so that results do not depend on how busy a
machine is. It does depend on whether Numba is installed: a run's manifest says which kernels ran.
"""

from typing import Literal

from .batching import Kernels
from .cost import compute_cost
from .lanes import is_available
from .model import Model

KernelSetting = Literal["auto", "torch", "lanes"]

SMALLEST = 150_000
"""Multiply-adds for an example below which `auto` leaves a model to torch: it would take longer to compile the kernels
than to train."""


def choose_kernels(setting: KernelSetting, model: Model) -> Kernels:
    """The kernels of a model. Those for lanes are used only where a trial shows that they compute what torch computes.

    Parameters
    ----------
    setting : the recipe's.
    model : the model, as it was built.
    """
    if setting != "auto":
        return setting
    worth = is_available() and model.is_foldable() and compute_cost(model).macs >= SMALLEST
    return "lanes" if worth else "torch"

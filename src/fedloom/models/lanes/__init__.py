"""Kernels in Numba that keep devices in the lanes of vectors: the extra `fast`. Without Numba everything runs in torch.

`convolution`, `depthwise` and `columns` hold the kernels, `tracing` finds out what a module computes, `program` runs it
for K devices at once, and `updates` has the optimizers. Nothing here imports Numba before a block runs.
"""

from importlib.util import find_spec

from .block import interleave
from .layout import filled, lay_out
from .tracing import NoLaneKernelError

__all__ = ["NoLaneKernelError", "filled", "interleave", "is_available", "lay_out"]


def is_available() -> bool:
    """True if Numba is installed."""
    return find_spec("numba") is not None

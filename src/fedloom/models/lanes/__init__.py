"""Kernels in Numba that keep devices in the lanes of vectors: the extra `fast`. Without Numba everything runs in torch.

`convolution`, `winograd`, `depthwise`, `columns` and `copies` hold the kernels, `tracing` finds out what a module
computes, `program` runs it for K devices at once, `parts` cuts out subnets, and `updates` has the optimizers. Nothing
here imports Numba before a block runs.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from torch import Tensor

from .block import interleave
from .layout import filled, lay_out
from .tracing import NoLaneKernelError

__all__ = ["NoLaneKernelError", "filled", "interleave", "is_available", "lay_out", "read_parts"]


def is_available() -> bool:
    """True if Numba is installed."""
    return find_spec("numba") is not None


def read_parts(
    weights: Mapping[str, Tensor], parts: Sequence[Mapping[str, tuple[tuple[int, int], ...]]]
) -> list[dict[str, Tensor]] | None:
    """The weights of parts of a large model; see `parts.read_parts`, which needs Numba.

    Parameters
    ----------
    weights : the weights of the large model, [K, ...].
    parts : the entries that each part has of them, by name.
    """
    from .parts import read_parts

    return read_parts(weights, parts)

"""How weights of K devices lie in memory for the lane kernels: devices innermost, kernels outermost.

To everything else they are ordinary tensors [K, ...]; only their strides differ.
"""

from torch import Tensor


def arrange(weight: Tensor) -> Tensor:
    """[K, outputs, inputs, *kernel] -> [*kernel, inputs, outputs, K], contiguous; a view if it lies so already."""
    axes = weight.dim()
    order = (*range(3, axes), *reversed(range(min(3, axes))))
    return weight.permute(order).contiguous()


def disarrange(memory: Tensor) -> Tensor:
    """[*kernel, inputs, outputs, K] -> [K, outputs, inputs, *kernel], a view."""
    axes = memory.dim()
    kernel = max(0, axes - 3)
    return memory.permute(*reversed(range(kernel, axes)), *range(kernel))


def lay_out(weight: Tensor) -> Tensor:
    """A copy of a weight [K, ...] that lies in memory as the kernels want it."""
    arranged = arrange(weight)
    return disarrange(arranged.clone() if arranged.data_ptr() == weight.data_ptr() else arranged)


def filled(devices: int) -> int:
    """The number of devices that fills vectors: a power of two, or a multiple of sixteen.

    Parameters
    ----------
    devices : how many there are.
    """
    return 1 << (devices - 1).bit_length() if devices <= 16 else -(-devices // 16) * 16

"""Some devices of a block, run as a smaller block: the others do not take a step, so computing it would be wasted.

What a task hands over and gets back keeps the axis of all devices, so a method does not notice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors import Tensors, combine


@dataclass(frozen=True)
class SubBlock:
    """Some devices of a block.

    Parameters
    ----------
    devices : their indices in the block, in ascending order.
    size : how many devices the smaller block has; the last one is repeated to fill it.
    block : how many devices the whole block has.
    """

    devices: tuple[int, ...]
    size: int
    block: int

    @property
    def members(self) -> tuple[int, ...]:
        """The index in the block of each device that runs, with repetitions."""
        return self.devices + self.devices[-1:] * (self.size - len(self.devices))

    def take(self, tensor: Tensor) -> Tensor:
        """The tensor of the smaller block.

        Parameters
        ----------
        tensor : that of the whole block, [K, ...].
        """
        own = tensor.unbind()  # an index would have to be copied to where the tensor is
        return torch.stack([own[device] for device in self.members])

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor of the whole block, zero for devices that did not run.

        Parameters
        ----------
        tensor : that of the smaller block. Repetitions are left out, so that each device has one gradient.
        """
        ran = dict(zip(self.devices, tensor.unbind(), strict=False))
        zero = torch.zeros_like(tensor[0])
        return torch.stack([ran.get(device, zero) for device in range(self.block)])

    def take_all(self, tensors: Tensors) -> dict[str, Tensor]:
        """`take` for a bundle.

        Parameters
        ----------
        tensors : those of the whole block.
        """
        return combine(self.take, tensors)

    def place_all(self, tensors: Tensors) -> dict[str, Tensor]:
        """`place` for a bundle.

        Parameters
        ----------
        tensors : those of the smaller block.
        """
        return combine(self.place, tensors)


def make_sub_block(devices: Sequence[int], block: int) -> SubBlock | None:
    """The smaller block to run; None if the whole block takes hardly longer.

    Sizes are powers of two, so that few kernels are needed, and at least two: a block of one selects other kernels and
    changes the bits.

    Parameters
    ----------
    devices : the indices of the devices that have to run, in ascending order.
    block : how many devices the whole block has.
    """
    size = max(2, 1 << (len(devices) - 1).bit_length())
    return SubBlock(tuple(devices), size, block) if size < block else None

"""Attention by several heads, stored so that a narrow net keeps a part of every head.

A weight that goes into the heads is (numbers of a head, numbers of a token, heads), one that comes out of them (numbers
of a token, numbers of a head, heads). A slice in width is then what it is for any other layer: the first entries of the
first two axes. All sizes have as many heads, so the last axis is whole.
"""

import math

import torch
from torch import Tensor, nn

from .layers import Scaler


class IntoHeads(nn.Module):
    """A linear layer [batch, length, size] -> [batch, heads, length, dimension]."""

    folds = False

    def __init__(self, size: int, dimension: int, heads: int):
        super().__init__()
        self.weight = drawn_for(size, dimension, size, heads)
        self.bias = nn.Parameter(torch.zeros(dimension, 1, heads))
        self.macs_per_output = size

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bls,dsh->bhld", x, self.weight) + self.bias.permute(2, 1, 0)


class OutOfHeads(nn.Module):
    """A linear layer [batch, heads, length, dimension] -> [batch, length, size]."""

    folds = False

    def __init__(self, size: int, dimension: int, heads: int):
        super().__init__()
        self.weight = drawn_for(heads * dimension, size, dimension, heads)
        self.bias = nn.Parameter(torch.zeros(size))
        self.macs_per_output = heads * dimension

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhld,sdh->bls", x, self.weight) + self.bias


class Attention(nn.Module):
    """Every token looks at all tokens of its row."""

    def __init__(self, size: int, dimension: int, heads: int, scale: Scaler):
        super().__init__()
        self.query, self.key, self.value = (IntoHeads(size, dimension, heads) for _ in range(3))
        self.out, self.scale = OutOfHeads(size, dimension, heads), scale

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.scale(into(x)) for into in (self.query, self.key, self.value))
        likeness = query @ key.mT / math.sqrt(query.shape[-1])
        return self.scale(self.out(likeness.softmax(-1) @ value))  # type: ignore[no-any-return]


def drawn_for(inputs: int, *shape: int) -> nn.Parameter:
    """Weights as torch draws those of a linear layer with so many inputs."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

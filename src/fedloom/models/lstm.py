"""FedHeNN's nets for Sentiment140: word vectors, an LSTM, two layers. Makhija, Ho & Ghosh, ICML 2022.

The cell is that of Hochreiter & Schmidhuber with a forget gate, as torch has it, but its four gates have an axis of
their own, the last: the first entries of the other axes are then a narrower cell with all its gates.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Share
from .interface import Outputs, sequence
from .normalization import kept_channels
from .transformer import drawn_for

GATES = 4


def lstm(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    tokens: int | None = None,
    width: Share = 1.0,
    widest: Share = 1.0,
    embedding: Count = 300,
    hidden: Count = 128,
    layers: Count = 1,
    features: Count = 10,
    dropout: Fraction = 0.5,
    vectors: str | None = None,
) -> nn.Module:
    """`vectors` is a file of numpy's with a row of `embedding` numbers for each token: they are used as they are.

    Without it the word vectors are weights like others. `width` is a share of them, of the cells' `hidden` units and
    of the `features` that the last layer gets.
    """
    _, rows = sequence(input_shape, tokens)
    given = None if vectors is None else _given(vectors, rows, embedding)
    word, cell, last = (kept_channels(size, width, widest) for size in (embedding, hidden, features))
    lookup = nn.Embedding(rows, word) if given is None else GivenVectors(given)
    sizes = [word if given is None else embedding, *[cell] * layers]
    return Lstm(lookup, sizes, last, classes, dropout)


def _given(path: str, rows: int, numbers: int) -> Tensor:
    made = _read(path)
    if tuple(made.shape) != (rows, numbers):
        raise ValueError(f"{path} has vectors of the shape {tuple(made.shape)}, where {(rows, numbers)} are needed")
    return made


@lru_cache(maxsize=2)
def _read(path: str) -> Tensor:
    """Kept, so that all modules hold one copy between them."""
    return torch.from_numpy(np.load(path, allow_pickle=False)).float()


class GivenVectors(nn.Module):
    """Word vectors that are a constant: neither trained nor sent."""

    table: Tensor

    def __init__(self, table: Tensor):
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table)


class Cells(nn.Module):
    """One layer: [batch, length, inputs] -> its state after every token, [batch, length, hidden].

    The gates are in torch's order: what to let in, what to keep, what is new, what to show.
    """

    folds = False

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight = drawn_for(hidden, hidden, inputs, GATES)
        self.recurrent = drawn_for(hidden, hidden, hidden, GATES)
        self.bias, self.recurrent_bias = (drawn_for(hidden, hidden, 1, GATES) for _ in range(2))
        self.macs_per_output = GATES * (inputs + hidden)

    def forward(self, x: Tensor) -> Tensor:
        bias = (self.bias + self.recurrent_bias).permute(1, 2, 0).flatten(1)
        given, recurrent = x @ _flat(self.weight) + bias, _flat(self.recurrent)
        state = memory = x.new_zeros(x.shape[0], recurrent.shape[0])
        states = []
        for step in given.unbind(1):
            admit, keep, new, show = (step + state @ recurrent).chunk(GATES, -1)
            memory = keep.sigmoid() * memory + admit.sigmoid() * new.tanh()
            state = show.sigmoid() * memory.tanh()
            states.append(state)
        return torch.stack(states, 1)


def _flat(weight: Tensor) -> Tensor:
    """(hidden, inputs, gates) -> (inputs, gates * hidden): one product for all gates."""
    return weight.permute(1, 2, 0).flatten(1)


class Lstm(nn.Module):
    def __init__(self, lookup: nn.Module, sizes: Sequence[int], features: int, classes: int, dropout: float):
        super().__init__()
        self.lookup, self.drop = lookup, nn.Dropout(dropout)
        self.cells = nn.Sequential(*(Cells(before, after) for before, after in pairwise(sizes)))
        self.hidden, self.classifier = nn.Linear(sizes[-1], features), nn.Linear(features, classes)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, x: Tensor) -> Outputs:
        features = F.relu(self.hidden(self.cells(self.lookup(x))[:, -1]))
        return Outputs({"logits": self.classifier(self.drop(features))}, {"features": features})

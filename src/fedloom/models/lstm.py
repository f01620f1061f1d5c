"""FedHeNN's nets for Sentiment140: word vectors, an LSTM, two layers. Makhija, Ho & Ghosh, ICML 2022.

The LSTM computes what torch's does, but stores its four gates along a separate last axis, so that the first entries of
the other axes are a narrower LSTM with all its gates.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Share
from .layers import uniform_parameter, zero_bias_linear
from .normalization import kept_channels
from .structure import Outputs, check_token_input

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
    """LSTM text classifier: word vectors, LSTM layers, two fully connected layers; FedHeNN's net for Sentiment140.

    Parameters
    ----------
    width : the share of hidden units, of features and, where they are trained, of word vectors that this size keeps,
        the leading ones; 1 is the full model.
    embedding : the length of a word vector at full width.
    hidden : the units of each LSTM layer at full width.
    layers : the number of LSTM layers.
    features : the inputs of the last layer at full width.
    dropout : the dropout probability before the last layer.
    vectors : a .npy file with one row of `embedding` numbers per token, which are not trained; None: word vectors are
        weights.
    """
    _, rows = check_token_input(input_shape, tokens)
    pretrained = None if vectors is None else _read_vectors(vectors, rows, embedding)
    word, cell, last = (kept_channels(size, width, widest) for size in (embedding, hidden, features))
    lookup = nn.Embedding(rows, word) if pretrained is None else FixedEmbedding(pretrained)
    sizes = [word if pretrained is None else embedding, *[cell] * layers]
    return Lstm(lookup, sizes, last, classes, dropout)


def _read_vectors(path: str, rows: int, numbers: int) -> Tensor:
    vectors = _load_array(path)
    if tuple(vectors.shape) != (rows, numbers):
        raise ValueError(f"{path} has vectors of the shape {tuple(vectors.shape)}, where {(rows, numbers)} are needed")
    return vectors


@lru_cache(maxsize=2)
def _load_array(path: str) -> Tensor:
    """Cached, so that all modules share one copy."""
    return torch.from_numpy(np.load(path, allow_pickle=False)).float()


class FixedEmbedding(nn.Module):
    """Constant word vectors: neither trained nor sent."""

    table: Tensor

    def __init__(self, table: Tensor):
        super().__init__()
        self.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.table)


class LstmLayer(nn.Module):
    """[batch, length, inputs] -> the hidden state after every token, [batch, length, hidden].

    The gates are in torch's order: input, forget, cell, output.
    """

    foldable = False

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.weight = uniform_parameter(hidden, hidden, inputs, GATES)
        self.recurrent = uniform_parameter(hidden, hidden, hidden, GATES)
        self.bias, self.recurrent_bias = (uniform_parameter(hidden, hidden, 1, GATES) for _ in range(2))
        self.macs_per_output = GATES * (inputs + hidden)

    def forward(self, x: Tensor) -> Tensor:
        bias = (self.bias + self.recurrent_bias).permute(1, 2, 0).flatten(1)
        projected, recurrent = x @ _flat(self.weight) + bias, _flat(self.recurrent)
        hidden = cell = x.new_zeros(x.shape[0], recurrent.shape[0])
        states = []
        for step in projected.unbind(1):
            input_gate, forget_gate, candidate, output_gate = (step + hidden @ recurrent).chunk(GATES, -1)
            cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
            hidden = output_gate.sigmoid() * cell.tanh()
            states.append(hidden)
        return torch.stack(states, 1)


def _flat(weight: Tensor) -> Tensor:
    """(hidden, inputs, gates) -> (inputs, gates * hidden), for one matrix product over all gates."""
    return weight.permute(1, 2, 0).flatten(1)


class Lstm(nn.Module):
    def __init__(self, lookup: nn.Module, sizes: Sequence[int], features: int, classes: int, dropout: float):
        super().__init__()
        self.lookup, self.drop = lookup, nn.Dropout(dropout)
        self.cells = nn.Sequential(*(LstmLayer(before, after) for before, after in pairwise(sizes)))
        self.hidden, self.classifier = nn.Linear(sizes[-1], features), zero_bias_linear(features, classes)

    def forward(self, x: Tensor) -> Outputs:
        features = F.relu(self.hidden(self.cells(self.lookup(x))[:, -1]))
        return Outputs({"logits": self.classifier(self.drop(features))}, {"features": features})

"""HeteroFL's Transformer for masked language modelling. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6.

It says of every token of a row which it was before some were masked. Which are masked is up to the data; the mask is
the last token id, so there is one more id than there are words to say.

Attention by several heads, stored so that a narrow net keeps a part of every head.

A weight that goes into the heads is (numbers of a head, numbers of a token, heads), one that comes out of them (numbers
of a token, numbers of a head, heads). A slice in width is then what it is for any other layer: the first entries of the
first two axes. All sizes have as many heads, so the last axis is whole.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Natural, Share
from .interface import Outputs, sequence
from .layers import Scaler
from .normalization import Cut


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
        cka = query @ key.mT / math.sqrt(query.shape[-1])
        return self.scale(self.out(cka.softmax(-1) @ value))  # type: ignore[no-any-return]


def drawn_for(inputs: int, *shape: int) -> nn.Parameter:
    """Weights as torch draws those of a linear layer with so many inputs."""
    bound = 1 / math.sqrt(inputs)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))


def transformer(
    *,
    input_shape: tuple[int, ...],
    classes: int,
    tokens: int | None = None,
    width: Share = 1.0,
    widest: Share = 1.0,
    embedding: Count = 256,
    heads: Count = 8,
    hidden: Count = 512,
    layers: Count = 4,
    depth: Count | None = None,
    exit_after: Natural = 0,
    dropout: Fraction = 0.2,
    scaler: bool = True,
) -> nn.Module:
    """`width` is a share of `embedding`, of `hidden` and of every head; the number of heads is the same in all sizes.

    `depth` is the number of layers of this size: all `layers`, or those up to the exit; `exit_after` 0 is a net
    without exit. The rest is as in `Cut`.
    """
    kept = depth or layers
    if exit_after > kept or kept not in (exit_after, layers):
        raise ValueError(f"a net ends at its exit ({exit_after}) or after all {layers} layers, not after {kept}")
    if embedding % heads:
        raise ValueError(f"{embedding} numbers of a token cannot be dealt to {heads} heads")
    cut = Cut(width, widest, "none", scaler)
    entry = Entry(*sequence(input_shape, tokens), embedding, dropout, cut)
    encoders = [Encoder(embedding, heads, hidden, dropout, cut) for _ in range(kept)]
    early, last = (Decoder(embedding, classes, cut) if there else None for there in (exit_after, kept != exit_after))
    return Transformer(entry, encoders, exit_after, early, last)


class Entry(nn.Module):
    """A learned vector for each token, and one for each place in the row."""

    folds = False

    def __init__(self, length: int, tokens: int, embedding: int, dropout: float, cut: Cut):
        super().__init__()
        size = cut.kept(embedding)
        self.tokens, self.places = nn.Embedding(tokens, size), nn.Parameter(torch.randn(length, size))
        self.scale, self.norm, self.drop = cut.scale(), nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        made = self.scale(self.tokens(x)) + self.scale(self.places[: x.shape[-1]])
        return self.drop(self.norm(made))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Attention, then two layers for each token by itself; norms come after the sums."""

    def __init__(self, embedding: int, heads: int, hidden: int, dropout: float, cut: Cut):
        super().__init__()
        size, inner = cut.kept(embedding), cut.kept(hidden)
        self.attention = Attention(size, cut.kept(embedding // heads), heads, cut.scale())
        self.widen, self.narrow = linear(size, inner), linear(inner, size)
        for layer in (self.widen, self.narrow):
            nn.init.normal_(layer.weight, std=0.02)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.scale, self.drop = cut.scale(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x)))
        made = self.drop(F.gelu(self.scale(self.widen(x))))
        return self.norm2(x + self.drop(self.scale(self.narrow(made))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Which word each token was; its weights are its own, not those of the embedding."""

    folds = False

    def __init__(self, embedding: int, classes: int, cut: Cut):
        super().__init__()
        size = cut.kept(embedding)
        self.hidden, self.scale, self.norm = linear(size, size), cut.scale(), nn.LayerNorm(size)
        self.classifier = linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(F.gelu(self.scale(self.hidden(x)))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(
        self,
        entry: Entry,
        encoders: Sequence[Encoder],
        exit_after: int,
        early: Decoder | None,
        decoder: Decoder | None,
    ):
        super().__init__()
        self.entry, self.layers = entry, nn.ModuleList(encoders)
        self.exit_after, self.exit, self.decoder = exit_after, early, decoder

    @property
    def label_rows(self) -> tuple[str, ...]:
        """Of the embedding too, which has a last row for the mask."""
        heads = (("exit", self.exit), ("decoder", self.decoder))
        own = (f"{name}.classifier.{key}" for name, head in heads if head for key in ("weight", "bias"))
        return ("entry.tokens.weight", *own)

    def forward(self, x: Tensor) -> Outputs:
        x, exits = self.entry(x), {}
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if self.exit is not None and number == self.exit_after:
                exits["exit"] = self.exit(x)
        if self.decoder is not None:
            exits["full"] = self.decoder(x)
        return Outputs(exits, {"features": x.mean(-2)})


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.zeros_(made.bias)
    return made

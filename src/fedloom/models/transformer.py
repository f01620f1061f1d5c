"""HeteroFL's Transformer for masked language modeling. Diao, Ding & Tarokh, ICLR 2021, section 4 and Table 6.

It predicts the original token at every position. The data masks tokens; the mask is the last token id, so there is one
more id than there are classes. Attention weights have a separate last axis for the heads, so that a width slice, the
first entries of the other axes, keeps a part of every head.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..settings import Count, Fraction, Natural, Share
from .layers import Scaler, exit_rows, uniform_parameter, zero_bias_linear
from .normalization import WidthSlice
from .structure import Outputs, check_token_input


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
    exit_after: Natural | Literal["every"] = 0,
    dropout: Fraction = 0.2,
    scaler: bool = True,
    causal: bool = False,
    identical_layers: bool = False,
) -> nn.Module:
    """HeteroFL's Transformer for masked language modeling, optionally with an early exit.

    Parameters
    ----------
    width : the share of the embedding, of the hidden units and of every head that this size keeps, the leading ones; 1
        is the full model.
    embedding : the length of a token's vector at full width; a multiple of `heads`.
    heads : the number of attention heads, the same in all sizes.
    hidden : the units of the feed-forward layers at full width.
    layers : the number of encoder layers of the full model.
    depth : the number of layers of this size: all, or those up to an exit; None: all.
    exit_after : the number of layers before the early exit; 0: no exit; "every": an exit after every layer, all of one
        kind, as DepthFL, ScaleFL and InclusiveFL have them.
    dropout : the dropout probability.
    scaler : whether narrow sizes scale up their activations in training to those of the widest one, as in HeteroFL.
    causal : whether a token attends to itself and earlier ones alone, to predict the next one.
    identical_layers : whether all encoder layers start with the same weights, as in HeteroFL's code, which copies the
        first one; else each is drawn by itself.
    """
    kept = depth or layers
    if exit_after == "every":
        if kept > layers:
            raise ValueError(f"a net of {layers} layers cannot end after {kept}")
    elif exit_after > kept or kept not in (exit_after, layers):
        raise ValueError(f"a net ends at its exit ({exit_after}) or after all {layers} layers, not after {kept}")
    if embedding % heads:
        raise ValueError(f"embedding = {embedding} is not divisible by heads = {heads}")
    sliced = WidthSlice(width, widest, "none", scaler)
    entry = TokenEmbedding(*check_token_input(input_shape, tokens), embedding, dropout, sliced)
    encoders = [Encoder(embedding, heads, hidden, dropout, sliced, causal) for _ in range(kept)]
    for later in encoders[1:] if identical_layers else ():
        later.load_state_dict(encoders[0].state_dict())
    if exit_after == "every":
        exits = [Decoder(embedding, classes, sliced) for _ in range(kept)]
        return Transformer(entry, encoders, exit_after, None, None, exits)
    early, last = (
        Decoder(embedding, classes, sliced) if is_used else None for is_used in (exit_after, kept != exit_after)
    )
    return Transformer(entry, encoders, exit_after, early, last)


class TokenEmbedding(nn.Module):
    """A learned vector per token plus one per position."""

    foldable = False

    def __init__(self, length: int, tokens: int, embedding: int, dropout: float, sliced: WidthSlice):
        super().__init__()
        size = sliced.channels(embedding)
        self.tokens, self.places = nn.Embedding(tokens, size), nn.Parameter(torch.randn(length, size))
        self.scale, self.norm, self.drop = sliced.make_scaler(), nn.LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.scale(self.tokens(x)) + self.scale(self.places[: x.shape[-1]])
        return self.drop(self.norm(embedded))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Self-attention, then a feed-forward net per token; norms follow the residual sums (post-norm)."""

    def __init__(self, embedding: int, heads: int, hidden: int, dropout: float, sliced: WidthSlice, causal: bool):
        super().__init__()
        size, inner = sliced.channels(embedding), sliced.channels(hidden)
        self.attention = Attention(size, sliced.channels(embedding // heads), heads, sliced.make_scaler(), causal)
        self.widen, self.narrow = zero_bias_linear(size, inner), zero_bias_linear(inner, size)
        for layer in (self.widen, self.narrow):
            nn.init.normal_(layer.weight, std=0.02)
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.scale, self.drop = sliced.make_scaler(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.drop(self.attention(x)))
        hidden = self.drop(F.gelu(self.scale(self.widen(x))))
        return self.norm2(x + self.drop(self.scale(self.narrow(hidden))))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Predicts the token at each position; its weights are not tied to the embedding."""

    foldable = False

    def __init__(self, embedding: int, classes: int, sliced: WidthSlice):
        super().__init__()
        size = sliced.channels(embedding)
        self.hidden, self.scale, self.norm = zero_bias_linear(size, size), sliced.make_scaler(), nn.LayerNorm(size)
        self.classifier = zero_bias_linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.norm(F.gelu(self.scale(self.hidden(x)))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    layer_list = "layers"

    def __init__(
        self,
        entry: TokenEmbedding,
        encoders: Sequence[Encoder],
        exit_after: int | Literal["every"],
        early: Decoder | None,
        decoder: Decoder | None,
        exits: Sequence[Decoder] | None = None,
    ):
        super().__init__()
        self.entry, self.layers = entry, nn.ModuleList(encoders)
        self.exit_after, self.exit, self.decoder = exit_after, early, decoder
        self.exits = None if exits is None else nn.ModuleList(exits)

    @property
    def label_rows(self) -> tuple[str, ...]:
        """Includes the embedding, whose last row is that of the mask."""
        if self.exits is not None:
            return ("entry.tokens.weight", *exit_rows("exits", "classifier", len(self.exits)))
        heads = (("exit", self.exit), ("decoder", self.decoder))
        classifiers = (f"{name}.classifier.{key}" for name, head in heads if head for key in ("weight", "bias"))
        return ("entry.tokens.weight", *classifiers)

    def forward(self, x: Tensor) -> Outputs:
        x, exits = self.entry(x), {}
        for number, layer in enumerate(self.layers, start=1):
            x = layer(x)
            if self.exits is not None:
                exits[f"exit{number}"] = self.exits[number - 1](x)
            elif self.exit is not None and number == self.exit_after:
                exits["exit"] = self.exit(x)
        if self.decoder is not None:
            exits["full"] = self.decoder(x)
        return Outputs(exits, {"features": x.mean(-2)})


class IntoHeads(nn.Module):
    """A linear layer [batch, length, size] -> [batch, heads, length, dimension]."""

    foldable = False

    def __init__(self, size: int, dimension: int, heads: int):
        super().__init__()
        self.weight = uniform_parameter(size, dimension, size, heads)
        self.bias = nn.Parameter(torch.zeros(dimension, 1, heads))
        self.macs_per_output = size

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bls,dsh->bhld", x, self.weight) + self.bias.permute(2, 1, 0)


class OutOfHeads(nn.Module):
    """A linear layer [batch, heads, length, dimension] -> [batch, length, size]."""

    foldable = False

    def __init__(self, size: int, dimension: int, heads: int):
        super().__init__()
        self.weight = uniform_parameter(heads * dimension, size, dimension, heads)
        self.bias = nn.Parameter(torch.zeros(size))
        self.macs_per_output = heads * dimension

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bhld,sdh->bls", x, self.weight) + self.bias


class Attention(nn.Module):
    """Multi-head self-attention over all tokens of a sequence, or over those up to each of them."""

    macs_per_output = 0  # HeteroFL's tables leave the products of tokens with tokens out

    def __init__(self, size: int, dimension: int, heads: int, scale: Scaler, causal: bool):
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value = (IntoHeads(size, dimension, heads) for _ in range(3))
        self.out, self.scale = OutOfHeads(size, dimension, heads), scale

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self.scale(into(x)) for into in (self.query, self.key, self.value))
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return self.scale(self.out(scores.softmax(-1) @ value))  # type: ignore[no-any-return]

"""Nets that stack several things on one axis, in plain torch."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import heads, packed

FEATURES, LENGTH, CLASSES = 5, 6, 3
SHAPE = (LENGTH, FEATURES)
IMAGE = (1, 8, 8)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.layer, self.classifier = layer, nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.layer(x)[0].mean(1))  # type: ignore[no-any-return]


def lstm(hidden: int = 8, both: bool = False, layers: int = 1, projection: int = 0) -> nn.Module:
    return Recurrent(nn.LSTM(FEATURES, hidden, layers, batch_first=True, bidirectional=both, proj_size=projection))


def gru(hidden: int = 8, both: bool = False, layers: int = 1) -> nn.Module:
    return Recurrent(nn.GRU(FEATURES, hidden, layers, batch_first=True, bidirectional=both))


def rnn(hidden: int = 8, both: bool = False, layers: int = 1) -> nn.Module:
    return Recurrent(nn.RNN(FEATURES, hidden, layers, batch_first=True, bidirectional=both))


class LastStates(nn.Module):
    """The last state of both directions, concatenated."""

    def __init__(self, hidden: int):
        super().__init__()
        self.layer = nn.GRU(FEATURES, hidden, batch_first=True, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        forth, back = self.layer(x)[1]
        return self.classifier(torch.cat([forth, back], -1))  # type: ignore[no-any-return]


def last_states(hidden: int = 8) -> nn.Module:
    return LastStates(hidden)


class Cells(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.cell, self.classifier = nn.LSTMCell(FEATURES, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state: tuple[Tensor, Tensor] | None = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        assert state is not None
        return self.classifier(state[0])  # type: ignore[no-any-return]


def cells(hidden: int = 8) -> nn.Module:
    return Cells(hidden)


class ViT(nn.Module):
    """A class token, learned positions and torch's encoder; tokens are scaled by the root of their size."""

    def __init__(self, size: int, heads: int, layers: int, norm_first: bool):
        super().__init__()
        self.stem, self.scale = nn.Linear(FEATURES, size), math.sqrt(size)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, size)), nn.Parameter(torch.randn(1, LENGTH + 1, size))
        layer = nn.TransformerEncoderLayer(size, heads, 2 * size, 0.1, "gelu", batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.stem(x) * self.scale], 1) + self.places
        return self.classifier(self.encoder(x)[:, 0])  # type: ignore[no-any-return]


def vit(size: int = 8, heads: int = 2, layers: int = 1, norm_first: bool = True) -> nn.Module:
    return ViT(size, heads, layers, norm_first)


class CrossAttention(nn.Module):
    """Keys and values of their own sizes, and a learned bias for each."""

    def __init__(self, size: int):
        super().__init__()
        self.stem, self.classifier = nn.Linear(FEATURES, size), nn.Linear(size, CLASSES)
        self.attention = nn.MultiheadAttention(size, 2, add_bias_kv=True, kdim=FEATURES, vdim=3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(self.stem(x), x, x[..., :3], need_weights=False)
        return self.classifier(attended.mean(1))  # type: ignore[no-any-return]


def cross_attention(size: int = 8) -> nn.Module:
    return CrossAttention(size)


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


class NamedAttention(nn.Module):
    """Separate projections, with the names that most libraries use."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.num_heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.num_heads)
        return self.out_proj(mixed)  # type: ignore[no-any-return]


class OwnAttention(nn.Module):
    """The same under names that say nothing."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.parts = heads
        self.one, self.two, self.three, self.four = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mixed = attend(self.one(x), self.two(x), self.three(x), self.parts)
        return self.four(mixed)  # type: ignore[no-any-return]


class PackedAttention(nn.Module):
    """One matrix for queries, keys and values, used by einsum."""

    def __init__(self, size: int, heads: int):
        super().__init__()
        self.parts = heads
        self.inner = nn.Parameter(torch.randn(3 * size, size))
        self.outer = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        mixed = attend(*torch.einsum("bli,oi->blo", x, self.inner).chunk(3, -1), self.parts)
        return self.outer(mixed)  # type: ignore[no-any-return]


class DeclaredAttention(PackedAttention):
    def __init__(self, size: int, number: int):
        super().__init__(size, number)
        self.stacked_axes = {"inner": {0: packed(3, heads(number))}, "outer.weight": {1: heads(number)}}


ATTENTIONS = {"named": NamedAttention, "own": OwnAttention, "packed": PackedAttention, "declared": DeclaredAttention}


class AttentionNet(nn.Module):
    def __init__(self, size: int, attention: nn.Module):
        super().__init__()
        self.stem, self.norm, self.classifier = nn.Linear(FEATURES, size), nn.LayerNorm(size), nn.Linear(size, CLASSES)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.classifier((x + self.attention(self.norm(x))).mean(1))  # type: ignore[no-any-return]


def attention_net(kind: str, size: int = 8, heads: int = 2) -> nn.Module:
    return AttentionNet(size, ATTENTIONS[kind](size, heads))


class DenseNet(nn.Module):
    """Every layer receives the maps of all layers before it; `mirrored`, in an order that no trace can follow."""

    def __init__(self, stem: int, growth: int, layers: int, mirrored: bool):
        super().__init__()
        self.stem, self.mirrored = nn.Conv2d(1, stem, 3, padding=1), mirrored
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False))
            for inputs in range(stem, stem + layers * growth, growth)
        )
        self.norm = nn.BatchNorm2d(stem + layers * growth)
        self.classifier = nn.Linear(4 * (stem + layers * growth), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
            x = x.flip(1) if self.mirrored else x
        return self.classifier(F.adaptive_avg_pool2d(F.relu(self.norm(x)), 2).flatten(1))  # type: ignore[no-any-return]


def dense_net(stem: int = 6, growth: int = 4, layers: int = 2, mirrored: bool = False) -> nn.Module:
    return DenseNet(stem, growth, layers, mirrored)

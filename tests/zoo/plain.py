"""Modules as people write them in plain torch, with no thought of federated learning; tiny.

The file can be given to a command with `--with`: only the functions at its end know what a family of models is.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# -- images ------------------------------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Stochastic depth: in training, a branch is left out for some examples."""

    def __init__(self, chance: float):
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.chance == 0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(1 - self.chance)
        return x * keep / (1 - self.chance)


class ChannelsFirstNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, drop_path: float, layer_scale: float = 0.1):
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.expand, self.reduce = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(x).permute(0, 2, 3, 1)
        out = self.gamma * self.reduce(F.gelu(self.expand(self.norm(out))))
        return x + self.drop_path(out.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, in_chans: int, num_classes: int, dims: Sequence[int], drop_path: float = 0.2):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_chans, dims[0], 2, stride=2), ChannelsFirstNorm(dims[0], eps=1e-6))
        stages: list[nn.Module] = [ConvNeXtBlock(dims[0], drop_path)]
        for before, after in pairwise(dims):
            stages += [ChannelsFirstNorm(before, eps=1e-6), nn.Conv2d(before, after, 2, stride=2)]
            stages += [ConvNeXtBlock(after, drop_path)]
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(dims[-1], eps=1e-6), nn.Linear(dims[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean((-2, -1))))


class VGG(nn.Module):
    def __init__(self, in_channels: int, size: int, num_classes: int, channels: Sequence[int], hidden: int):
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise([in_channels, *channels]):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        cells = size // 2 ** len(channels)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels[-1] * cells * cells, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(before), nn.Conv2d(before, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class DenseNet(nn.Module):
    def __init__(self, in_channels: int, num_classes: int, growth: int, layers: int = 2):
        super().__init__()
        channels = 2 * growth
        blocks: list[nn.Module] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)]
        for block in range(2):
            for _ in range(layers):
                blocks.append(DenseLayer(channels, growth))
                channels += growth
            if block == 0:
                half = channels // 2
                blocks += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1), nn.AvgPool2d(2)]
                channels = half
        self.features = nn.Sequential(*blocks, nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, in_channels: int, size: int, num_classes: int, dim: int, heads: int = 2, patch: int = 4):
        super().__init__()
        self.patches = nn.Conv2d(in_channels, dim, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(ViTBlock(dim, heads) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class EinsumMixer(nn.Module):
    """Mixes patches and channels by einsum, with weights that are plain parameters."""

    def __init__(self, in_channels: int, size: int, num_classes: int, dim: int, patch: int = 4):
        super().__init__()
        self.patch, count = patch, (size // patch) ** 2
        self.embed = nn.Parameter(torch.randn(in_channels, patch, patch, dim) / patch)
        self.tokens = nn.Parameter(torch.randn(count, count) / count**0.5)
        self.channels = nn.Parameter(torch.randn(dim, dim) / dim**0.5)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        side = x.shape[-1] // self.patch
        x = x.unflatten(-1, (side, self.patch)).unflatten(2, (side, self.patch))
        x = torch.einsum("bchpwq,cpqd->bhwd", x, self.embed).flatten(1, 2)
        x = x + torch.einsum("st,btd->bsd", self.tokens, F.gelu(x))
        x = x + torch.einsum("btd,de->bte", F.gelu(x), self.channels)
        return self.head(x.mean(1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mlp = nn.Sequential(nn.Linear(tokens, hidden), nn.GELU(), nn.Linear(hidden, tokens))
        self.channel_mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_mlp(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mlp(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, in_channels: int, size: int, num_classes: int, dim: int, patch: int = 4):
        super().__init__()
        tokens = (size // patch) ** 2
        self.stem = nn.Conv2d(in_channels, dim, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim, dim) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


def double_conv(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """One logit per class and pixel."""

    def __init__(self, in_channels: int, num_classes: int, base: int):
        super().__init__()
        self.down1, self.down2 = double_conv(in_channels, base), double_conv(base, 2 * base)
        self.bottom = double_conv(2 * base, 4 * base)
        self.up2, self.dec2 = nn.ConvTranspose2d(4 * base, 2 * base, 2, stride=2), double_conv(4 * base, 2 * base)
        self.up1, self.dec1 = nn.ConvTranspose2d(2 * base, base, 2, stride=2), double_conv(2 * base, base)
        self.out = nn.Conv2d(base, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.up2(self.bottom(F.max_pool2d(second, 2)))
        x = self.up1(self.dec2(torch.cat([second, x], 1)))
        return self.out(self.dec1(torch.cat([first, x], 1)))


class PooledUNet(UNet):
    """One logit per class and image: the mean of its pixels'."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean((-2, -1))


# -- text and signals --------------------------------------------------------------------------------------------------


class SelfAttention(nn.Module):
    """Separate projections, split into so many heads."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)

        x = F.scaled_dot_product_attention(split(self.query(x)), split(self.key(x)), split(self.value(x)))
        return self.output(x.transpose(1, 2).reshape(batch, length, dim))


class TextEncoder(nn.Module):
    def __init__(self, vocabulary: int, length: int, num_classes: int, dim: int, heads: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.attention, self.norm1, self.norm2 = SelfAttention(dim, heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim))
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm1(x + self.attention(x))
        x = self.norm2(x + self.feed_forward(x))
        return self.classifier(x.mean(1))


class LSTMClassifier(nn.Module):
    def __init__(self, vocabulary: int, num_classes: int, embedding: int, hidden: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.dropout, self.fc = nn.Dropout(0.2), nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        return self.fc(self.dropout(hidden[-1]))


class GRUClassifier(nn.Module):
    """Of series [batch, time, features]."""

    def __init__(self, features: int, num_classes: int, hidden: int):
        super().__init__()
        self.gru = nn.GRU(features, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x)
        return self.fc(out.mean(1))


class SignalNet(nn.Module):
    """A 1-D CNN on signals [batch, channels, time]."""

    def __init__(self, in_channels: int, num_classes: int, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(in_channels, channels, 5, padding=2), nn.BatchNorm1d(channels), nn.ReLU(), nn.MaxPool1d(2),
            nn.Conv1d(channels, 2 * channels, 3, padding=1, stride=2), nn.BatchNorm1d(2 * channels), nn.ReLU(),
        )  # fmt: skip
        self.classifier = nn.Linear(2 * channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x).mean(-1))


# -- adapters ----------------------------------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 1.0):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


class LoRANet(nn.Module):
    def __init__(self, inputs: int, num_classes: int, rank: int, hidden: int = 16):
        super().__init__()
        self.first, self.second = (
            LoRALinear(layer, rank) for layer in (nn.Linear(inputs, hidden), nn.Linear(hidden, hidden))
        )
        self.classifier = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.second(F.relu(self.first(x.flatten(1))))))


# -- families ----------------------------------------------------------------------------------------------------------

Shape = tuple[int, ...]


def convnext(*, input_shape: Shape, classes: int, width: float = 1.0, drop_path: float = 0.2) -> nn.Module:
    return ConvNeXt(input_shape[0], classes, [int(8 * width), int(16 * width)], drop_path)


def vgg(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return VGG(input_shape[0], input_shape[1], classes, [int(8 * width), int(12 * width)], int(16 * width))


def densenet(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return DenseNet(input_shape[0], classes, int(4 * width))


def vit(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return VisionTransformer(input_shape[0], input_shape[1], classes, int(8 * width))


def einsum_mixer(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return EinsumMixer(input_shape[0], input_shape[1], classes, int(12 * width))


def mlp_mixer(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return MLPMixer(input_shape[0], input_shape[1], classes, int(8 * width))


def unet(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return PooledUNet(input_shape[0], classes, int(4 * width))


def text_encoder(
    *, input_shape: Shape, classes: int, tokens: int, width: float = 1.0, head_size: int | None = None
) -> nn.Module:
    """Of two heads whatever the width, or of as many as heads of a given size make."""
    dim = int(16 * width)
    return TextEncoder(tokens, input_shape[0], classes, dim, 2 if head_size is None else dim // head_size)


def lstm_classifier(*, classes: int, tokens: int, width: float = 1.0) -> nn.Module:
    return LSTMClassifier(tokens, classes, int(8 * width), int(12 * width))


def gru_classifier(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return GRUClassifier(input_shape[1], classes, int(8 * width))


def signal_cnn(*, input_shape: Shape, classes: int, width: float = 1.0) -> nn.Module:
    return SignalNet(input_shape[0], classes, int(8 * width))


def lora_net(*, input_shape: Shape, classes: int, rank: int = 16) -> nn.Module:
    return LoRANet(torch.Size(input_shape).numel(), classes, rank)


MODELS: dict[str, Any] = {
    "convnext": convnext,
    "vgg": vgg,
    "densenet": densenet,
    "vit": vit,
    "einsum_mixer": einsum_mixer,
    "mlp_mixer": mlp_mixer,
    "unet": unet,
    "text_encoder": text_encoder,
    "lstm_classifier": lstm_classifier,
    "gru_classifier": gru_classifier,
    "signal_cnn": signal_cnn,
    "lora_net": lora_net,
}

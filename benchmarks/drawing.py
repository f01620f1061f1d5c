"""Nets that draw random numbers in training, as users write them; with chance 0 the same net draws none."""

from torch import Tensor, nn


class DropPath(nn.Module):
    """Drops a branch for some of the examples."""

    def __init__(self, chance: float):
        super().__init__()
        self.keep = 1 - chance

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1:
            return x
        return x * x.new_empty((len(x),) + (1,) * (x.dim() - 1)).bernoulli_(self.keep) / self.keep


def dropout_cnn(chance: float, width: int = 16) -> nn.Module:
    """Two convolutions and two layers, with dropout where it is usual: after the maps and before the classifier."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(chance / 2),
        nn.Flatten(), nn.Linear(98 * width, 4 * width), nn.ReLU(), nn.Dropout(chance), nn.Linear(4 * width, 10),
    )  # fmt: skip


def narrow_dropout_cnn(chance: float) -> nn.Module:
    """So narrow that most of its time is overhead."""
    return dropout_cnn(chance, 4)


class Residual(nn.Module):
    def __init__(self, channels: int, chance: float):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), DropPath(chance),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def stochastic_depth_resnet(chance: float) -> nn.Module:
    """Three residual blocks, each of which is left out for some of the examples."""
    blocks = (Residual(16, chance) for _ in range(3))
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )

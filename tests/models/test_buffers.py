"""Buffers that training changes would be shared by all devices; constants and caches are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import fedloom as fl
from fedloom.models import build_model
from fedloom.recipe.errors import RecipeError
from fedloom.testing import CheckFailed, check_model


class Centered(nn.Module):
    """Subtracts a mean that it updates while it trains, as its own kind of batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)
        self.register_buffer("mean", torch.zeros(36))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.classifier(x - self.mean)  # type: ignore[no-any-return]


class Recording(Centered):
    """Only records the mean in training: no output of a training step shows it."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.classifier(x.flatten(1) - (0 if self.training else self.mean))  # type: ignore[no-any-return]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]


class Spectral(nn.Module):
    def __init__(self, normalize: Callable[[nn.Module], nn.Module] = spectral_norm) -> None:
        super().__init__()
        self.first, self.classifier = normalize(nn.Linear(36, 5)), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.first(x.flatten(1)).relu())  # type: ignore[no-any-return]


class Constant(nn.Module):
    """A constant, and one that is computed when its size is first known."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.classifier = nn.BatchNorm2d(1), nn.Linear(36, 4)
        self.register_buffer("scale", torch.full((1,), 2.0))
        self.register_buffer("cache", torch.empty(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.cache.numel() != x.shape[-1]:
            self.cache = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        return self.classifier((self.norm(x) * self.scale + self.cache).flatten(1))  # type: ignore[no-any-return]


CHANGED = {
    Centered: "mean",
    Recording: "mean",
    Counting: "steps",
    Spectral: "first.parametrizations.weight.0._u",
}


@pytest.mark.parametrize("build", CHANGED)
def test_module_that_changes_a_buffer_is_refused_by_name(build: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"its forward changes the buffer {CHANGED[build]} in training"):
        build_model("remembering", build, {}, (1, 6, 6), 4).check_buffers()
    with pytest.raises(CheckFailed, match=r"(?s)check_purity failed.*changes the buffer"):
        check_model(build)


@pytest.mark.parametrize("build", [Constant, lambda: Spectral(weight_norm)], ids=["constant", "weight norm"])
def test_module_with_constant_buffers_passes(build: Callable[[], nn.Module]) -> None:
    build_model("constant", build, {}, (1, 6, 6), 4).check_buffers()
    assert "check_purity" in check_model(build).passed


def test_simulation_of_module_that_changes_a_buffer_is_refused_before_it_runs() -> None:
    def centered() -> nn.Module:
        made = Centered()
        made.classifier = nn.Linear(64, 10)
        made.mean = torch.zeros(64)
        return made

    with pytest.raises(RecipeError, match="changes the buffer mean in training"):
        fl.Simulation("digits", tiers=fl.tiers(centered, all={"share": 1.0}), method="fedavg", devices=4)

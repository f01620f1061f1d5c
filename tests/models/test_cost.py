"""The cost of layers, counted by hand."""

from collections.abc import Callable

import pytest
from torch import nn

from fedloom.models import Cost, build_model, compute_cost


def conv_with_bias() -> nn.Module:
    return nn.Conv2d(2, 3, 3, stride=2, padding=1)


def conv_without_bias() -> nn.Module:
    return nn.Conv2d(2, 3, 3, bias=False)


def grouped() -> nn.Module:
    return nn.Conv2d(2, 4, 3, groups=2, bias=False)


def transposed() -> nn.Module:
    return nn.ConvTranspose2d(2, 3, 2, stride=2)


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 5))


def norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.GroupNorm(1, 2, affine=False), nn.ReLU())


def used_twice() -> nn.Module:
    layer = nn.Conv2d(2, 2, 1, bias=False)
    return nn.Sequential(layer, layer)


@pytest.mark.parametrize(
    ("build", "parameters", "macs", "published"),
    [
        # 3×3 outputs of 3 channels, 18 products each; published: (486 + 27 for the bias) for each of two tensors
        (conv_with_bias, 57, 3 * 9 * 18, 2 * (3 * 9 * 18 + 27)),
        (conv_without_bias, 54, 3 * 16 * 18, 3 * 16 * 18),
        (grouped, 36, 4 * 16 * 9, 4 * 16 * 9),
        # every of 72 inputs is multiplied by 12 weights; 12×12 outputs of 3 channels have a bias
        (transposed, 27, 72 * 12, 2 * (72 * 12 + 432)),
        (linear, 365, 360, 2 * 360),
        (norms, 8, 0, 2 * 2 * (2 * 72)),  # two affine norms of two tensors each; one without counts nothing
        (used_twice, 4, 2 * 2 * 36 * 2, 2 * 2 * 36 * 2),
    ],
)
def test_cost_of_layers_matches_hand_count(
    build: Callable[[], nn.Module], parameters: int, macs: int, published: int
) -> None:
    assert compute_cost(build_model(build.__name__, build, {}, (2, 6, 6), 3)) == Cost(parameters, macs, published)


def test_cost_megabytes_are_binary() -> None:
    assert Cost(2**18, 0, 0).megabytes == 1.0

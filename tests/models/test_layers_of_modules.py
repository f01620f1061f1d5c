"""Layers and weights in the order in which torch gives them."""

from collections.abc import Callable

import pytest
from torch import nn

from fedloom.models import MODELS, Model
from fedloom.models.structure import layers_of, named_layers, named_weights, own_weights


def tied() -> nn.Module:
    """A layer in two places, a weight of two layers, a layer that is missing and one without weights."""
    shared = nn.Linear(3, 3, bias=False)
    net = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(3, 3)), nn.Linear(3, 3))
    net[3].weight = shared.weight
    net.register_module("missing", None)
    return net


def assert_same_order(module: nn.Module) -> None:
    assert named_layers(module) == list(module.named_modules())
    assert layers_of(module) == list(module.modules())
    expected = list(module.named_parameters())
    assert [name for name, _ in named_weights(module)] == [name for name, _ in expected]
    assert all(ours is theirs for (_, ours), (_, theirs) in zip(named_weights(module), expected, strict=True))
    for layer in module.modules():
        assert [name for name, _ in own_weights(layer)] == [name for name, _ in layer.named_parameters(recurse=False)]


@pytest.mark.parametrize("family", MODELS)
def test_traversal_family_has_the_order_of_torch(family: str, tiny_model: Callable[..., Model]) -> None:
    assert_same_order(tiny_model(family).module())


def test_traversal_shared_and_missing_layers_have_the_order_of_torch() -> None:
    assert_same_order(tied())
    assert_same_order(nn.Linear(2, 2))

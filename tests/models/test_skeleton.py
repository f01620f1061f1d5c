"""Skeletons have the structure of a module, and everything but its weights."""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import Model, build_model, chain_models
from fedloom.models.structure import build_skeleton, layer_kinds


class WithTable(nn.Module):
    """A constant that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("table", torch.empty(3).normal_())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table)  # type: ignore[no-any-return]


class LooksAtWeights(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.is_positive = bool(self.weight[0, 0] > 0)


@pytest.mark.parametrize("family", ["convnet", "mobilenet", "preresnet", "transformer"])
def test_skeleton_has_shapes_and_layers_of_module(family: str, tiny_model: Callable[..., Model]) -> None:
    model = tiny_model(family)
    module, skeleton = model.module(), model.skeleton()
    assert {name: w.shape for name, w in skeleton.state_dict().items()} == {
        name: w.shape for name, w in module.state_dict().items()
    }
    assert layer_kinds(skeleton) == layer_kinds(module)
    assert all(torch.equal(a, b) for a, b in zip(skeleton.buffers(), module.buffers(), strict=True))


@pytest.mark.parametrize("build", [WithTable, LooksAtWeights])
def test_skeleton_of_module_with_values_of_its_own_is_the_module(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()

    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return build()

    skeleton = build_skeleton(seeded)
    assert all(
        torch.equal(a, b) for a, b in zip(skeleton.state_dict().values(), module.state_dict().values(), strict=True)
    )


def test_skeleton_of_weights_drawn_until_they_fit_is_built() -> None:
    """As transformers draws them."""

    def build() -> nn.Module:
        module = nn.Linear(3, 2)
        nn.init.trunc_normal_(module.weight, std=0.02)
        return module

    assert build_skeleton(build).weight.abs().max() <= 2  # type: ignore[union-attr,operator]


def test_skeleton_of_family_that_fails_raises_its_error() -> None:
    def build() -> nn.Module:
        raise ValueError("too narrow")

    with pytest.raises(ValueError, match="too narrow"):
        build_skeleton(build)


def frozen_body() -> nn.Module:
    module = nn.Sequential(OrderedDict(body=nn.Linear(3, 2), head=nn.Linear(2, 4)))
    module.get_submodule("body").requires_grad_(False)
    return module


def test_skeleton_of_chain_leaves_frozen_weights_of_its_parts() -> None:
    first = build_model("frozen", frozen_body, {}, (3,), 4)
    chain = chain_models(first, build_model("second", partial(nn.Linear, 4, 2), {}, (4,), 2))
    assert set(chain.shapes()) == {"first.head.weight", "first.head.bias", "second.weight", "second.bias"}
    drawn = first.module().get_submodule("body").weight
    assert drawn.abs().max() > 0
    assert torch.equal(first.frozen_weights()["body.weight"], drawn)
    assert torch.equal(chain.frozen_weights()["first.body.weight"], drawn)


@cache
def shared_body() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False)


def with_shared_body() -> nn.Module:
    return nn.Sequential(OrderedDict(body=shared_body(), head=nn.Linear(2, 4)))


def test_skeleton_of_family_that_keeps_a_layer_leaves_its_weights() -> None:
    model = build_model("shared", with_shared_body, {}, (3,), 4)
    assert set(model.shapes()) == {"head.weight", "head.bias"}
    assert model.frozen_weights()["body.weight"].abs().max() > 0

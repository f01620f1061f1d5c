"""LeNets against their papers, their features, and narrow nets inside wide ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.footprints import find_footprint
from fedloom.models import MODELS, Model, StepSeeds, build_model, compute_cost
from fedloom.tensors import Tensors

SIZES = {"convs": (3, 4, 5), "kernels": (3, 3, 2), "pooled": 2, "hidden": (6, 7)}


def net_of(input_shape: tuple[int, int, int] = (2, 14, 14), classes: int = 4, **settings: Any) -> Model:
    return build_model("lenet", MODELS["lenet"], {**SIZES, **settings}, input_shape, classes)


def by_hand(w: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    """Feature maps with sides of 14, 12, 6, 4, 2 and 1 pixels."""
    for number in range(3):
        x = F.conv2d(x, w[f"convs.{number}.weight"], w[f"convs.{number}.bias"]).relu()
        x = F.max_pool2d(x, 2) if number < 2 else x
    x = x.flatten(1)
    for number in range(2):
        x = F.linear(x, w[f"hidden.{number}.weight"], w[f"hidden.{number}.bias"]).relu()
    return F.linear(x, w["classifier.weight"], w["classifier.bias"]), x


@pytest.mark.parametrize("step_seeds", [None, StepSeeds((0,))], ids=["judging", "training"])
def test_lenet_forward_matches_paper(
    step_seeds: StepSeeds | None, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = net_of()
    weights, x = block_weights(net, 1), torch.randn(1, 3, 2, 14, 14, dtype=torch.float64)
    logits, features = by_hand({name: tensor[0] for name, tensor in weights.items()}, x[0])
    result = net(weights, x, step_seeds)
    assert list(result.exits) == ["logits"]
    assert torch.allclose(result.logits[0], logits, atol=1e-10)
    assert torch.allclose(result.taps["features"][0], features, atol=1e-10)
    assert net.fallback_reasons() == ()


def test_lenet_without_hidden_layers_features_are_flat_map(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = net_of(convs=(3,), hidden=())
    weights, x = block_weights(net, 2), torch.randn(2, 3, 2, 14, 14, dtype=torch.float64)
    maps = F.conv2d(x[1], weights["convs.0.weight"][1], weights["convs.0.bias"][1])
    assert torch.allclose(net.features(weights, x)[1], F.max_pool2d(maps.relu(), 2).flatten(1), atol=1e-10)
    assert set(net.shapes()) == {"convs.0.weight", "convs.0.bias", "classifier.weight", "classifier.bias"}


def test_lenet_dropout_leaves_features_unchanged(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    """Dropout 0.6 keeps some of 40 units, scaled by 2.5."""
    settings = {"hidden": (40,), "convs": (3,)}
    net, still = net_of(**settings, dropout=0.6), net_of(**settings)
    weights, x = block_weights(net, 2), torch.randn(2, 50, 2, 14, 14, dtype=torch.float64)
    eye = torch.eye(40, dtype=torch.float64).expand(2, 40, 40)
    seen = {**weights, "classifier.weight": eye, "classifier.bias": torch.zeros(2, 40, dtype=torch.float64)}
    dropped, kept = net(seen, x, StepSeeds((1, 2))), still(seen, x, StepSeeds((1, 2)))
    assert torch.allclose(dropped.taps["features"], kept.taps["features"], atol=1e-12)
    survived = dropped.logits != 0
    assert torch.allclose(dropped.logits[survived], 2.5 * kept.logits[survived])
    assert 0.3 < float(survived[kept.logits != 0].double().mean()) < 0.5
    assert torch.equal(net(seen, x).logits, still(seen, x).logits)


def test_lenet_narrow_net_equals_wide_net_with_zeroed_units(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    """With several pixels per map: the columns of the first dense layer are ordered by channel. No unit is zero."""
    settings = {"convs": (3, 6), "hidden": (6, 7)}
    wide, narrow = net_of(**settings), net_of(**settings, width=0.5)
    assert tuple(wide.shapes()["hidden.0.weight"]) == (6, 6 * 4)
    assert tuple(narrow.shapes()["hidden.0.weight"]) == (3, 3 * 4)
    part = {name: tensor[0].abs() for name, tensor in block_weights(narrow, 1).items()}
    silence = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in wide.shapes().items()}
    whole = find_footprint(narrow.shapes(), wide.shapes()).write(silence, part)
    x = torch.rand(1, 3, 2, 14, 14, dtype=torch.float64)
    left, right = (
        net({name: tensor[None] for name, tensor in weights.items()}, x).logits
        for net, weights in ((narrow, part), (wide, whole))
    )
    assert torch.allclose(left, right, atol=1e-12)
    assert bool((narrow.features({name: tensor[None] for name, tensor in part.items()}, x) > 0).all())


def test_lenet_macs_match_hand_count() -> None:
    """5x5 convolutions on 32 and 14 pixels per side, then dense layers 1600 - 120 - 64 - 10."""
    actual = compute_cost(build_model("lenet", MODELS["lenet"], {}, (3, 32, 32), 10)).macs
    assert actual == 28**2 * 64 * 75 + 10**2 * 64 * 1600 + 1600 * 120 + 120 * 64 + 64 * 10


def test_lenet_rectangular_image_is_accepted() -> None:
    net = net_of((1, 14, 18))
    assert tuple(net.shapes()["hidden.0.weight"]) == (6, 5 * 1 * 2)
    net.check_output_size()


@pytest.mark.parametrize("side", [13, 4, 2])
def test_lenet_too_small_image_raises(side: int) -> None:
    with pytest.raises(ValueError, match=rf"nothing is left of images of \(14, {side}\)"):
        net_of((1, 14, side)).module()


def test_lenet_missing_kernel_raises() -> None:
    with pytest.raises(ValueError, match=r"3 convolutions .*\(3, 3\)"):
        net_of(kernels=(3, 3)).module()
    assert net_of(convs=(3, 4)).shapes() == net_of(convs=(3, 4), kernels=(3, 3)).shapes()

"""FedHeN's net: against kuangliu's layers, its exit, and the simple net inside the complex one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.footprints import find_footprint
from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.models.layers import fold, unfold
from fedloom.models.preactresnet import MixedPool
from fedloom.tensors import Tensors

SIZES = {"hidden": (4, 6, 8), "blocks": (2, 1, 2), "exit_after": 2}


def net_of(input_shape: tuple[int, int, int] = (3, 16, 16), classes: int = 5, **settings: Any) -> Model:
    return build_model("preactresnet", MODELS["preactresnet"], {**SIZES, **settings}, input_shape, classes)


def norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    return F.group_norm(x, 2, w[f"{name}.1.weight"], w[f"{name}.1.bias"])


def block(w: Tensors, name: str, x: Tensor, stride: int) -> Tensor:
    active = F.relu(norm(w, f"{name}.norm1", x))
    short = F.conv2d(active, w[f"{name}.shortcut.weight"], stride=stride) if f"{name}.shortcut.weight" in w else x
    result = F.conv2d(active, w[f"{name}.conv1.weight"], stride=stride, padding=1)
    return F.conv2d(F.relu(norm(w, f"{name}.norm2", result)), w[f"{name}.conv2.weight"], padding=1) + short


def by_hand(w: Tensors, x: Tensor) -> dict[str, Tensor]:
    """No norm before the classifier; the exit pools 8 x 8 maps to 4 x 4."""
    x = block(w, "stages.0.1", block(w, "stages.0.0", F.conv2d(x, w["stem.weight"], padding=1), 1), 1)
    x = block(w, "stages.1.0", x, 2)
    alpha = w["exit.pool.maximum"]
    pooled = alpha * F.max_pool2d(x, 2) + (1 - alpha) * F.avg_pool2d(x, 2)
    early = F.linear(pooled.flatten(1), w["exit.classifier.weight"], w["exit.classifier.bias"])
    x = block(w, "stages.2.1", block(w, "stages.2.0", x, 2), 1)
    return {"exit": early, "full": F.linear(x.mean((2, 3)), w["classifier.weight"], w["classifier.bias"])}


@pytest.mark.parametrize("step_seeds", [None, StepSeeds((0,))], ids=["judging", "training"])
def test_preactresnet_forward_matches_paper(
    step_seeds: StepSeeds | None, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = net_of()
    weights, x = block_weights(net, 1), torch.randn(1, 3, 3, 16, 16, dtype=torch.float64)
    expected = by_hand({name: tensor[0] for name, tensor in weights.items()}, x[0])
    result = net(weights, x, step_seeds)
    assert list(result.exits) == ["exit", "full"]
    for name, logits in result.exits.items():
        assert torch.allclose(logits[0], expected[name], atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "exits", "stages", "features"),
    [
        ({}, ["exit", "full"], 3, 8),
        ({"stages": 2}, ["exit"], 2, 96),
        ({"stages": 2, "exit_pool": "global"}, ["exit"], 2, 6),
        ({"exit_after": 0}, ["full"], 3, 8),
        ({"exit_after": 3}, ["exit"], 3, 128),
    ],
)
def test_preactresnet_exits_and_taps_are_named(
    settings: dict[str, Any],
    exits: list[str],
    stages: int,
    features: int,
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = net_of(**settings)
    result = net(block_weights(net, 2), torch.randn(2, 3, 3, 16, 16, dtype=torch.float64))
    assert list(result.exits) == exits
    assert set(result.taps) == {f"stage{number + 1}" for number in range(stages)} | {"features"}
    assert tuple(result.taps["features"].shape) == (2, 3, features)
    heads = {"exit": "exit.classifier", "full": "classifier"}
    assert net.label_rows() == tuple(f"{heads[name]}.{key}" for name in exits for key in ("weight", "bias"))
    assert net.fallback_reasons() == ()


@pytest.mark.parametrize("exit_pool", ["four", "global"])
def test_preactresnet_simple_net_nests_in_complex_net(
    exit_pool: str, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    simple, complex_ = net_of(exit_pool=exit_pool, stages=2), net_of(exit_pool=exit_pool)
    assert simple.shapes().items() <= complex_.shapes().items()
    weights, x = block_weights(complex_, 1), torch.randn(1, 3, 3, 16, 16, dtype=torch.float64)
    part = find_footprint(simple.shapes(), complex_.shapes()).read(weights)
    assert torch.allclose(simple(part, x).logits, complex_(weights, x).exits["exit"], atol=1e-12)


def test_preactresnet_exit_loss_has_gradient_only_in_simple_net(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = net_of()
    leaves = {name: tensor.requires_grad_() for name, tensor in block_weights(net, 1).items()}
    result = net(leaves, torch.randn(1, 3, 3, 16, 16, dtype=torch.float64), StepSeeds((0,))).exits["exit"].sin().sum()
    gradients = torch.autograd.grad(result, list(leaves.values()), materialize_grads=True)
    moved = {name for name, gradient in zip(leaves, gradients, strict=True) if bool(gradient.any())}
    assert moved == set(net_of(stages=2).shapes())


@pytest.mark.parametrize(
    ("image", "exit_after", "window", "features"),
    [
        (32, 2, (4, 4), 16),
        (28, 2, (3, 3), 16),
        (28, 1, (7, 7), 16),
        (6, 2, (1, 1), 9),  # too small for four by four
        (2, 2, (1, 1), 1),
        (1, 1, (1, 1), 1),
    ],
)
def test_preactresnet_exit_pools_to_four_by_four(
    image: int, exit_after: int, window: tuple[int, int], features: int
) -> None:
    net = net_of((1, image, image), exit_after=exit_after)
    assert net.module().get_submodule("exit.pool").window == window
    assert tuple(net.shapes()["exit.classifier.weight"]) == (5, SIZES["hidden"][exit_after - 1] * features)  # type: ignore[index]
    net.check_output_size()


def test_preactresnet_rectangular_image_is_accepted() -> None:
    net = net_of((1, 32, 28))
    assert net.module().get_submodule("exit.pool").window == (4, 3)
    net.check_output_size()
    net_of((1, 32, 28), exit_pool="global").check_output_size()


def test_mixed_pool_matches_hand_computed_example() -> None:
    pool = MixedPool((2, 2))
    pool.maximum.data = torch.tensor([0.25])
    assert pool(torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])).item() == 3.75


def test_mixed_pool_block_uses_proportion_of_each_device() -> None:
    pool, x = MixedPool((2, 2)), torch.randn(3, 4, 2, 6, 6)
    shares = torch.tensor([[0.0], [0.3], [1.0]])
    pool._parameters["maximum"] = shares  # type: ignore[assignment]
    result = unfold(pool(fold(x)), 3)
    for device, share in enumerate(shares.flatten().tolist()):
        expected = share * F.max_pool2d(x[device], 2) + (1 - share) * F.avg_pool2d(x[device], 2)
        assert torch.allclose(result[device], expected, atol=1e-6)


def test_mixed_pool_initial_proportion_is_between_mean_and_maximum() -> None:
    drawn = [float(net_of().initial_weights(seed)["exit.pool.maximum"]) for seed in range(20)]
    assert all(0 <= share <= 1 for share in drawn)
    assert min(drawn) < 0.3 < 0.7 < max(drawn)


@pytest.mark.parametrize("settings", [{"stages": 1}, {"stages": 4}, {"exit_after": 4}, {"exit_after": 0, "stages": 2}])
def test_preactresnet_impossible_depth_raises(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ends at its exit"):
        net_of(**settings).module()


def test_preactresnet_groups_fit_odd_slices_and_scaler_is_off_by_default() -> None:
    for name, part in net_of(width=0.5, widest=1.0).module().named_modules():
        if name.endswith(("norm1.1", "norm2.1")):
            assert (part.num_groups, part.num_channels) in {(2, 2), (1, 3), (2, 4)}
        if name.endswith(("norm1.0", "norm2.0")):
            assert part.rate == 1.0
    scaled = net_of(width=0.5, widest=1.0, scaler=True).module()
    assert scaled.get_submodule("stages.0.0.norm1.0").rate == 0.5


def test_preactresnet_narrow_exit_has_columns_of_its_channels() -> None:
    wide, narrow = net_of(), net_of(width=0.5)
    columns = torch.arange(6 * 16).expand(5, -1)
    own = find_footprint(narrow.shapes(), wide.shapes()).read(
        {**wide.initial_weights(0), "exit.classifier.weight": columns}
    )
    assert own["exit.classifier.weight"][0].tolist() == list(range(3 * 16))  # channel by channel, 4 x 4 each

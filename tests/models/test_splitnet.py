"""FedIN's nets against the paper, their three children, and smaller nets inside the largest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import MODELS, Model, StepSeeds, build_model, compute_cost
from fedloom.tensors import Tensors

PARTS = ("extractor", "intermediate", "classifier")


def net_of(input_shape: tuple[int, int, int] = (2, 12, 12), classes: int = 4, **settings: Any) -> Model:
    return build_model("splitnet", MODELS["splitnet"], {"channels": 2, **settings}, input_shape, classes)


def images(net: Model, devices: int = 1, batch: int = 5) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(devices, batch, *net.input_shape, generator=draw, dtype=torch.float64)


def norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    """With the batch's statistics."""
    return F.batch_norm(x, None, None, w[f"{name}.1.weight"], w[f"{name}.1.bias"], training=True)


def conv(w: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    weight = w[f"{name}.weight"]
    return F.conv2d(x, weight, w.get(f"{name}.bias"), stride, padding=weight.shape[-1] // 2)


def block(w: Tensors, name: str, x: Tensor, stride: int = 1) -> Tensor:
    result = F.relu(norm(w, f"{name}.norm1", conv(w, f"{name}.conv1", x, stride)))
    result = norm(w, f"{name}.norm2", conv(w, f"{name}.conv2", result))
    if f"{name}.shortcut.0.weight" in w:
        x = norm(w, f"{name}.shortcut.1", conv(w, f"{name}.shortcut.0", x, stride))
    return F.relu(result + x)


def by_hand(w: Tensors, x: Tensor, blocks: tuple[tuple[int, ...], ...]) -> dict[str, Tensor]:
    """`blocks` are the positions of the blocks that each stage applies in turn."""
    x = F.relu(norm(w, "extractor.1", conv(w, "extractor.0", x)))
    result = {"extractor": F.max_pool2d(x, 3, 2, padding=1)}
    x = result["extractor"]
    for number, positions in enumerate(blocks):
        for position in positions:
            x = block(w, f"intermediate.stages.{number}.{position}", x, 2 if number and not position else 1)
    result["features"] = F.adaptive_avg_pool2d(x, 1).flatten(1)
    result["logits"] = F.linear(result["features"], w["classifier.weight"], w["classifier.bias"])
    return result


@pytest.mark.parametrize("conv_bias", [True, False])
@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"extra": (2, 3)}, ((0, 1, 2), (0, 1, 2, 3), (0,))),
        ({"extra": (0, 1)}, ((0,), (0, 1), (0,))),
        ({"extra": (2, 3), "tied": True}, ((0, 1, 1), (0, 1, 1, 1), (0,))),
        ({"extra": (0, 0), "tied": True}, ((0,), (0,), (0,))),
    ],
)
def test_splitnet_forward_matches_paper(
    settings: dict[str, Any],
    blocks: tuple[tuple[int, ...], ...],
    conv_bias: bool,
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = net_of(**settings, conv_bias=conv_bias)
    weights = block_weights(net, 1)
    x = images(net)
    expected = by_hand({name: tensor[0] for name, tensor in weights.items()}, x[0], blocks)
    result = net(weights, x, StepSeeds((0,)))
    assert list(result.exits) == ["logits"] and list(result.taps) == ["extractor", "features"]
    for name, tensor in {**result.exits, **result.taps}.items():
        assert torch.allclose(tensor[0], expected[name], atol=1e-9)
    assert net.fallback_reasons() == ()


def statistics_of(net: Model, weights: Tensors, x: Tensor) -> dict[str, Tensor]:
    return {**weights, **net.batch_statistics(weights, x)}


@pytest.mark.parametrize("pool", ["intermediate", "classifier"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_splitnet_chained_children_equal_whole_net(
    pool: str, training: bool, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """In blocks, and in evaluation with the statistics of each child's norms."""
    net = net_of(pool=pool)
    step_seeds, x = StepSeeds((0, 0, 0)) if training else None, images(net, 3)
    weights = statistics_of(net, block_weights(net, 3), x)
    expected, result = net(weights, x, step_seeds), x
    for name, tap in zip(PARTS, ("extractor", "features", ""), strict=True):
        result = net.submodel(name)(net.submodel_weights(name, weights), result, step_seeds).logits
        assert torch.allclose(result, expected.taps[tap] if tap else expected.logits, atol=1e-10)
    assert all(net.submodel(name).fallback_reasons() == () for name in PARTS)


def test_splitnet_pool_changes_only_classifier_input(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    early, late = net_of(pool="intermediate"), net_of(pool="classifier")
    assert dict(early.shapes()) == dict(late.shapes())
    assert early.label_rows() == late.label_rows() == ("classifier.weight", "classifier.bias")
    weights, x = block_weights(early, 2), images(early, 2)
    left, right = (net(weights, x, StepSeeds((0, 0))) for net in (early, late))
    assert torch.equal(left.logits, right.logits)
    assert tuple(left.taps["features"].shape) == (2, 5, 32)
    assert tuple(right.taps["features"].shape) == (2, 5, 32, 2, 2)
    assert (early.submodel("classifier").input_shape, late.submodel("classifier").input_shape) == ((32,), (32, 2, 2))
    assert compute_cost(early) == compute_cost(late)


def test_splitnet_smaller_nets_nest_in_largest() -> None:
    largest = net_of(extra=(2, 3)).shapes().items()
    for extra in [(2, 1), (2, 2), (1, 3), (1, 1), (0, 0)]:
        assert net_of(extra=extra).shapes().items() < largest


def test_splitnet_tied_blocks_share_weights(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    """The same as untied blocks with equal weights, at the same cost."""
    tied, untied = (net_of(extra=(2, 3), tied=one) for one in (True, False))
    assert dict(tied.shapes()) == dict(net_of(extra=(1, 1)).shapes())
    weights, x = block_weights(tied, 1), images(tied)
    copied = {name: weights.get(name, weights.get(first_of(name), torch.empty(0))) for name in untied.shapes()}
    left, right = tied(weights, x, StepSeeds((0,))).logits, untied(copied, x, StepSeeds((0,))).logits
    assert torch.allclose(left, right, atol=1e-10)
    assert compute_cost(tied).macs == compute_cost(untied).macs > compute_cost(net_of(extra=(1, 1))).macs


def first_of(name: str) -> str:
    """intermediate.stages.1.3.norm1.1.weight -> intermediate.stages.1.1.norm1.1.weight"""
    pieces = name.split(".")
    return ".".join([*pieces[:3], "1", *pieces[4:]])


@pytest.mark.parametrize("devices", [1, 3])
def test_splitnet_tied_norm_statistics_are_mean_over_applications(
    devices: int, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """Compared with torch's batch norm with a cumulative average over the same batches."""
    net = net_of(extra=(2, 3), tied=True)
    weights, x = block_weights(net, devices), images(net, devices)
    actual = net.batch_statistics(weights, x)
    assert actual.keys() == net.statistics().keys()
    module = net.module().double().train()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None
            part.reset_running_stats()
    module.load_state_dict({name: tensor[-1] for name, tensor in weights.items()}, strict=False)
    module(x[-1])
    for name, tensor in actual.items():
        assert torch.allclose(tensor[-1], module.state_dict()[name], atol=1e-10), name


@pytest.mark.parametrize("side", [6, 7, 12, 32])
def test_splitnet_any_image_size_gives_one_vector(side: int, block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = net_of((1, side, side))
    net.check_output_size()
    assert tuple(net.features(block_weights(net, 2), images(net, 2)).shape) == (2, 5, 32)


def test_splitnet_macs_match_hand_count() -> None:
    """Net E on 32 x 32 images: maps of 16, 8 and 4 pixels per side."""
    first = [(64, 64, 256, 16), (256, 128, 512, 8), (512, 256, 1024, 4)]
    macs = 32**2 * 64 * 27 + 1024 * 10
    macs += sum(side**2 * (before * (middle + after) + middle * 9 * after) for before, middle, after, side in first)
    macs += 16**2 * (256 * 64 + 64 * 9 * 256) + 8**2 * (512 * 128 + 128 * 9 * 512)
    assert compute_cost(net_of((3, 32, 32), 10, channels=64, extra=(1, 1))).macs == macs


def test_splitnet_width_scales_every_layer() -> None:
    half = {name: tuple(shape) for name, shape in net_of(channels=4, width=0.5).shapes().items()}
    assert half == {name: tuple(shape) for name, shape in net_of(channels=2).shapes().items()}


def test_splitnet_scaler_is_off_by_default(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    plain, scaled = (net_of(width=0.5, normalization="none", scaler=scaler) for scaler in (False, True))
    weights, x = block_weights(plain, 1), images(plain)
    extracted = [net(weights, x, StepSeeds((0,))).taps["extractor"] for net in (plain, scaled)]
    assert torch.allclose(2 * extracted[0], extracted[1])
    assert torch.equal(plain(weights, x, StepSeeds((0,))).logits, plain(weights, x).logits)

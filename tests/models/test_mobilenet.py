"""FedSup's supernet: a subnet equals the whole net with its weights sliced on the fly."""

import math
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.footprints import Footprint, centered, find_footprint, is_submodel
from fedloom.models import MODELS, SPACES, Model, StepSeeds, build_model, compute_cost, make_space
from fedloom.seeds import generator
from fedloom.tensors import Tensors

Architecture = dict[str, Any]
# the released space with an eighth of the channels
SMALL_SPACE = {**SPACES["code"], "widths": ((4, 8), (8, 16), (16, 32), (64, 128))}


def net_of(input_shape: tuple[int, int, int] = (3, 32, 32), classes: int = 10, **settings: Any) -> Model:
    return build_model("mobilenet", MODELS["mobilenet"], settings, input_shape, classes)


def whole_net(**settings: Any) -> Model:
    return net_of(**{"stem": 4, "widths": (8, 16, 32, 128), **settings})


def any_architecture(draw: random.Random) -> Architecture:
    return {name: tuple(draw.choice(allowed) for allowed in stages) for name, stages in SMALL_SPACE.items()}


def any_layered_architecture(draw: random.Random) -> Architecture:
    """Width and kernel per block, up to two blocks per stage."""
    result = {
        name: tuple((draw.choice(allowed), draw.choice(allowed)) for allowed in SMALL_SPACE[name])
        for name in ("widths", "kernels")
    }
    return {**any_architecture(draw), **result}


def of_block(choice: int | tuple[int, ...], position: int) -> int:
    return choice if isinstance(choice, int) else choice[position]


def dynamic_norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    gamma, alpha, beta = (w[f"{name}.1.{key}"][: x.shape[1]].view(1, -1, 1, 1) for key in ("weight", "shift", "bias"))
    root = (x - alpha).pow(2).mean((0, 2, 3), keepdim=True).sqrt()
    return gamma * (x - alpha) / (root + 1e-8) + beta


def dynamic(w: Tensors, x: Tensor, architecture: Architecture) -> Tensor:
    """The supernet with the largest weights, sliced in every layer to the architecture."""
    x = F.relu6(dynamic_norm(w, "stem.1", F.conv2d(x, w["stem.0.weight"], stride=2, padding=1)))
    for number, depth in enumerate(architecture["depths"]):
        for position in range(depth):
            name, before = f"stages.{number}.{position}", x.shape[1]
            after = of_block(architecture["widths"][number], position)
            side = of_block(architecture["kernels"][number], position)
            stride, crop = 2 if number and not position else 1, slice(3 - side // 2, 3 + side // 2 + 1)
            kernel = w[f"{name}.depthwise.weight"][:before, :, crop, crop]
            result = F.conv2d(x, kernel, stride=stride, padding=side // 2, groups=before)
            result = F.relu6(dynamic_norm(w, f"{name}.norm1", result))
            result = dynamic_norm(w, f"{name}.norm2", F.conv2d(result, w[f"{name}.pointwise.weight"][:after, :before]))
            short = F.avg_pool2d(x, 2) if stride == 2 else x
            if before != after:
                short = F.conv2d(short, w[f"{name}.shortcut.weight"][:after, :before])
            x = result + short
    features = x.mean((2, 3))
    return F.linear(features, w["classifier.weight"][:, : features.shape[1]], w["classifier.bias"])


def part_of(small: Model, large: Model) -> Footprint:
    footprint = find_footprint(small.shapes(), large.shapes(), centered)
    assert footprint.blocks.keys() == small.shapes().keys()  # no weight of a subnet is missing in the supernet
    return footprint


def assert_cut_out_is_dynamic(whole: Model, weights: Tensors, architecture: Architecture) -> None:
    sub_net = whole.with_settings(**architecture, spare_shortcuts=False)
    x = torch.randn(1, 3, 3, 32, 32, dtype=torch.float64)
    own = part_of(sub_net, whole).read(weights)
    by_slicing = dynamic({name: tensor[0] for name, tensor in weights.items()}, x[0], architecture)
    for step_seeds in (None, StepSeeds((0,))):
        assert torch.allclose(sub_net(own, x, step_seeds).logits[0], by_slicing, atol=1e-10)


@pytest.mark.slow
def test_mobilenet_hundred_subnets_match_dynamic_net(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    draw, whole = random.Random(0), whole_net()
    weights = block_weights(whole, 1)
    for _ in range(100):
        assert_cut_out_is_dynamic(whole, weights, any_architecture(draw))


def test_mobilenet_widths_per_layer_need_spare_shortcuts(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    draw, whole = random.Random(1), whole_net(spare_shortcuts=True)
    weights = block_weights(whole, 1)
    architectures = [any_layered_architecture(draw) for _ in range(20)]
    for architecture in architectures:
        assert_cut_out_is_dynamic(whole, weights, architecture)
    lacking = whole_net().shapes()
    assert any(
        not whole.with_settings(**one, spare_shortcuts=False).shapes().keys() <= lacking.keys() for one in architectures
    )


def test_mobilenet_kernels_per_layer_need_no_spare_shortcuts(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    whole = whole_net()
    architecture = {"widths": (8, 16, 32, 128), "depths": (1, 2, 2, 2), "kernels": (3, (7, 5), (3, 7), 5)}
    assert_cut_out_is_dynamic(whole, block_weights(whole, 1), architecture)


def test_mobilenet_spare_shortcuts_leave_outputs_unchanged(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    plain, spare = whole_net(), whole_net(spare_shortcuts=True)
    weights, x = block_weights(spare, 2), torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)
    assert spare.shapes().keys() - plain.shapes().keys() == {f"stages.{n}.1.shortcut.weight" for n in (1, 2, 3)}
    assert torch.equal(spare(weights, x).logits, plain({name: weights[name] for name in plain.shapes()}, x).logits)
    assert spare.fallback_reasons() == ()


@pytest.mark.parametrize(("space", "size"), [("code", 10_368), ("paper", 15_552)])
def test_mobilenet_space_counts_match_paper(space: str, size: int) -> None:
    choices = [list(product(*stages)) for stages in SPACES[space].values()]
    assert len(set(product(*choices))) == math.prod(map(len, choices)) == size


@pytest.mark.parametrize("space", SPACES)
def test_mobilenet_largest_subnet_is_default_size(space: str) -> None:
    largest = {name: tuple(max(allowed) for allowed in stages) for name, stages in SPACES[space].items()}
    assert dict(net_of(**largest).shapes()) == dict(net_of().shapes())


def test_mobilenet_small_kernel_is_center_of_large_kernel() -> None:
    large, small = (net_of(widths=(1,), depths=(1,), kernels=(side,), stem=1) for side in (7, 3))
    name = "stages.0.0.depthwise.weight"
    numbered = {**large.initial_weights(0), name: torch.arange(49).view(1, 1, 7, 7)}
    assert part_of(small, large).read(numbered)[name][0, 0].tolist() == [[16, 17, 18], [23, 24, 25], [30, 31, 32]]


@pytest.mark.parametrize(
    "chain",
    [
        [{"kernels": (side,) * 4} for side in (7, 5, 3)],
        [{"widths": widths} for widths in ((8, 16, 32, 128), (4, 16, 32, 64), (4, 8, 16, 64))],
        [{"depths": depths} for depths in ((1, 2, 2, 2), (1, 1, 2, 1), (1, 1, 1, 1))],
        [{"width": width, "widest": 1.0} for width in (1.0, 0.5, 0.25)],
    ],
    ids=["kernel", "width", "depth", "share"],
)
def test_mobilenet_subnet_of_subnet_is_subnet(chain: list[dict[str, Any]]) -> None:
    large, middle, small = (whole_net(**settings) for settings in chain)
    weights = large.initial_weights(0)
    in_two_steps = part_of(small, middle).read(part_of(middle, large).read(weights))
    at_once = part_of(small, large).read(weights)
    assert all(torch.equal(tensor, in_two_steps[name]) for name, tensor in at_once.items())


def test_mobilenet_subnet_with_shortcut_fits_only_with_spare_shortcuts() -> None:
    """The larger of two subnets may lack weights of the smaller one, although the supernet has both."""
    even, uneven = whole_net(widths=(8, 8, 16, 128)), whole_net(widths=(4, 8, 16, 64))
    assert uneven.shapes().keys() - even.shapes().keys() == {"stages.1.0.shortcut.weight"}
    part_of(uneven, even.with_settings(spare_shortcuts=True))


def test_mobilenet_larger_choice_costs_more() -> None:
    draw = random.Random(2)
    for _ in range(8):
        architecture = any_architecture(draw)
        macs = compute_cost(whole_net(**architecture)).macs
        for name, stages in SMALL_SPACE.items():
            for number, allowed in enumerate(stages):
                larger = [size for size in allowed if size > architecture[name][number]]
                if larger:
                    chosen = list(architecture[name])
                    chosen[number] = larger[0]
                    assert compute_cost(whole_net(**{**architecture, name: tuple(chosen)})).macs > macs


def test_mobilenet_block_starts_as_its_shortcut() -> None:
    block = whole_net().module().get_submodule("stages.1.1").double()
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("normalization", ["parametric", "static_batch", "none"])
def test_mobilenet_initial_gradient_is_finite(normalization: str) -> None:
    net = whole_net(normalization=normalization)
    leaves = {name: tensor[None].requires_grad_() for name, tensor in net.initial_weights(0).items()}
    x = torch.zeros(1, 2, 3, 32, 32)  # all pixels equal
    gradients = torch.autograd.grad(net(leaves, x, StepSeeds((0,))).logits.exp().sum(), list(leaves.values()))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_mobilenet_taps_include_every_block(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = whole_net(depths=(1, 2, 1, 1))
    taps = net(block_weights(net, 2), torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)).taps
    assert {name: tuple(tap.shape) for name, tap in taps.items()} == {
        "stage1.block1": (2, 3, 8, 16, 16),
        "stage2.block1": (2, 3, 16, 8, 8),
        "stage2.block2": (2, 3, 16, 8, 8),
        "stage3.block1": (2, 3, 32, 4, 4),
        "stage4.block1": (2, 3, 128, 2, 2),
        "features": (2, 3, 128),
    }


@pytest.mark.parametrize("side", [1, 2, 5, 6, 28])
def test_mobilenet_odd_map_rounds_up(side: int) -> None:
    whole_net(input_shape=(1, side, side)).check_output_size()


def test_mobilenet_missing_block_setting_raises() -> None:
    with pytest.raises(ValueError, match=r"2 blocks .*\(5,\)"):
        whole_net(kernels=(7, (5,), 7, 7)).module()


def test_mobilenet_kernels_per_block_can_be_sampled() -> None:
    whole = build_model("mobilenet", MODELS["mobilenet"], {}, (3, 32, 32), 10)
    nets, draw = make_space(SPACES["paper_by_layer"]), generator(0, "by layer")
    assert dict(nets.smallest(whole).settings)["kernels"] == ((3,), (3, 3), (3, 3), (3, 3))
    assert compute_cost(nets.largest(whole)) == compute_cost(whole)
    drawn = [nets.sample(whole, draw) for _ in range(10)]
    assert nets.count() == 3 * 9**3 * 2**3 * 2**3 * 3
    assert any(len(set(kernels)) > 1 for net in drawn for kernels in dict(net.settings)["kernels"])
    assert all(is_submodel(net.shapes(), whole.shapes()) for net in drawn)

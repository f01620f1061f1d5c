"""FedSup's supernet: a sub-net cut out of it is what the whole net makes with its weights sliced on the fly."""

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
    """Width and kernel block by block, of up to two in a stage."""
    made = {
        name: tuple((draw.choice(allowed), draw.choice(allowed)) for allowed in SMALL_SPACE[name])
        for name in ("widths", "kernels")
    }
    return {**any_architecture(draw), **made}


def of_block(choice: int | tuple[int, ...], position: int) -> int:
    return choice if isinstance(choice, int) else choice[position]


def dynamic_norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    gamma, alpha, beta = (w[f"{name}.1.{key}"][: x.shape[1]].view(1, -1, 1, 1) for key in ("weight", "shift", "bias"))
    root = (x - alpha).pow(2).mean((0, 2, 3), keepdim=True).sqrt()
    return gamma * (x - alpha) / (root + 1e-8) + beta


def dynamic(w: Tensors, x: Tensor, architecture: Architecture) -> Tensor:
    """The supernet with weights of the largest size, cut in every layer to the architecture's."""
    x = F.relu6(dynamic_norm(w, "stem.1", F.conv2d(x, w["stem.0.weight"], stride=2, padding=1)))
    for number, depth in enumerate(architecture["depths"]):
        for position in range(depth):
            name, before = f"stages.{number}.{position}", x.shape[1]
            after = of_block(architecture["widths"][number], position)
            side = of_block(architecture["kernels"][number], position)
            stride, crop = 2 if number and not position else 1, slice(3 - side // 2, 3 + side // 2 + 1)
            kernel = w[f"{name}.depthwise.weight"][:before, :, crop, crop]
            made = F.conv2d(x, kernel, stride=stride, padding=side // 2, groups=before)
            made = F.relu6(dynamic_norm(w, f"{name}.norm1", made))
            made = dynamic_norm(w, f"{name}.norm2", F.conv2d(made, w[f"{name}.pointwise.weight"][:after, :before]))
            short = F.avg_pool2d(x, 2) if stride == 2 else x
            if before != after:
                short = F.conv2d(short, w[f"{name}.shortcut.weight"][:after, :before])
            x = made + short
    features = x.mean((2, 3))
    return F.linear(features, w["classifier.weight"][:, : features.shape[1]], w["classifier.bias"])


def part_of(small: Model, large: Model) -> Footprint:
    footprint = find_footprint(small.shapes(), large.shapes(), centered)
    assert footprint.blocks.keys() == small.shapes().keys()  # no weight of a sub-net is missing in the supernet
    return footprint


def assert_cut_out_is_dynamic(whole: Model, weights: Tensors, architecture: Architecture) -> None:
    sub_net = whole.with_settings(**architecture, spare_shortcuts=False)
    x = torch.randn(1, 3, 3, 32, 32, dtype=torch.float64)
    own = part_of(sub_net, whole).read(weights)
    by_slicing = dynamic({name: tensor[0] for name, tensor in weights.items()}, x[0], architecture)
    for step_seeds in (None, StepSeeds((0,))):
        assert torch.allclose(sub_net(own, x, step_seeds).logits[0], by_slicing, atol=1e-10)


@pytest.mark.slow
def test_a_hundred_architectures_cut_out_are_the_dynamic_net(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    draw, whole = random.Random(0), whole_net()
    weights = block_weights(whole, 1)
    for _ in range(100):
        assert_cut_out_is_dynamic(whole, weights, any_architecture(draw))


def test_architectures_layer_by_layer_need_the_spare_shortcuts(
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


def test_kernels_layer_by_layer_need_no_spare_shortcuts(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    whole = whole_net()
    architecture = {"widths": (8, 16, 32, 128), "depths": (1, 2, 2, 2), "kernels": (3, (7, 5), (3, 7), 5)}
    assert_cut_out_is_dynamic(whole, block_weights(whole, 1), architecture)


def test_spare_shortcuts_change_nothing_that_is_made(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    plain, spare = whole_net(), whole_net(spare_shortcuts=True)
    weights, x = block_weights(spare, 2), torch.randn(2, 3, 3, 32, 32, dtype=torch.float64)
    assert spare.shapes().keys() - plain.shapes().keys() == {f"stages.{n}.1.shortcut.weight" for n in (1, 2, 3)}
    assert torch.equal(spare(weights, x).logits, plain({name: weights[name] for name in plain.shapes()}, x).logits)
    assert spare.fallback_reasons() == ()


@pytest.mark.parametrize(("space", "size"), [("code", 10_368), ("paper", 15_552)])
def test_how_many_sub_nets_there_are(space: str, size: int) -> None:
    choices = [list(product(*stages)) for stages in SPACES[space].values()]
    assert len(set(product(*choices))) == math.prod(map(len, choices)) == size


@pytest.mark.parametrize("space", SPACES)
def test_the_largest_of_a_space_is_the_family_as_it_is(space: str) -> None:
    largest = {name: tuple(max(allowed) for allowed in stages) for name, stages in SPACES[space].items()}
    assert dict(net_of(**largest).shapes()) == dict(net_of().shapes())


def test_a_smaller_kernel_is_the_middle_of_the_larger() -> None:
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
def test_sub_nets_of_sub_nets_are_sub_nets(chain: list[dict[str, Any]]) -> None:
    large, middle, small = (whole_net(**settings) for settings in chain)
    weights = large.initial_weights(0)
    in_two_steps = part_of(small, middle).read(part_of(middle, large).read(weights))
    at_once = part_of(small, large).read(weights)
    assert all(torch.equal(tensor, in_two_steps[name]) for name, tensor in at_once.items())


def test_a_net_without_a_shortcut_holds_one_that_needs_it_only_with_a_spare() -> None:
    """Of two sub-nets the larger may lack what the smaller has, although the supernet holds both."""
    even, uneven = whole_net(widths=(8, 8, 16, 128)), whole_net(widths=(4, 8, 16, 64))
    assert uneven.shapes().keys() - even.shapes().keys() == {"stages.1.0.shortcut.weight"}
    part_of(uneven, even.with_settings(spare_shortcuts=True))


def test_a_larger_choice_costs_more() -> None:
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


def test_a_block_starts_as_its_shortcut() -> None:
    block = whole_net().module().get_submodule("stages.1.1").double()
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("normalization", ["parametric", "static_batch", "none"])
def test_the_first_step_has_a_finite_gradient(normalization: str) -> None:
    net = whole_net(normalization=normalization)
    leaves = {name: tensor[None].requires_grad_() for name, tensor in net.initial_weights(0).items()}
    x = torch.zeros(1, 2, 3, 32, 32)  # not even a pixel differs
    slopes = torch.autograd.grad(net(leaves, x, StepSeeds((0,))).logits.exp().sum(), list(leaves.values()))
    assert all(bool(slope.isfinite().all()) for slope in slopes)


def test_taps_of_every_block(block_weights: Callable[..., dict[str, Tensor]]) -> None:
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
def test_maps_of_odd_size_round_up(side: int) -> None:
    whole_net(input_shape=(1, side, side)).check_output_size()


def test_a_stage_must_say_something_of_every_block() -> None:
    with pytest.raises(ValueError, match=r"2 blocks .*\(5,\)"):
        whole_net(kernels=(7, (5,), 7, 7)).module()
    with pytest.raises(ValueError, match="zip"):
        whole_net(kernels=(7, 7, 7)).module()


def test_kernels_can_be_drawn_block_by_block() -> None:
    whole = build_model("mobilenet", MODELS["mobilenet"], {}, (3, 32, 32), 10)
    nets, draw = make_space(SPACES["paper_by_layer"]), generator(0, "by layer")
    assert dict(nets.smallest(whole).settings)["kernels"] == ((3,), (3, 3), (3, 3), (3, 3))
    assert compute_cost(nets.largest(whole)) == compute_cost(whole)
    drawn = [nets.sample(whole, draw) for _ in range(10)]
    assert nets.count() == 3 * 9**3 * 2**3 * 2**3 * 3
    assert any(len(set(kernels)) > 1 for net in drawn for kernels in dict(net.settings)["kernels"])
    assert all(is_submodel(net.shapes(), whole.shapes()) for net in drawn)

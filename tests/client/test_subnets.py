"""Subnets drawn step by step and trained through the whole net they are parts of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.client import Batch, Schedule, draw_plan, draw_subnets, gradient, merge_plans, subnet_logits, subnets
from fedloom.data import Examples, Preparation
from fedloom.footprints import subnet_footprint
from fedloom.models import Model, StepSeeds, build_model
from fedloom.models.lanes import lay_out, read_parts
from fedloom.seeds import generator
from fedloom.tensors import Tensors

Weights = Callable[..., dict[str, Tensor]]


def lottery(draw: np.random.Generator) -> Any:
    """Stands for a net: which of very many was drawn."""
    return int(draw.integers(2**40))


steps = st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=5, unique=True)


@given(seeds=steps, common=st.integers(0, 2**62 - 1), data=st.data())
def test_draw_subnets_device_stream_ignores_the_block(seeds: list[int], common: int, data: st.DataObject) -> None:
    together = draw_subnets(lottery, StepSeeds(tuple(seeds), common), "device")
    alone = [draw_subnets(lottery, StepSeeds((seed,), data.draw(st.integers(0, 9))), "device") for seed in seeds]
    assert [[one] for one in together] == alone
    assert len(set(together)) == len(seeds)


@given(seeds=steps, others=steps, common=st.integers(0, 2**62 - 1))
def test_draw_subnets_shared_stream_depends_only_on_the_step(seeds: list[int], others: list[int], common: int) -> None:
    mine, theirs = (draw_subnets(lottery, StepSeeds(tuple(each), common), "shared") for each in (seeds, others))
    assert mine == theirs
    assert len(mine) == 1
    assert mine != draw_subnets(lottery, StepSeeds(tuple(seeds), common + 1), "shared")


@pytest.mark.parametrize("stream", ["device", "shared"])
def test_draw_subnets_numbers_of_one_step_differ(stream: Any) -> None:
    drawn = [draw_subnets(lottery, StepSeeds((5, 6), 7), stream, number) for number in range(4)]
    assert len({net for nets in drawn for net in nets}) == sum(map(len, drawn))


def test_draw_subnets_in_evaluation_is_refused() -> None:
    with pytest.raises(ValueError, match="only in training"):
        draw_subnets(lottery, None, "device")


def test_draw_subnets_steps_differ_and_blocks_do_not_matter() -> None:
    """With real plans: a device draws the same in every block, and differently in every step."""
    examples = Examples(torch.zeros(30, 3), torch.zeros(30, dtype=torch.int64))
    plans = [
        draw_plan(
            torch.arange(size), Schedule(4, 2, "wrap"), examples, Preparation(), generator(size, "plan"), shared_seed=99
        )
        for size in (8, 12, 5)
    ]

    def drawn(block: list[Any], stream: Any) -> list[list[int]]:
        return [draw_subnets(lottery, step.step_seeds, stream) for step in merge_plans(block)]

    per_device = drawn(plans, "device")
    for place, plan in enumerate(plans):
        own = [nets[0] for nets in drawn([plan], "device")]
        assert own == [nets[place] for nets in per_device][: len(own)]
        assert len(set(own)) == len(own)
    common = drawn(plans, "shared")
    assert drawn(plans[:1], "shared") == common[:4]
    assert len({net for (net,) in common}) == len(common)


@pytest.fixture
def scene(tiny_model: Callable[..., Model], block_weights: Weights) -> tuple[Model, dict[str, Tensor], Batch]:
    whole = tiny_model("mobilenet", widths=(4, 6), depths=(1, 2), kernels=(5, 5))
    x = torch.randn(3, 4, 1, 6, 6, dtype=torch.float64)
    return whole, block_weights(whole, 3), Batch(x, torch.randint(0, 4, (3, 4)), StepSeeds((1, 2, 3)))


def parts_of(whole: Model) -> list[Model]:
    return [
        whole,
        whole.with_settings(widths=(2, 4), kernels=(3, 5)),
        whole.with_settings(depths=(1, 1), kernels=(5, 3)),
    ]


def cut(net: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """By hand: the first channels, the middle of the kernel."""
    made = {}
    for name, shape in net.shapes().items():
        tensor = weights[name]
        for axis, size in enumerate(shape):
            start = (tensor.shape[axis + 1] - size) // 2 if axis > 1 else 0
            tensor = tensor.narrow(axis + 1, start, size)
        made[name] = tensor
    return made


@pytest.mark.usefixtures("double")
def test_subnet_logits_one_per_device_matches_single_devices(scene: tuple[Model, dict[str, Tensor], Batch]) -> None:
    whole, weights, batch = scene
    nets = parts_of(whole)
    [made] = subnet_logits([nets], whole, weights, batch)
    for k, net in enumerate(nets):
        own = {name: tensor[k : k + 1] for name, tensor in cut(net, weights).items()}
        assert torch.allclose(made[k : k + 1], net(own, batch.x[k : k + 1], StepSeeds((1,))).logits, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_subnet_logits_shared_subnet_equals_one_for_each(scene: tuple[Model, dict[str, Tensor], Batch]) -> None:
    whole, weights, batch = scene
    for net in parts_of(whole):
        [at_once] = subnet_logits([[net]], whole, weights, batch)
        [each] = subnet_logits([[net] * 3], whole, weights, batch)
        assert torch.allclose(at_once, each, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_subnet_logits_gradient_lies_in_the_subnet(scene: tuple[Model, dict[str, Tensor], Batch]) -> None:
    """And is there what the part has when it is trained as a net of its own."""
    whole, weights, batch = scene
    nets = parts_of(whole)

    def loss(logits: Tensor) -> Tensor:
        return logits.square().mean((1, 2))

    slopes = gradient(lambda w, b: loss(subnet_logits([nets], whole, w, b)[0]), weights, batch)
    for k, net in enumerate(nets):
        own = {name: tensor[k : k + 1].clone() for name, tensor in cut(net, weights).items()}
        one = Batch(batch.x[k : k + 1], batch.y[k : k + 1], StepSeeds((1,)))
        expected = gradient(lambda w, b, net=net: loss(net(w, b.x, b.step_seeds).logits), own, one)
        inside = 0
        for name, slope in cut(net, dict(slopes)).items():
            assert torch.allclose(slope[k], expected[name][0], atol=1e-10)
            inside += int((slope[k] != 0).sum())
        assert inside == sum(int((slope[k] != 0).sum()) for slope in slopes.values())


def forgetful() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 3, bias=False))


def test_subnet_logits_each_device_has_own_dropout(block_weights: Weights) -> None:
    net = build_model("forgetful", forgetful, {}, (20,), 3)
    weights = {name: tensor[:1].expand(2, *tensor.shape[1:]) for name, tensor in block_weights(net, 1).items()}
    x, y = torch.ones(2, 4, 20, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int64)
    apart, alike = (
        subnet_logits([[net, net]], net, weights, Batch(x, y, StepSeeds(seeds)))[0] for seeds in ((1, 2), (1, 1))
    )
    assert torch.equal(alike[0], alike[1])
    assert torch.equal(apart[0], alike[0])
    assert not torch.equal(apart[0], apart[1])


def gradients_as_views(drawn: list[list[Model]], whole: Model, weights: Tensors, batch: Batch) -> dict[str, Tensor]:
    """The gradients through views of the whole model's weights."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    total = torch.zeros(())
    for nets in reversed(drawn):
        logits = nets[0](subnet_footprint(nets[0], whole).read(leaves), batch.x, batch.step_seeds).logits
        total = total + logits.square().mean((1, 2)).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values()), materialize_grads=True), strict=True))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2), (1, 2), (2, 1, 0), (1,)])
def test_subnet_logits_in_lanes_sums_gradients(
    devices: int,
    order: tuple[int, ...],
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nested or not, with the whole model or without, with idle devices or without."""
    pytest.importorskip("numba")
    in_one_go: list[bool] = []

    def watched(*arguments: Any) -> Any:
        parts = read_parts(*arguments)
        in_one_go.append(parts is not None)
        return parts

    monkeypatch.setattr(subnets, "read_parts", watched)
    whole = replace(tiny_model("mobilenet", widths=(4, 6), depths=(1, 2), kernels=(5, 5)), kernels="lanes")
    weights = lay_out(block_weights(whole, devices))
    drawn = [[parts_of(whole)[number]] for number in order]
    x, y = torch.randn(devices, 4, 1, 6, 6), torch.randint(0, 4, (devices, 4))
    for running in (None, (0,)):
        batch = Batch(x, y, StepSeeds(tuple(range(devices)), running=running))

        def loss(inside: Tensors, batch: Batch) -> Tensor:
            each = subnet_logits(drawn, whole, inside, batch)
            return torch.stack([logits.square().mean((1, 2)) for logits in each]).sum(0)

        found, expected = gradient(loss, weights, batch), gradients_as_views(drawn, whole, weights, batch)
        for name, tensor in expected.items():
            assert torch.allclose(found[name], tensor, atol=1e-12), name
    assert in_one_go == [True] * 2

"""Convolutions by tiles compute what torch computes, whatever the sizes; only evaluation uses them."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import Model, StepSeeds, build_model

pytest.importorskip("numba")

from fedloom.models.lanes import winograd
from fedloom.models.lanes.convolution import Shape


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(x: Tensor, w: Tensor, bias: Tensor | None, padding: tuple[int, int], m: int) -> Tensor:
    """[K, batch, C, H, W] and [K, O, C, 3, 3] -> [K, batch, O, H', W'], by tiles."""
    devices, batch, inputs, height, width = x.shape
    bits = 8 * x.element_size()
    shape = Shape(batch, height, width, inputs, w.shape[1], (3, 3), (1, 1), padding, 1, devices, bits)
    plan = winograd.Plan(shape, m)
    mine, weight = x.permute(1, 3, 4, 2, 0).contiguous(), w.permute(3, 4, 2, 1, 0).contiguous()
    shift = None if bias is None else bias.t().contiguous()
    found = x.new_full((batch, shape.out_height, shape.out_width, shape.outputs, devices), 7.0)
    changed, scratch = x.new_empty(plan.points * plan.weight_numbers), x.new_empty(plan.scratch)
    plan.transform_weights(weight.data_ptr(), changed.data_ptr())
    at = 0 if shift is None else shift.data_ptr()
    plan(mine.data_ptr(), changed.data_ptr(), at, found.data_ptr(), scratch.data_ptr())
    return found.permute(4, 0, 3, 1, 2)


@pytest.mark.parametrize("m", winograd.TILES)
def test_transforms_are_exact(m: int) -> None:
    inputs, weights, outputs = (
        [[Fraction(word) for word in row.split()] for row in text.split(";")] for text in winograd.transforms(m)
    )
    x, w = [Fraction(n * n + 3, 7) for n in range(m + 2)], [Fraction(n, 3) - 1 for n in range(3)]
    products = [
        sum(a * b for a, b in zip(left, x, strict=True)) * sum(a * b for a, b in zip(right, w, strict=True))
        for left, right in zip(inputs, weights, strict=True)
    ]
    found = [sum(a * b for a, b in zip(row, products, strict=True)) for row in outputs]
    assert found == [sum(x[n + d] * w[d] for d in range(3)) for n in range(m)]


@settings(deadline=None, max_examples=60)
@given(
    m=st.sampled_from(winograd.TILES), devices=st.sampled_from([1, 2, 4, 16]), batch=st.integers(1, 4),
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)), size=st.tuples(st.integers(3, 9), st.integers(3, 9)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)), biased=st.booleans(),
)  # fmt: skip
def test_tiles_any_size_matches_torch(
    m: int, devices: int, batch: int, channels: tuple[int, int], size: tuple[int, int], padding: tuple[int, int],
    biased: bool,
) -> None:  # fmt: skip
    x, w = draw(devices, batch, channels[0], *size), draw(devices, channels[1], channels[0], 3, 3, seed=1)
    bias = draw(devices, channels[1], seed=2) if biased else None
    found = run(x, w, bias, padding, m)
    for k in range(devices):
        expected = F.conv2d(x[k], w[k], None if bias is None else bias[k], padding=padding)
        assert float((found[k] - expected).abs().max()) <= 1e-12 * max(1.0, float(expected.abs().max()))


def test_tiles_many_more_than_at_a_time_match_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winograd, "NEAR_TILES", 0)
    monkeypatch.setattr(winograd, "LEAST_TILES", 5)
    x, w = draw(1, 7, 3, 5, 5), draw(1, 4, 3, 3, 3, seed=1)
    expected = F.conv2d(x[0], w[0], padding=1)
    assert float((run(x, w, None, (1, 1), 2)[0] - expected).abs().max()) <= 1e-12


@pytest.mark.parametrize("m", winograd.TILES)
def test_tiles_same_bits_in_any_block_and_batch(m: int) -> None:
    x, w = draw(4, 6, 5, 7, 7).float(), draw(4, 9, 5, 3, 3, seed=1).float()
    together = run(x, w, None, (1, 1), m)
    for k in range(4):
        assert torch.equal(run(x[k : k + 1], w[k : k + 1], None, (1, 1), m)[0], together[k])
    assert torch.equal(run(x[:, 2:3], w, None, (1, 1), m), together[:, 2:3])


def test_tiles_diverged_device_stays_diverged_and_alone() -> None:
    x, w = draw(2, 1, 3, 4, 4), draw(2, 3, 3, 3, 3, seed=1)
    x[0, 0, 1, 2, 2] = torch.nan
    found = run(x, w, None, (1, 1), 4)
    assert found[0].isnan().any() and not found[1].isnan().any()


def test_find_tile_only_for_layers_that_gain() -> None:
    fits = Shape(8, 14, 14, 64, 64, (3, 3), (1, 1), (1, 1), 1, 1, 32)
    assert winograd.find_tile(fits) == 5
    assert winograd.find_tile(fits._replace(batch=1, devices=16)) == 5  # of the layer alone
    assert winograd.find_tile(fits._replace(height=16, width=16)) == 4
    others = (
        {"kernel": (5, 5)},
        {"stride": (2, 2)},
        {"groups": 2},
        {"inputs": 16},
        {"outputs": 16},
        {"kernel": (1, 3)},
    )
    assert [winograd.find_tile(fits._replace(**other)) for other in others] == [None] * len(others)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.classifier = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))
        return y


def wide() -> nn.Module:
    return Wide()


@pytest.fixture
def net() -> Model:
    return replace(build_model("wide", wide, {}, (1, 6, 6), 3), kernels="lanes")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which methods of plans ran."""
    found: list[str] = []
    for name in ("__call__", "transform_weights"):
        plain = getattr(winograd.Plan, name)

        def watched(self: winograd.Plan, *arguments: int, name: str = name, plain: object = plain) -> None:
            found.append(name)
            plain(self, *arguments)  # type: ignore[operator]

        monkeypatch.setattr(winograd.Plan, name, watched)
    yield found


def test_evaluation_by_tiles_matches_torch(net: Model, calls: list[str]) -> None:
    weights = {name: weight[None].double() for name, weight in net.initial_weights(0).items()}
    x = draw(1, 5, 1, 6, 6)
    net(weights, x)  # its trial also uses tiles
    calls.clear()
    with torch.no_grad():
        found, expected = net(weights, x).logits, replace(net, kernels="torch")(weights, x).logits
    assert "__call__" in calls
    assert float((found - expected).abs().max()) <= 1e-12


def test_training_and_gradients_use_no_tiles(net: Model, calls: list[str]) -> None:
    weights = {name: weight[None] for name, weight in net.initial_weights(0).items()}
    x, seeds = draw(1, 5, 1, 6, 6).float(), StepSeeds((0,))
    net(weights, x), net(weights, x, seeds)
    calls.clear()
    with torch.no_grad():
        net(weights, x, seeds)
    net({name: weight.requires_grad_() for name, weight in weights.items()}, x)
    assert calls == []


def test_weights_are_transformed_once_while_they_stay(net: Model, calls: list[str]) -> None:
    weights = {name: weight[None].clone() for name, weight in net.initial_weights(0).items()}
    batches = [draw(1, 5, 1, 6, 6, seed=seed).float() for seed in range(3)] + [draw(1, 4, 1, 6, 6).float()]
    net(weights, batches[0]), net(weights, batches[3])
    calls.clear()
    with torch.no_grad():
        first = [net(weights, x).logits for x in batches]
        assert calls == ["__call__"] * 4  # of either batch size
        weights["second.weight"].mul_(2.0)
        second = net(weights, batches[0]).logits
    assert calls.count("transform_weights") == 1
    expected = replace(net, kernels="torch")(weights, batches[0]).logits
    assert float((second - expected).abs().max()) <= 1e-4 and not torch.equal(first[0], second)

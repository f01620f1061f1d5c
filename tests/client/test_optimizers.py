"""Our optimizers, device by device, against torch's own after clip_grad_norm_."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import LR_SCHEDULES, OPTIMIZERS, Constant, Cosine, Milestones, Optimizer, Sgd, optimizer_at
from fedloom.client.optimizers import Adam
from fedloom.tensors import combine

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (3, 2), "vector": (4,), "kernel": (2, 1, 2, 2)}
DEVICES, STEPS = 3, 20


def drawn(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(DEVICES, *shape, generator=draw, dtype=torch.float64) * size for name, shape in SHAPES.items()
    }


def slopes(step: int) -> dict[str, Tensor]:
    """Different for every device: long ones, short ones, and some in between."""
    sizes = torch.tensor([5.0, 1e-3, 0.4], dtype=torch.float64)
    return combine(lambda one: one * sizes.view(-1, *[1] * (one.dim() - 1)), drawn(100 + step))


def ours(optimizer: Optimizer, make_blocks: Callable[[int], Tensor] | None = None) -> list[dict[str, Tensor]]:
    """The weights after every step."""
    weights = drawn(1)
    state, history = optimizer.start(weights), []
    for step in range(STEPS):
        working = torch.ones(DEVICES) if make_blocks is None else make_blocks(step)
        optimizer.step(weights, slopes(step), state, working)
        history.append(combine(torch.clone, weights))
    return history


def theirs(
    build: Callable[[list[Tensor]], torch.optim.Optimizer], clip: float | None, device: int
) -> dict[str, Tensor]:
    leaves = {name: tensor[device].clone().requires_grad_() for name, tensor in drawn(1).items()}
    optimizer = build(list(leaves.values()))
    for step in range(STEPS):
        for name, leaf in leaves.items():
            leaf.grad = slopes(step)[name][device].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def assert_same(made: dict[str, Tensor], expected: dict[str, Tensor], device: int) -> None:
    for name, tensor in expected.items():
        assert float((made[name][device] - tensor).abs().max()) <= 1e-12, name


@pytest.mark.parametrize(("momentum", "decay", "clip"), list(product([0.0, 0.9], [0.0, 5e-4], [None, 1.0])))
def test_sgd_any_settings_match_torch(momentum: float, decay: float, clip: float | None) -> None:
    made = ours(Sgd(0.1, momentum, decay, clip))[-1]
    for device in range(DEVICES):
        expected = theirs(
            lambda leaves: torch.optim.SGD(leaves, 0.1, momentum=momentum, weight_decay=decay), clip, device
        )
        assert_same(made, expected, device)


@pytest.mark.parametrize(
    ("betas", "decay", "clip"), list(product([(0.9, 0.999), (0.5, 0.7), (0.0, 0.9)], [0.0, 1e-2], [None, 1.0]))
)
def test_adam_any_settings_match_torch(betas: tuple[float, float], decay: float, clip: float | None) -> None:
    made = ours(Adam(0.01, *betas, epsilon=1e-6, weight_decay=decay, clip_norm=clip))[-1]
    for device in range(DEVICES):
        expected = theirs(
            lambda leaves: torch.optim.Adam(leaves, 0.01, betas=betas, eps=1e-6, weight_decay=decay), clip, device
        )
        assert_same(made, expected, device)


FULL = [Sgd(0.1, 0.9, 5e-4, 1.0), Adam(0.01, weight_decay=1e-2, clip_norm=1.0)]


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_inactive_device_stays_bit_for_bit(optimizer: Optimizer, bits_equal: Callable[..., bool]) -> None:
    """Weights and state, whatever its gradient; the others go on as if it were not there."""
    weights = drawn(1)
    state, untouched = optimizer.start(weights), ours(optimizer)[-1]
    for step in range(STEPS):
        slope, working = slopes(step), torch.ones(DEVICES)
        if step >= 12:
            working[1] = 0
            for tensor in slope.values():
                tensor[1] = torch.nan if step % 2 else torch.inf
        if step == 12:
            frozen = {key: combine(torch.clone, bundle) for key, bundle in {"weights": weights, **state}.items()}
        optimizer.step(weights, slope, state, working)
    for key, bundle in {"weights": weights, **state}.items():
        for name, tensor in bundle.items():
            assert bits_equal(tensor[1], frozen[key][name][1])
    assert_same(weights, {name: tensor[1] for name, tensor in ours(optimizer)[11].items()}, 1)
    for device in (0, 2):
        assert_same(weights, {name: tensor[device] for name, tensor in untouched.items()}, device)


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_paused_device_resumes_its_state(optimizer: Optimizer) -> None:
    """Idle steps leave momentum, averages and step counts as they were."""
    weights = drawn(1)
    state = optimizer.start(weights)
    for step in range(STEPS):
        optimizer.step(weights, slopes(step), state, torch.ones(DEVICES))
        optimizer.step(weights, slopes(step + 1), state, torch.zeros(DEVICES))
    expected = ours(optimizer)[-1]
    for device in range(DEVICES):
        assert_same(weights, {name: tensor[device] for name, tensor in expected.items()}, device)


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_nan_gradient_does_not_affect_others(optimizer: Optimizer) -> None:
    weights = drawn(1)
    state = optimizer.start(weights)
    for step in range(STEPS):
        slope = slopes(step)
        slope["vector"][0] = torch.nan
        optimizer.step(weights, slope, state, torch.ones(DEVICES))
    expected = ours(optimizer)[-1]
    for device in (1, 2):
        assert_same(weights, {name: tensor[device] for name, tensor in expected.items()}, device)
    assert bool(weights["vector"][0].isnan().all())


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_gradients_are_not_modified(optimizer: Optimizer, bits_equal: Callable[..., bool]) -> None:
    """Autograd hands one tensor to two weights."""
    weights, slope, working = drawn(1), slopes(0), torch.tensor([1.0, 0.0, 1.0])
    kept = combine(torch.clone, slope)
    optimizer.step(weights, slope, optimizer.start(weights), working)
    assert all(bits_equal(slope[name], kept[name]) for name in kept)
    assert working.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_order_of_names_keeps_bits(optimizer: Optimizer, bits_equal: Callable[..., bool]) -> None:
    """A bundle that comes out of a file or a message has another order than the model's."""
    made = []
    for backwards in (False, True):
        draw = torch.Generator().manual_seed(0)
        slope = {str(number): torch.randn(1, 5, generator=draw) * 3**number for number in range(8)}
        weights = {name: torch.zeros(1, 5) for name in sorted(slope, reverse=backwards)}
        optimizer.step(weights, slope, optimizer.start(weights), torch.ones(1))
        made.append(weights)
    assert all(bits_equal(made[0][name], made[1][name]) for name in made[0])


def test_sgd_clip_norm_is_per_device_over_all_weights() -> None:
    """Lengths 5, 0.3 and 10 with a limit of 1: the first and the last are shortened, each by its own factor."""
    weights = {"a": torch.zeros(3, 1, dtype=torch.float64), "b": torch.zeros(3, 1, dtype=torch.float64)}
    gradient = {
        "a": torch.tensor([[3.0], [0.3], [6.0]], dtype=torch.float64),
        "b": torch.tensor([[4.0], [0.0], [8.0]], dtype=torch.float64),
    }
    optimizer = Sgd(1.0, clip_norm=1.0)
    optimizer.step(weights, gradient, optimizer.start(weights), torch.ones(3))
    assert weights["a"].flatten().tolist() == pytest.approx([-0.6, -0.3, -0.6], abs=1e-6)
    assert weights["b"].flatten().tolist() == pytest.approx([-0.8, 0.0, -0.8], abs=1e-6)


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_scalar_weight_is_trained(optimizer: Optimizer) -> None:
    """Such as a temperature: one number a device makes a tensor with the device axis alone."""
    weights = {"matrix": torch.zeros(2, 1, dtype=torch.float64), "scalar": torch.zeros(2, dtype=torch.float64)}
    gradient = {"matrix": torch.full((2, 1), 2.0).double(), "scalar": torch.tensor([2.0, -2.0]).double()}
    optimizer.step(weights, gradient, optimizer.start(weights), torch.ones(2))
    assert weights["scalar"].tolist() == pytest.approx([float(weights["matrix"][0]), -float(weights["matrix"][0])])
    assert bool((weights["scalar"] != 0).all())


def test_sgd_inactive_device_keeps_signed_zeros(bits_equal: Callable[..., bool]) -> None:
    for optimizer in FULL:
        weights = {"w": torch.tensor([[-0.0, 0.0]])}
        state = optimizer.start(weights)
        optimizer.step(weights, {"w": torch.tensor([[-1.0, 1.0]])}, state, torch.zeros(1))
        assert bits_equal(weights["w"], torch.tensor([[-0.0, 0.0]]))


@pytest.mark.parametrize("optimizer", FULL, ids=["sgd", "adam"])
def test_optimizer_float32_weights_stay_float32(optimizer: Optimizer) -> None:
    weights = combine(torch.Tensor.float, drawn(1))
    optimizer.step(weights, combine(torch.Tensor.float, slopes(0)), optimizer.start(weights), torch.ones(DEVICES))
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_optimizer_every_registered_one_descends(name: str) -> None:
    optimizer: Any = OPTIMIZERS[name](lr=0.05)
    weights = {"w": torch.tensor([[1.0], [-2.0]])}
    state = optimizer.start(weights)
    for _ in range(200):
        optimizer.step(weights, {"w": weights["w"].clone()}, state, torch.ones(2))
    assert float(weights["w"].abs().max()) < 0.05


@pytest.mark.parametrize("name", sorted(LR_SCHEDULES))
def test_lr_schedule_first_round_has_factor_one(name: str) -> None:
    required = {"cosine": {"rounds": 10}}.get(name, {})
    assert LR_SCHEDULES[name](**required).factor(1) == 1.0


def test_milestones_factor_drops_after_the_round() -> None:
    rates = Milestones((2, 4), factor_each=0.5)
    assert [rates.factor(number) for number in range(1, 7)] == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_milestones_order_is_irrelevant() -> None:
    assert [Milestones((4, 2)).factor(number) for number in (1, 3, 5)] == pytest.approx([1.0, 0.1, 0.01])


def test_optimizer_at_changes_only_the_learning_rate() -> None:
    optimizer = Adam(0.4, beta1=0.5, clip_norm=2.0)
    changed = optimizer_at(optimizer, Milestones((1,), 0.5), 2)
    assert changed == Adam(0.2, beta1=0.5, clip_norm=2.0)
    assert optimizer_at(optimizer, Constant(), 100) == optimizer
    assert math.isclose(optimizer.lr, 0.4)


def test_cosine_warmup_matches_fedsup() -> None:
    rates = Cosine(rounds=500, warmup=20)
    found = {past: 0.1 * rates.factor(past + 1) for past in (0, 10, 19, 20, 250)}
    assert found == pytest.approx({0: 1.0e-4, 10: 0.050001, 19: 0.094667, 20: 0.099606, 250: 0.05}, abs=2e-6)
    assert rates.factor(501) == rates.factor(600) == pytest.approx(0)


def test_sgd_clip_value_applies_once_to_the_sum() -> None:
    weights = {"w": torch.zeros(1, 2)}
    sgd = Sgd(1.0, clip_value=1.0)
    sgd.step(weights, {"w": torch.tensor([[0.4 + 0.9, -0.2]])}, sgd.start(weights), torch.ones(1))
    torch.testing.assert_close(weights["w"], torch.tensor([[-1.0, 0.2]]))


def test_sgd_decay_vectors_false_skips_biases_and_norms() -> None:
    weights = {"matrix": torch.ones(2, 3, 3), "vector": torch.ones(2, 3)}
    sgd = Sgd(0.1, weight_decay=0.5, decay_vectors=False)
    sgd.step(weights, {name: torch.zeros_like(w) for name, w in weights.items()}, sgd.start(weights), torch.ones(2))
    assert torch.equal(weights["vector"], torch.ones(2, 3))
    torch.testing.assert_close(weights["matrix"], torch.full((2, 3, 3), 0.95))

"""Updates by lane kernels are those of the plain optimizers, and a device's own whatever its block."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import Adam, Optimizer, Sgd, UnequalNumbersError, join_optimizers
from fedloom.client.lane_optimizers import in_lanes
from fedloom.methods import METHODS
from fedloom.methods.fedavg import FedAvg
from fedloom.models.lanes import lay_out
from fedloom.tensors import fingerprint
from fedloom.testing import TinyWorld
from tests.conftest import build_method, with_lanes

pytest.importorskip("numba")

SHAPES = {"b": (3, 2, 3, 3), "a": (3,), "c": (5, 4)}
OPTIMIZERS = [
    Sgd(0.1),
    Sgd(0.1, 0.9, 5e-4, 1.0),
    Sgd(0.1, 0.9, 5e-2, 1.0, clip_value=0.5, decay_vectors=False),
    Adam(0.01),
    Adam(0.01, weight_decay=0.1, clip_norm=0.5),
]


def bundle(devices: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {n: torch.randn(devices, *s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}


def train(optimizer: Optimizer, weights: dict[str, Tensor], steps: int, stopped: int | None = None) -> None:
    state = optimizer.start(weights)
    devices = len(weights["a"])
    for step in range(steps):
        gradient, active = bundle(devices, step), torch.ones(devices)
        if stopped is not None and step > 0:
            active[stopped] = 0
            gradient["b"][stopped] = torch.nan
        optimizer.step(weights, gradient, state, active)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_lane_optimizer_matches_plain(optimizer: Optimizer, devices: int) -> None:
    plain, laid = bundle(devices, 99), lay_out(bundle(devices, 99))
    train(optimizer, plain, 4)
    train(in_lanes(optimizer, laid), laid, 4)
    for name, weight in plain.items():
        assert float((weight - laid[name]).abs().max()) <= 1e-12


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_inactive_device_keeps_its_bits_whatever_its_gradient(optimizer: Optimizer) -> None:
    laid, once = lay_out(bundle(4, 99)), lay_out(bundle(4, 99))
    train(in_lanes(optimizer, laid), laid, 4, stopped=2)
    train(in_lanes(optimizer, once), once, 1)
    assert all(torch.equal(laid[name][2], once[name][2]) for name in laid)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in laid.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_of_device_does_not_depend_on_block(optimizer: Optimizer) -> None:
    full = {name: tensor.float() for name, tensor in bundle(16, 99).items()}
    slopes = {name: 100 * tensor.float() for name, tensor in bundle(16, 7).items()}
    found = []
    for chosen in (torch.arange(16), torch.tensor([5]), torch.tensor([9, 5, 2])):
        weights = lay_out({name: tensor[chosen] for name, tensor in full.items()})
        lane = in_lanes(optimizer, weights)
        state = lane.start(weights)
        for _ in range(2):
            lane.step(weights, {n: g[chosen] for n, g in slopes.items()}, state, torch.ones(len(chosen)))
        found.append({name: tensor[chosen.tolist().index(5)] for name, tensor in weights.items()})
    for other in found[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize(
    "pair",
    [
        (Sgd(0.1, 0.9, 5e-4, 1.0), Sgd(0.03, 0.5, 1e-2, 0.3)),
        (Adam(0.01, clip_norm=0.5), Adam(0.002, clip_norm=0.1)),
    ],
    ids=["sgd", "adam"],
)
def test_update_of_device_does_not_depend_on_numbers_of_others(pair: tuple[Optimizer, Optimizer]) -> None:
    full = {name: tensor.float() for name, tensor in bundle(4, 99).items()}
    slopes = {name: 10 * tensor.float() for name, tensor in bundle(4, 7).items()}

    def run(optimizer: Optimizer) -> dict[str, Tensor]:
        weights = lay_out(full)
        lane = in_lanes(optimizer, weights)
        state = lane.start(weights)
        for _ in range(3):
            lane.step(weights, slopes, state, torch.ones(4))
        return weights

    joined = run(join_optimizers([pair[0], pair[1], pair[0], pair[1]]))
    for number, optimizer in enumerate(pair):
        alone = run(optimizer)
        assert all(torch.equal(joined[name][number::2], alone[name][number::2]) for name in alone)


def test_adam_unequal_weight_decay_in_lanes_is_refused() -> None:
    laid = lay_out(bundle(2, 99))
    lane = in_lanes(join_optimizers([Adam(0.01, weight_decay=0.1), Adam(0.01, weight_decay=0.2)]), laid)
    with pytest.raises(UnequalNumbersError):
        lane.step(laid, bundle(2, 7), lane.start(laid), torch.ones(2))


def test_unknown_optimizer_and_dtypes_run_as_they_are() -> None:
    class Own:
        lr = 0.1

    own: Any = Own()
    laid, plain = lay_out(bundle(3, 99)), Sgd(0.1)
    assert in_lanes(own, laid) is own
    assert in_lanes(plain, {name: weight.bfloat16() for name, weight in laid.items()}) is plain
    assert in_lanes(plain, {**laid, "a": laid["a"].float()}) is plain


def test_weights_in_other_memory_are_refused() -> None:
    contiguous = bundle(3, 99)
    with pytest.raises(ValueError, match="lay_out"):
        train(in_lanes(Sgd(0.1), contiguous), contiguous, 1)


@pytest.mark.usefixtures("double")
def test_round_in_lanes_matches_torch_and_any_blocks(world: Callable[..., TinyWorld]) -> None:
    """The whole way: batches, loss, clipping and momentum, in blocks of four and of eight."""
    plain = world(sizes=(8,) * 8)
    lanes = with_lanes(plain)
    assert all(tier.model.trains_interleaved() for tier in lanes.fleet.tiers)
    servers = [
        one.play(FedAvg(), one.engine(FedAvg(), devices_per_block=size, optimizer=Sgd(0.1, 0.9, 1e-3, 1.0)))
        for one, size in ((plain, 1), (lanes, 4), (lanes, 16))
    ]
    for name, weight in servers[0]["weights"].items():
        assert float((weight - servers[1]["weights"][name]).abs().max()) <= 1e-10
    assert fingerprint(servers[1]) == fingerprint(servers[2])


@pytest.mark.slow
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_learns_in_lanes_what_it_learns_by_torch(name: str) -> None:
    method = build_method(name)
    plain = TinyWorld.for_method(method)
    found = []
    for one in (plain, with_lanes(plain)):
        engine = one.engine(method)
        server = one.play(method, engine)
        rows = one.evaluate(method, server, engine)
        found.append((server, engine.client_states.committed, rows))
    flat = [
        {f"{who} {bundle} {key}": tensor for who, parcel in (("server", server), *states.items())
         for bundle, tensors in parcel.items() for key, tensor in tensors.items()}
        for server, states, _ in found
    ]  # fmt: skip
    assert flat[0].keys() == flat[1].keys()
    for key, tensor in flat[0].items():
        if tensor.is_floating_point():
            assert float((tensor - flat[1][key]).abs().max()) <= 1e-8, key
    for before, after in zip(found[0][2], found[1][2], strict=True):
        assert before.value == pytest.approx(after.value, abs=1e-6, nan_ok=True)

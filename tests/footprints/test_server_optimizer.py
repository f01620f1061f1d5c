"""Server optimizers on any aggregation: what is not updated keeps its bits, in the weights and in the moments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.footprints import (
    RULES,
    SERVER_OPTIMIZERS,
    Aggregate,
    ClientUpdate,
    DPAggregator,
    RobustAggregator,
    ServerStep,
    coverage_mean,
    split_moments,
    updated_entries,
)
from fedloom.footprints.regions import LowCoverageHold
from fedloom.footprints.server_optimizer import MOMENTS, FedAvgM
from fedloom.testing import same_bits, same_parcel
from tests.footprints.test_robust import Case, cases

AGGREGATES: dict[str, Aggregate] = {
    "mean": coverage_mean,
    "held mean": LowCoverageHold(coverage_mean, 2),
    **{f"{name} hold": RobustAggregator(RULES[name]()) for name in ("default", "median", "multi_krum", "clipping")},  # type: ignore[arg-type]
    "median clipped": RobustAggregator(RULES["median"](), "clipped"),  # type: ignore[arg-type]
    "held median": LowCoverageHold(RobustAggregator(RULES["median"](), min_contributors=2), 4),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("aggregate", AGGREGATES.values(), ids=AGGREGATES)
@given(case=cases(weights=(1.0, 0.25, 0.0)))
def test_updated_entries_are_those_that_an_aggregation_writes(aggregate: Aggregate, case: Case) -> None:
    """Updates are drawn at random, so that what is written differs from what was there."""
    weights, updates = case
    updated = updated_entries(aggregate, weights, updates)
    result = aggregate(weights, updates)
    assert updated.keys() == weights.keys() == result.keys()
    for name, old in weights.items():
        assert updated[name].shape == old.shape and updated[name].dtype == torch.bool
        assert torch.equal(result[name] != old, updated[name])


@given(case=cases(weights=(1.0,)))
def test_updated_entries_with_noise_are_all_expected_ones(case: Case) -> None:
    weights, updates = case
    expected = [(update.footprint, 0.5) for update in updates[:3]]
    aggregate = DPAggregator(1.0, 0.5, expected, 0, 1)
    updated = updated_entries(aggregate, weights, [])
    result = aggregate(weights, [])  # nobody replied
    assert all(torch.equal(result[name] != old, updated[name]) for name, old in weights.items())


def play(optimizer: Any, aggregate: Aggregate, weights: dict[str, Tensor], rounds: list[list[ClientUpdate]]) -> Any:
    """The server states of a run: weights, and moments as they are kept."""
    server: dict[str, Any] = {"weights": weights}
    states = [server]
    for updates in rounds:
        own, moments = split_moments(server)
        step = ServerStep(optimizer, aggregate, own, moments)
        server = {"weights": step(own["weights"], iter(updates)), **step.moments}
        states.append(server)
    return states


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
@given(case=cases(weights=(1.0, 0.25, 0.0)), held=st.booleans())
def test_server_step_uncovered_entries_keep_weights_and_moments(kind: str, case: Case, held: bool) -> None:
    weights, updates = case
    aggregate = AGGREGATES["held median" if held else "mean"]
    _, before, after = play(SERVER_OPTIMIZERS[kind](), aggregate, weights, [updates[:3], updates[3:]])
    updated = updated_entries(aggregate, before["weights"], updates[3:])
    for bundle, tensors in before.items():
        for name, old in tensors.items():
            still = ~updated[name]
            assert same_bits(after[bundle][name][still], old[still])
    assert {name for name in after if name.startswith(MOMENTS)} == {
        f"{MOMENTS}{moment}:weights" for moment in SERVER_OPTIMIZERS[kind]().start(torch.zeros(1))
    }


@pytest.mark.parametrize("aggregate", [AGGREGATES["mean"], AGGREGATES["held median"]], ids=["mean", "held median"])
@given(case=cases())
def test_server_step_without_momentum_is_the_aggregate_bit_for_bit(aggregate: Aggregate, case: Case) -> None:
    weights, updates = case
    states = play(FedAvgM(lr=1.0, momentum=0.0), aggregate, weights, [updates[:4], updates[4:]])
    for before, after, given_updates in zip(states, states[1:], [updates[:4], updates[4:]], strict=False):
        expected = aggregate(before["weights"], given_updates)
        assert same_parcel({"weights": after["weights"]}, {"weights": expected})


def test_server_step_keeps_moments_of_every_bundle_apart() -> None:
    """A method may aggregate several bundles in a round, as decouple does."""
    large, small = {"w": torch.zeros(2)}, {"w": torch.zeros(2)}
    server = {"large": large, "small": small}
    footprint = cover(large)
    step = ServerStep(FedAvgM(momentum=0.5), coverage_mean, server)
    step(large, [ClientUpdate(footprint, {"w": torch.tensor([1.0, 2.0])}, 1.0)])
    step(small, [ClientUpdate(footprint, {"w": torch.tensor([3.0, 4.0])}, 1.0)])
    assert step.moments[f"{MOMENTS}velocity:large"]["w"].tolist() == [1.0, 2.0]
    assert step.moments[f"{MOMENTS}velocity:small"]["w"].tolist() == [3.0, 4.0]
    with pytest.raises(ValueError, match="must be a bundle of its server state"):
        step(dict(large), [])


def cover(weights: dict[str, Tensor]) -> Any:
    from fedloom.footprints import find_footprint

    shapes = {name: weight.shape for name, weight in weights.items()}
    return find_footprint(shapes, shapes)


REFERENCE: dict[str, Callable[..., float]] = {
    "adagrad": lambda v, d, b2: v + d * d,
    "adam": lambda v, d, b2: b2 * v + (1 - b2) * d * d,
    "yogi": lambda v, d, b2: v - (1 - b2) * d * d * ((v > d * d) - (v < d * d)),
}


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_server_optimizer_rounds_equal_algorithm_of_paper(kind: str) -> None:
    """Algorithm 2 number by number: two devices, the mean of their changes, three rounds, one of them without reply."""
    settings = {"momentum": {"lr": 0.7, "momentum": 0.8}, "adagrad": {"lr": 0.3, "beta1": 0.4, "tau": 0.05}}
    chosen: dict[str, float] = settings.get(kind, {"lr": 0.3, "beta1": 0.6, "beta2": 0.9, "tau": 0.05})
    first, trained = [0.5, -1.0, 2.0], [[[1.0, -2.0, 2.5], [0.0, -1.5, 1.5]], [], [[0.3, 0.2, 0.1], [2.0, -3.0, 0.7]]]
    weights = {"w": torch.tensor(first, dtype=torch.float64)}
    updates = [
        [ClientUpdate(cover(weights), {"w": torch.tensor(one, dtype=torch.float64)}, 1.0) for one in devices]
        for devices in trained
    ]
    last = play(SERVER_OPTIMIZERS[kind](**chosen), coverage_mean, weights, updates)[-1]["weights"]["w"]
    for entry, x in enumerate(first):
        m, v = 0.0, chosen.get("tau", 0.0) ** 2
        for devices in filter(None, trained):
            delta = sum(one[entry] - x for one in devices) / len(devices)
            if kind == "momentum":
                m = chosen["momentum"] * m + delta
                x += chosen["lr"] * m
                continue
            m = chosen["beta1"] * m + (1 - chosen["beta1"]) * delta
            v = REFERENCE[kind](v, delta, chosen.get("beta2", 0.0))
            x += chosen["lr"] * m / (v**0.5 + chosen["tau"])
        assert float(last[entry]) == pytest.approx(x, abs=1e-12)

"""EveryTier: what it reduces to, when the smallest tier cannot lose, what it can train, and its calibration."""

from collections.abc import Callable

import pytest
import torch

from fedloom.client import Sgd
from fedloom.data import TASKS
from fedloom.fleet import Fleet, make_tiers
from fedloom.methods import fleet_problem
from fedloom.methods.everytier import EveryTier, add_label_prior
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.feddyn import FedDyn
from fedloom.methods.method import Method
from fedloom.models import Model
from fedloom.tensors import Parcel
from fedloom.testing import METHOD_CHECKS, TinyWorld, tiny_model
from fedloom.testing.doubles import committed_states

SIZES = (8, 5, 9, 8, 12)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2]]


def tiers(**settings: object) -> list[tuple[str, Model]]:
    return [(name, tiny_model("columnnet", held=held, **settings)) for name, held in (("a", 2), ("b", 1))]


def played(method: Method, models: list[tuple[str, Model]]) -> Parcel:
    sim = TinyWorld.make(models=models, sizes=SIZES, labels=LABELS, optimizer=Sgd(0.1))
    return sim.play(method, sim.engine(method), rounds=3)


def test_everytier_of_one_exit_without_calibration_is_fedavg(parcels_equal: Callable[..., bool]) -> None:
    small = tiers()[-1:]
    assert parcels_equal(played(EveryTier(calibration=0.0), small), played(FedAvg(), small))
    assert not parcels_equal(played(EveryTier(), small), played(FedAvg(), small))


def test_everytier_of_one_exit_without_calibration_corrects_drift_as_feddyn_does(
    difference: Callable[..., float],
) -> None:
    small, method = tiers()[-1:], EveryTier(calibration=0.0, feddyn=0.1, weighting="uniform")
    corrected, reference = played(method, small), played(FedDyn(alpha=0.1), small)
    assert difference({"w": corrected["weights"]}, {"w": reference["weights"]}) < 1e-6
    assert difference({"w": corrected["h"]}, {"w": reference["h"]}) < 1e-6


def test_everytier_with_feddyn_keeps_a_state_of_its_own_size() -> None:
    method, sim = EveryTier(feddyn=0.1), TinyWorld.make(models=tiers(), sizes=SIZES, labels=LABELS, optimizer=Sgd(0.1))
    engine = sim.engine(method)
    sim.play(method, engine, rounds=2)
    for device in sim.fleet.devices(1):
        gradient = committed_states(engine)[device.name]["gradient"]
        assert {name: one.shape for name, one in gradient.items()} == dict(device.model.shapes())
        assert any(one.any() for one in gradient.values())
    assert "gradient" in method.info.client_state and EveryTier().server_step == ""


@pytest.mark.usefixtures("double")
def test_everytier_smallest_size_is_small_for_all_if_it_learns_from_no_other(difference: Callable[..., float]) -> None:
    """But for rounding, which depends on the blocks in which devices train."""
    models = tiers(lateral_gradient=False)
    small_for_all = played(FedAvg(), models[-1:])["weights"]
    alone, taught = (played(EveryTier(calibration=0.0), nets)["weights"] for nets in (models, tiers()))
    assert difference({"w": {name: alone[name] for name in small_for_all}}, {"w": small_for_all}) < 1e-12
    assert difference({"w": {name: taught[name] for name in small_for_all}}, {"w": small_for_all}) > 1e-6


@pytest.mark.parametrize("check", ["check_blocks_train_alike", "check_lost_reply", "check_resume", "check_compression"])
def test_everytier_with_feddyn_passes(check: str) -> None:
    METHOD_CHECKS[check](EveryTier(feddyn=0.1), TinyWorld.make(models=tiers(), sizes=SIZES, labels=LABELS))


def test_everytier_with_feddyn_needs_devices_that_stay_in_their_tier() -> None:
    redrawn = Fleet(make_tiers(tiers()), (0.5, 0.5), 4, seed=0, assignment="redrawn")
    problem = fleet_problem(EveryTier(feddyn=0.1), redrawn)
    assert problem is not None and "fleet.assignment" in problem
    assert fleet_problem(EveryTier(), redrawn) is None


def test_everytier_needs_exits_where_sizes_differ() -> None:
    widths = [(name, tiny_model("convnet", width=width)) for name, width in (("a", 1.0), ("b", 0.5))]
    problem = fleet_problem(EveryTier(), Fleet(make_tiers(widths), (0.5, 0.5), 4, seed=0))
    assert problem is not None and "everytier is about early exits" in problem
    assert fleet_problem(EveryTier(), Fleet(make_tiers(tiers()), (0.5, 0.5), 4, seed=0)) is None


def test_everytier_calibrates_only_where_devices_have_labels() -> None:
    given = EveryTier().check_task(TASKS["regression"], given=("calibration",))
    assert given is not None and "method.calibration" in given
    assert EveryTier().check_task(TASKS["regression"]) is None
    assert EveryTier().check_task(TASKS["classification"], given=("calibration",)) is None


def test_label_prior_of_equally_frequent_labels_changes_no_gradient() -> None:
    logits = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    even = add_label_prior(logits, torch.full((2, 3), 7.0, dtype=torch.float64))
    assert torch.allclose(even.softmax(-1), logits.softmax(-1), atol=1e-15)
    counts = torch.tensor([[9.0, 0.0, 3.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    shifted = add_label_prior(logits, counts, 0.5) - logits
    expected = 0.5 * torch.log((counts + 1) / (counts + 1).sum(1, keepdim=True))
    assert torch.allclose(shifted, expected.unsqueeze(1).expand_as(shifted))
    assert torch.equal(add_label_prior(logits, counts, 0.0), logits)

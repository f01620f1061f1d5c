"""FedSup, Table 18: a round waits for its slowest device, so small models on slow devices make it three times shorter.

The paper assumes the seconds, so a tier's speed here is the work of its net over the seconds that the paper gives it.
"""

from typing import Any

import pytest

from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.loop import rounds

NETS: dict[str, dict[str, Any]] = {
    "B": {"widths": [4, 8], "depths": [1, 2], "kernels": [5, 5]},
    "M": {"widths": [4, 8], "depths": [1, 1], "kernels": [5, 5]},
    "S": {"widths": [2, 4], "depths": [1, 1], "kernels": [3, 3]},
}
SECONDS = {"iot": {"B": 30, "M": 20, "S": 10}, "edge": {"B": 20, "M": 10, "S": 6}, "cloud": {"B": 10, "M": 5, "S": 3}}
ENDLESS = 1e30  # bytes a second: the paper counts training alone


def assembled(document, tmp_path, method, nets, speeds, faults):
    tiers = [
        {"name": kind, "share": 1 / 3, **NETS[net], "speed": speeds.get(kind, 1.0), "bandwidth": ENDLESS}
        for kind, net in nets.items()
    ]
    change = {
        "data": {"dataset": "digits", "devices": 6},
        "model": {"family": "mobilenet", "stem": 2, "normalization": "none"},
        "evaluation": {"tests": ["global"], "per_device": "never"},
    }
    recipe = document(**change, tiers=tiers, method=method, rounds=1, faults=faults)
    return assemble(load(recipe, Registries()), Registries(), tmp_path)


def round_of(document, tmp_path, method, nets, **faults):
    """Simulated seconds of a round in which each class of devices trains this model, and the late classes."""
    slow = assembled(document, tmp_path, method, nets, {}, {})
    work: dict[str, float] = {}  # with one multiply-add a second, seconds are multiply-adds
    for one in slow.fleet.devices(1):
        spent = slow.faults.clock.seconds(one, 0, slow.simulator.client_data.count(one))
        work[one.tier] = max(work.get(one.tier, 0.0), spent)
    speeds = {kind: work[kind] / SECONDS[kind][net] for kind, net in nets.items()}
    experiment = assembled(document, tmp_path, method, nets, speeds, faults)
    (done,) = rounds(experiment)
    (clock,) = [row.value for row in done.rows if row.metric == "simulated_seconds"]
    tier_of = {one.name: one.tier for one in experiment.fleet.devices(1)}
    return clock, {tier_of[one.device] for _, one in experiment.refusals if one.code == "LATE"}


FEDAVG = ({"name": "fedavg"}, {"iot": "B", "edge": "B", "cloud": "B"})
OWN_SIZE = {"iot": "S", "edge": "M", "cloud": "B"}
FULL_BUDGET = ({"name": "heterofl", "mask_unseen_labels": False}, OWN_SIZE)  # every device the largest net it may have
EFEDSUP = ({"name": "efedsup"}, OWN_SIZE)  # it draws one, which may be smaller


@pytest.mark.parametrize(("arm", "seconds"), [(FEDAVG, 30.0), (FULL_BUDGET, 10.0)])
def test_round_seconds_match_published_table(arm, seconds, document, tmp_path):
    assert round_of(document, tmp_path, *arm) == (pytest.approx(seconds), set())


def test_efedsup_round_takes_no_longer_than_largest_nets(document, tmp_path):
    seconds, late = round_of(document, tmp_path, *EFEDSUP, deadline=10.001)
    assert 0 < seconds <= 10.0 + 1e-6
    assert late == set()


def test_deadline_of_ten_seconds_drops_only_fedavg_devices(document, tmp_path):
    assert round_of(document, tmp_path, *FEDAVG, deadline=10.001) == (pytest.approx(10.001), {"iot", "edge"})
    assert round_of(document, tmp_path, *FULL_BUDGET, deadline=10.001) == (pytest.approx(10.0), set())

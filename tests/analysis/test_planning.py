"""Fleet planning: tiers of devices, round times, coverage, and the estimated time of a round on this machine."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedloom.analysis.costs import tier_costs
from fedloom.analysis.planning import DeviceSpec, free_memory, plan_fleet, probe, read_device_specs
from fedloom.analysis.profiling import _solve_prices, _work_per_round, estimate_round_time
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.loop import rounds

HERE = Path("data")


def make_plan(document, specs, headroom=1.0, **changes):
    loaded = load(document(**changes), Registries())
    costs = tier_costs(loaded, Registries(), HERE, memory=True)
    return plan_fleet(loaded, Registries(), HERE, specs, costs, headroom), {one.name: one for one in costs}


def test_plan_fleet_devices_get_the_largest_tier_that_fits(document):
    _, costs = make_plan(document, [DeviceSpec("any")])
    large, small = costs["large"], costs["small"]
    work = 3 * large.macs * (1437 // 4)  # one epoch, three passes' worth
    slow = work / 10  # takes ten seconds for the large one
    specs = [
        DeviceSpec("strong", memory=large.training_memory),
        DeviceSpec("tight", memory=large.training_memory - 1),
        DeviceSpec("tiny", memory=small.training_memory - 1),
        DeviceSpec("in time", speed=slow, deadline=10.1),
        DeviceSpec("late", speed=slow, deadline=9.9),
        DeviceSpec("far", bandwidth=large.bytes_moved / 10, deadline=9.9),
    ]
    plan, _ = make_plan(document, specs)
    assert [device.demand.tier if device.demand else None for device in plan.devices] == [
        "large", "small", None, "large", "small", "small",
    ]  # fmt: skip
    assert "memory" in plan.devices[1].problem and plan.devices[0].problem == ""
    assert plan.devices[2].problem.startswith("small needs")
    assert plan.devices[3].demand.training == pytest.approx(10)
    assert plan.seconds == pytest.approx(10)


def test_plan_fleet_headroom_and_examples_are_respected(document):
    _, costs = make_plan(document, [DeviceSpec("any")])
    enough = DeviceSpec("enough", memory=costs["large"].training_memory)
    plan, _ = make_plan(document, [enough], headroom=1.5)
    assert plan.devices[0].demand.tier == "small"
    few, many = (DeviceSpec("m", speed=1e6, examples=count) for count in (10, 100))
    plan, _ = make_plan(document, [few, many])
    assert plan.devices[1].demand.training == pytest.approx(10 * plan.devices[0].demand.training)


def test_plan_fleet_regions_have_expected_contributors(document):
    _, costs = make_plan(document, [DeviceSpec("any")])
    fleet = [DeviceSpec("strong", count=2), DeviceSpec("weak", count=6, memory=costs["large"].training_memory - 1)]
    plan, _ = make_plan(document, fleet, fleet__participation=0.25)
    alone, both = sorted(plan.regions, key=lambda one: one.tiers)
    assert (alone.tiers, both.tiers) == (("large",), ("large", "small"))
    assert alone.parameters + both.parameters == costs["large"].parameters
    assert both.parameters == costs["small"].parameters
    assert (alone.devices, both.devices) == (2, 8)
    assert (alone.contributors, both.contributors) == (pytest.approx(0.5), pytest.approx(2.0))
    assert alone.trained == pytest.approx(1 - math.comb(6, 2) / math.comb(8, 2))
    assert both.trained == 1.0
    assert plan.shares == {"large": 0.25, "small": 0.75}


def test_plan_fleet_unrelated_models_have_no_regions(document):
    plan, _ = make_plan(document, [DeviceSpec("any")], method={"name": "standalone"})
    assert plan.regions == ()


def test_plan_fleet_measured_tier_speed_is_used(document):
    spec = DeviceSpec("m", speed=1.0, speeds={"large": 1e12}, deadline=1.0)
    plan, _ = make_plan(document, [spec])
    assert plan.devices[0].demand.tier == "large"


TOML = '[[devices]]\nname = "phone"\ncount = 3\nmemory = "1.5 GB"\nspeed = 2e9\nbandwidth = "250 kB/s"\ndeadline = 60\n'
CSV = "name,count,memory,speed,bandwidth,deadline\nphone,3,1.5 GB,2e9,250 kB/s,60\n"
JSON = (
    '{"data": {"name": "phone", "count": 3, "memory": 1.5e9, "speed": 2e9, "bandwidth": 250000, "deadline": 60,'
    ' "cores": 2}}'
)


@pytest.mark.parametrize(("name", "text"), [("f.toml", TOML), ("f.csv", CSV), ("f.json", JSON)])
def test_read_device_specs_every_format_reads_the_same(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_device_specs(tmp_path / name) == [DeviceSpec("phone", 2e9, 1.5e9, 250e3, 60.0, 3)]


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("f.yaml", "", "FLEET_FORMAT"),
        ("f.toml", "devices = 3", "FLEET_FORMAT"),
        ("f.toml", "[[devices]]\nmemry = 3", "FLEET_KEY"),
        ("f.toml", '[[devices]]\nmemory = "much"', "FLEET_VALUE"),
        ("f.csv", "name,speed\nphone,-2", "FLEET_VALUE"),
        ("f.csv", "name,speed\n", "FLEET_EMPTY"),
        ("f.json", "{", "FLEET_FORMAT"),
    ],
)
def test_read_device_specs_invalid_file_is_refused(name, text, code, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError, match=code):
        read_device_specs(tmp_path / name)
    with pytest.raises(RecipeError, match="FILE_MISSING"):
        read_device_specs(tmp_path / "none.toml")


def test_probe_this_machine_has_memory_and_speed():
    spec = probe("here", {})
    assert spec.name == "here" and spec.speed > 0 and 1e6 < spec.memory <= free_memory() * 2


def test_work_per_round_counts_steps_and_macs(document):
    """Two blocks of two devices, each with two epochs of two batches of a hundred."""
    loaded = load(document(training={"batch_size": 100, "epochs": 2}, data__max_examples=200), Registries())
    macs = sum(one.macs for one in tier_costs(loaded, Registries(), HERE))
    assert _work_per_round(assemble(loaded, Registries(), HERE)).tolist() == [2 * 2 * 2, 2 * 2 * 2 * 100 * macs]


def test_solve_prices_separates_steps_and_macs():
    loads = np.array([[10.0, 800.0], [40.0, 800.0]])
    assert _solve_prices(loads, loads @ [0.5, 0.01]) == pytest.approx([0.5, 0.01])
    assert _solve_prices(loads[:1], np.array([8.0])) == pytest.approx([0.0, 0.01])
    assert (_solve_prices(loads, np.array([8.0, 2.0])) >= 0).all()
    assert (_solve_prices(loads, np.array([1.0, 80.0])) >= 0).all()


def test_estimate_round_time_works_with_and_without_data(document):
    loaded = load(document(training={"batch_size": 10}, rounds=2), Registries())
    estimate = estimate_round_time(loaded, Registries(), HERE, workers=1)
    (_, second) = rounds(assemble(loaded, Registries(), HERE))
    assert not estimate.synthetic_data
    assert estimate.training == pytest.approx(
        second.seconds - second.evaluation_seconds, rel=4
    )  # the machine may be busy
    assert estimate.evaluation > 0
    away = load(
        document(data={"dataset": "mnist", "devices": 4, "max_examples": 40, "test_examples": 50}), Registries()
    )
    assert estimate_round_time(away, Registries(), HERE / "nowhere", workers=1).synthetic_data

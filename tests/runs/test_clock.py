"""Simulated seconds of a round."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from fedloom.methods import METHODS
from fedloom.models import MODELS, build_model, compute_cost

TIERS = [
    {"name": "large", "share": 0.5, "width": 1.0, "speed": 1e6, "bandwidth": 1e4},
    {"name": "small", "share": 0.5, "width": 0.5, "speed": 1e5, "bandwidth": 1e3},
]


def clock_of(run: Any) -> list[float]:
    return [row.value for row in run.rows() if row.metric == "simulated_seconds"]


def size(width: float) -> Any:
    settings = {"hidden": (2, 4), "width": width, "widest": 1.0}
    return build_model("convnet", MODELS["convnet"], settings, (1, 8, 8), 10)


def test_clock_slowest_device_decides(run: Callable[..., Any]) -> None:
    """By hand: 359 examples each, twice; weights down, weights and ten booleans up."""
    done = run(tiers=TIERS, training={"epochs": 2, "batch_size": 100}, rounds=1)
    expected = []
    for tier in TIERS:
        net = compute_cost(size(float(str(tier["width"]))))
        moved = 2 * 4 * net.parameters + 2
        expected.append(moved / float(str(tier["bandwidth"])) + 3 * net.macs * 2 * 359 / float(str(tier["speed"])))
    assert clock_of(done) == [pytest.approx(max(expected))]


def test_clock_without_speeds_reports_nothing(run: Callable[..., Any]) -> None:
    assert clock_of(run(rounds=1)) == []
    assert clock_of(run("other", tiers=[TIERS[0], {"name": "small", "share": 0.5, "width": 0.5}], rounds=1)) == []


def test_clock_training_server_adds_its_seconds(run: Callable[..., Any]) -> None:
    change: dict[str, Any] = {
        "model": {"family": "bottleneck", "stem": 2, "planes": [2], "blocks": [1]},
        "tiers": [{"name": "all", "share": 1.0, "speed": 1e6, "bandwidth": 1e4}],
        "method": {"name": "fedgkt", "server_epochs": 1, "server_planes": [2], "server_blocks": [1]},
        "rounds": 1,
    }
    assert clock_of(run("unknown", **change)) == []
    slow, fast = (
        clock_of(run(name, **change, fleet={"server_speed": speed}))[0] for name, speed in (("a", 1e5), ("b", 1e6))
    )
    assert slow > fast
    assert clock_of(run("c", **change, fleet={"server_speed": 1e30}))[0] == pytest.approx((10 * fast - slow) / 9)


@pytest.mark.parametrize(
    ("method", "macs"),
    [
        # a linear layer from 4 features to 10 classes, once forward and twice backward for every class mean
        ({"name": "fedgh", "server_epochs": 2}, lambda means: 3 * 2 * 4 * 10 * means),
        # vectors of 4, a hidden layer of 4: all ten prototypes in every step of five class means, and once at the end
        (
            {"name": "fedtgp", "server_epochs": 2, "server_batch": 5},
            lambda means: (3 * 2 * math.ceil(means / 5) + 1) * 10 * (10 * 4 + 4 * 4 + 4 * 4),
        ),
    ],
    ids=["fedgh", "fedtgp"],
)
def test_clock_server_that_trains_on_class_means_adds_its_seconds(
    method: dict[str, Any], macs: Callable[[int], int], run: Callable[..., Any]
) -> None:
    """By hand: two devices of six examples upload at most six class means each, and four of twelve ten each."""
    for devices, examples in ((2, 6), (4, 12)):
        settings = dict(method)
        made = METHODS[settings.pop("name")](**settings)
        assert made.server_macs(size(1.0), [examples] * devices) == macs(devices * min(examples, 10))
    change: dict[str, Any] = {"tiers": [{**TIERS[0], "share": 1.0}], "method": method, "rounds": 1}
    assert clock_of(run("unknown", **change)) == []
    slow, fast = (clock_of(run(str(speed), **change, fleet={"server_speed": speed}))[0] for speed in (1.0, 1e30))
    four_devices = macs(4 * 10)
    assert slow - fast == pytest.approx(four_devices)


def test_clock_alignment_loss_adds_probe_pass_per_step(run: Callable[..., Any]) -> None:
    kernel = {"name": "fedhenn", "strength": 1.0, "growth": "none", "kernels_on": "devices", "probe_size": 50}
    alone, drawn = (
        clock_of(run(name, tiers=[{"name": "all", "share": 1.0, "speed": 1.0, "bandwidth": 1e30}], rounds=1,
                     method={**kernel, "last_round": False, **more}, data__public={"examples": 60}))[0]
        for name, more in (("some", {"probe_batch": 1}), ("all", {}))
    )  # fmt: skip
    steps = 4  # 344 examples in batches of 100
    assert drawn - alone == pytest.approx(3 * compute_cost(size(1.0)).macs * steps * 49)

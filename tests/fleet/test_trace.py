"""Who is there when, and how fast: from files in both forms, and drawn."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from fedloom.fleet import Fleet, draw_cohort, make_tiers
from fedloom.fleet.sampling import ALWAYS, AvailabilityTrace, InvalidTrace, read_trace
from fedloom.fleet.speed import DeviceSpeed, from_file, lognormal
from fedloom.fleet.tiers import region_name, tier_regions


@pytest.fixture
def fleet(tiny_model):
    models = [("large", tiny_model("mlp")), ("small", tiny_model("mlp", width=0.5))]
    return Fleet(make_tiers(models), (0.5, 0.5), 20, seed=3)


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_read_trace_json_and_npz_are_equivalent(tmp_path):
    table = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=bool)
    np.savez(tmp_path / "trace.npz", available=table)
    spans = {"0": [[1, 2], [4, 4]], "1": [], "2": [[1, 4]]}
    as_json = read_trace(written(tmp_path / "trace.json", {"available": spans, "period": 4}), 3)
    as_npz = read_trace(tmp_path / "trace.npz", 3)
    for number in range(1, 13):  # three times round
        expected = [bool(one) for one in table[:, (number - 1) % 4]]
        assert [as_json.is_available(index, number) for index in range(3)] == expected
        assert [as_npz.is_available(index, number) for index in range(3)] == expected


def test_trace_without_period_ends_and_unlisted_device_is_available(tmp_path):
    trace = read_trace(written(tmp_path / "t.json", {"available": {"01": [[2, 3]]}}), 2)
    assert [trace.is_available(1, number) for number in range(1, 6)] == [False, True, True, False, False]
    assert all(trace.is_available(0, number) for number in range(1, 6))


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"available": [1]},
        {"available": {"x": []}},
        {"available": {"0": [[2, 1]]}},
        {"available": {"0": [[0, 1]]}},
        {"available": {"0": [[1.5, 2]]}},
        {"available": {"0": [[1]]}},
        {"available": {"7": [[1, 2]]}},
        {"available": {}, "period": 0},
    ],
)
def test_read_trace_invalid_json_is_refused(content, tmp_path):
    with pytest.raises(InvalidTrace):
        read_trace(written(tmp_path / "t.json", content), 3)


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": np.ones((2, 2), bool)},
        {"available": np.ones((2, 2))},
        {"available": np.ones(2, bool)},
        {"available": np.ones((4, 2), bool)},
        {"available": np.array([[{}]], dtype=object)},
    ],
)
def test_read_trace_invalid_npz_is_refused(arrays, tmp_path):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InvalidTrace):
        read_trace(tmp_path / "t.npz", 3)


@pytest.mark.parametrize("name", ["t.json", "t.npz"])
def test_read_trace_missing_or_other_file_is_refused(name, tmp_path):
    with pytest.raises(InvalidTrace, match="no file"):
        read_trace(tmp_path / name, 3)
    (tmp_path / name).write_bytes(b"\x80\x04 no trace")
    with pytest.raises(InvalidTrace):
        read_trace(tmp_path / name, 3)


def test_draw_cohort_unavailable_device_is_replaced_by_the_next(fleet):
    names = {number: [one.name for one in draw_cohort(fleet, 0.25, number)] for number in range(1, 9)}
    for number, before in names.items():
        gone = int(before[0])
        after = draw_cohort(fleet, 0.25, number, AvailabilityTrace({gone: ()}))
        assert len(after) == 5
        assert set(before) - {one.name for one in after} == {before[0]}
    assert draw_cohort(fleet, 0.25, 1, AvailabilityTrace(dict.fromkeys(range(20), ()))) == []


def test_draw_cohort_over_selection_extends_the_cohort(fleet):
    for number in range(1, 9):
        few, many = draw_cohort(fleet, 0.25, number), draw_cohort(fleet, 0.25, number, ALWAYS, 0.3)
        assert (len(few), len(many)) == (5, 7)  # ceil(6.5)
        assert {one.name for one in few} < {one.name for one in many}


def test_lognormal_factors_have_median_one(fleet):
    crowd = Fleet(fleet.tiers, fleet.shares, 2000, seed=1)
    speeds = [math.log(pace.speed) for pace in lognormal(crowd, speed=0.5, bandwidth=0.0).values()]
    assert statistics.fmean(speeds) == pytest.approx(0.0, abs=0.05)
    assert statistics.stdev(speeds) == pytest.approx(0.5, abs=0.03)
    assert {pace.bandwidth for pace in lognormal(crowd, speed=0.5, bandwidth=0.0).values()} == {1.0}
    assert lognormal(fleet) == lognormal(fleet)


def test_from_file_factors_are_read_and_checked(fleet, tmp_path):
    path = written(tmp_path / "p.json", {"3": {"speed": 0.25}, "11": {"bandwidth": 2}})
    assert from_file(fleet, path=str(path)) == {"03": DeviceSpeed(0.25, 1.0), "11": DeviceSpeed(1.0, 2.0)}
    for wrong in ({"30": {}}, {"1": {"speed": 0}}, {"1": {"sped": 1}}, {"1": 2}, []):
        with pytest.raises(ValueError, match=r"q\.json"):
            from_file(fleet, path=str(written(tmp_path / "q.json", wrong)))


def test_tier_regions_group_weights_by_tiers(fleet, tiny_model):
    assert {region_name(region) for region in tier_regions(fleet)} == {"large", "large+small"}
    apart = make_tiers([("a", tiny_model("mlp")), ("b", tiny_model("convnet"))])
    named = {region_name(region) for region in tier_regions(Fleet(apart, (0.5, 0.5), 4, seed=0))}
    assert {"a", "b"} <= named

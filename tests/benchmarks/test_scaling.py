"""The scaling tables, at sizes that take no time."""

import json

import pytest

from benchmarks import cell, scaling


@pytest.mark.parametrize("workers", [1, 2])
def test_cell_measure_has_seconds_and_memory(workers: int) -> None:
    found = cell.measure(levels="e", fleet=20, active=10, steps=1, rounds=2, workers=workers)
    assert len(found["rounds"]) == 2
    assert found["megabytes"] > 10
    assert workers == 1 or found["worker_megabytes"] > 10


def test_axes_change_one_setting_at_a_time() -> None:
    for axis, _, work in scaling.axes(quick=False, cores=2):
        moved = {key for key in work if work[key] != scaling.BASE[key]}
        assert len(moved - ({"active"} if axis == "devices in the fleet" else set())) <= 1
        assert work["active"] <= work["fleet"]


def test_scaling_main_writes_json_and_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    answer = {"rounds": [9.0, 2.0, 4.0], "megabytes": 100.0, "worker_megabytes": 50.0}
    monkeypatch.setattr(scaling, "run_module", lambda module, work: answer)
    scaling.main(["--quick", "--format", "json"])
    rows = json.loads(capsys.readouterr().out)["data"]["scaling"]
    assert {row["axis"] for row in rows} == {"active devices", "devices in the fleet", "rounds", "width", "workers"}
    assert {(row["seconds_per_round"], row["first"], row["megabytes"]) for row in rows} == {(3.0, 9.0, 100.0)}
    scaling.main(["--quick"])
    assert "MB per worker" in capsys.readouterr().out

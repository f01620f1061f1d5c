"""Equal workload must be equal, and a system that is not there must not stop the others."""

import json
import sys

import pytest
import torch

from benchmarks.isolated import ProcessFailed, run_module
from benchmarks.peers import compare, fedloom_simulation, plain_loop
from benchmarks.peers.workload import BATCH, Laps, Workload, device_examples, initial_weights

TINY = Workload("tiny", (2, 3), devices=9, steps=1, rounds=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_peers_fedloom_and_plain_loop_end_with_equal_weights(workers: int) -> None:
    """With one batch a device its order does not matter, so all sides must come to the same weights."""
    workload, laps = Workload(**{**vars(TINY), "workers": workers}), Laps()
    ours, theirs = fedloom_simulation.run_rounds(workload, laps), plain_loop.rounds(workload, Laps())
    assert len(laps.seconds) == workload.rounds
    for name in initial_weights(workload):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(ours[name], weight) for name, weight in initial_weights(workload).items())


def test_device_examples_have_every_label() -> None:
    held = [device_examples(TINY, device)[1] for device in range(TINY.devices)]
    assert [len(labels) for labels in held] == [BATCH] * TINY.devices
    assert all(labels.sort().values.tolist() == list(range(10)) for labels in held)


def test_peers_missing_system_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(compare, "has_modules", lambda python, modules: False)
    monkeypatch.setattr(compare, "run_module", lambda *arguments: {"rounds": [3.0, 2.0], "loss": 1.0, "version": "1"})
    compare.main(["--quick", "--format", "json"])
    rows = json.loads(capsys.readouterr().out)["data"]["peers"]
    assert {row["status"] for row in rows if row["peer"] in ("flower", "pfl")} == {"not installed"}
    assert all(row["over_plain"] == row["fedloom_over"] == 1 for row in rows if row["peer"] == "plain")
    compare.main(["--quick"])
    assert "--flower-python" in capsys.readouterr().out


def test_peers_failing_system_is_reported_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(module: str, *arguments: object) -> dict[str, object]:
        asked.append(module)
        if module.endswith("flower_simulation"):
            raise ProcessFailed("no ray")
        return {"rounds": [3.0, 2.0], "loss": 1.0, "version": "1"}

    monkeypatch.setattr(compare, "run_module", fail)
    systems = [
        compare.System("plain", "plain_loop"),
        compare.System("fedloom", "fedloom_simulation"),
        compare.System("flower", "flower_simulation"),
    ]
    found = compare.measure(TINY, systems, repeats=2)
    assert found[-1]["status"] == "failed: no ray"
    assert asked.count("benchmarks.peers.flower_simulation") == 1
    assert "failed: no ray" in compare.format_rows(found)


def test_has_modules_asks_the_interpreter() -> None:
    assert compare.has_modules(sys.executable, ["json", "torch"])
    assert not compare.has_modules(sys.executable, ["json", "no_such_module"])
    assert not compare.has_modules("/no/such/python", ["json"])


def test_run_module_without_result_raises() -> None:
    with pytest.raises(ProcessFailed, match="no_such_module"):
        run_module("benchmarks.no_such_module", {})

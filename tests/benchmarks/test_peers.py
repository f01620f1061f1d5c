"""Equal work must be equal, and a system that is not there must not stop the others."""

import json
import sys

import pytest
import torch

from benchmarks.apart import Failed, ask
from benchmarks.peers import compare, loom, ordinary
from benchmarks.peers.work import BATCH, Block, Laps, initial, own

TINY = Block("tiny", (2, 3), devices=9, steps=1, rounds=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_fedloom_ends_where_the_ordinary_loop_ends(workers: int) -> None:
    """With one batch a device its order does not matter, so all sides must come to the same weights."""
    work, laps = Block(**{**vars(TINY), "workers": workers}), Laps()
    ours, theirs = loom.rounds(work, laps), ordinary.rounds(work, Laps())
    assert len(laps.seconds) == work.rounds
    for name in initial(work):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(ours[name], weight) for name, weight in initial(work).items())


def test_devices_share_out_all_examples() -> None:
    held = [own(TINY, device)[1] for device in range(TINY.devices)]
    assert [len(labels) for labels in held] == [BATCH] * TINY.devices
    assert all(labels.sort().values.tolist() == list(range(10)) for labels in held)


def test_a_system_that_is_not_there_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(compare, "has", lambda python, modules: False)
    monkeypatch.setattr(compare, "ask", lambda *said: {"rounds": [3.0, 2.0], "loss": 1.0, "version": "1"})
    compare.main(["--quick", "--format", "json"])
    rows = json.loads(capsys.readouterr().out)["data"]["peers"]
    assert {row["status"] for row in rows if row["peer"] in ("flower", "pfl")} == {"not installed"}
    assert all(row["over_plain"] == row["fedloom_over"] == 1 for row in rows if row["peer"] == "plain")
    compare.main(["--quick"])
    assert "--flower-python" in capsys.readouterr().out


def test_a_peer_that_fails_says_why_and_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(module: str, *said: object) -> dict[str, object]:
        asked.append(module)
        if module.endswith("flower"):
            raise Failed("no ray")
        return {"rounds": [3.0, 2.0], "loss": 1.0, "version": "1"}

    monkeypatch.setattr(compare, "ask", fail)
    runners = [compare.Side("plain", "ordinary"), compare.Side("fedloom", "loom"), compare.Side("flower", "flower")]
    found = compare.measured(TINY, runners, repeats=2)
    assert found[-1]["status"] == "failed: no ray"
    assert asked.count("benchmarks.peers.flower") == 1
    assert "failed: no ray" in compare.text(found)


def test_interpreters_are_asked_for_their_modules() -> None:
    assert compare.has(sys.executable, ["json", "torch"])
    assert not compare.has(sys.executable, ["json", "no_such_module"])
    assert not compare.has("/no/such/python", ["json"])


def test_a_process_without_an_answer_is_a_failure() -> None:
    with pytest.raises(Failed, match="no_such_module"):
        ask("benchmarks.no_such_module", {})

"""A run that too few devices answer ends with exit code 3 and the reason."""

import json

import pytest

from fedloom.runs.folder import read_manifest, read_rows


@pytest.mark.parametrize("format", ["text", "json"])
def test_run_five_failed_rounds_are_exit_3(format, fedloom, write, tmp_path):
    write(("rounds = 2", "rounds = 9"), ("[method]", "[faults]\ndropout = 0.5\nquorum = 0.8\n[method]"))
    result = fedloom("run", "my.toml", "--out", "run", "--format", format)
    assert result.code == 3
    if format == "json":
        assert result.failure["error_code"] == "NO_QUORUM"
        assert "5 rounds in a row failed" in result.failure["message"]
        assert "events.jsonl" in result.failure["hint"]
    else:
        assert "error NO_QUORUM: 5 rounds in a row failed" in result.err
        assert "Traceback" not in result.err
    run = tmp_path / "run"
    assert read_manifest(run)["status"] == "failed"
    assert {row.round for row in read_rows(run)} == {1, 2, 3, 4, 5}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert {one["code"] for one in events} == {"SILENT", "QUORUM"}
    assert all(one.keys() == {"round", "device", "code", "reason"} for one in events)


def test_run_outage_of_unknown_tier_is_refused(fedloom, write):
    write(("[method]", "[faults]\noutages = [{ tier = 'smal', from = 1, to = 2 }]\n[method]"))
    result = fedloom("run", "my.toml")
    assert result.code == 4
    (issue,) = result.issues
    assert (issue.code, issue.hint) == ("RECIPE_NAME", "did you mean 'small'?")


def test_compare_known_speeds_give_seconds_to_target(fedloom, write):
    write(
        ("width = 1.0", "width = 1.0\nspeed = 1e6\nbandwidth = 1e4"),
        ("width = 0.5", "width = 0.5\nspeed = 1e6\nbandwidth = 1e4"),
        ("[method]", '[compare]\nbaseline = "half"\n[compare.arms]\nhalf = ["faults.dropout=0.5"]\n[method]'),
    )
    result = fedloom("compare", "my.toml", "--seeds", "1", "--format", "json", "--quiet")
    assert result.code == 0
    for one in result.data["targets"]:
        assert len(one["seconds"]) == 1
        assert one["seconds"][0] is None or one["seconds"][0] > 0

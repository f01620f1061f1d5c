"""Participation, fleet and CKA files of a run, the same for any number of workers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from fedloom.analysis.trained import ModelSelector, select_model
from fedloom.api.run import Run
from fedloom.evaluation.cka import cka_map, features
from fedloom.recipe.registries import Registries
from fedloom.runs.resume import open_finished_run

Go = Callable[..., Run]


def lines(run: Run, name: str = "participation.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / name).read_text().splitlines()]


def test_participation_each_asked_device_is_listed_once(run: Go) -> None:
    done = run(rounds=2, data__devices=6, fleet={"participation": 0.5})
    for number in (1, 2):
        names = [name for line in lines(done) if line["round"] == number for name in line["devices"]]
        assert len(names) == len(set(names)) == 3


def test_participation_bytes_sum_to_rows(run: Go) -> None:
    done = run(rounds=2)
    for number in (1, 2):
        met = [line for line in lines(done) if line["round"] == number]
        moved = {row.metric: row.value for row in done.rows() if row.round == number and not row.candidate}
        assert sum(line["bytes_down"] for line in met) == moved["bytes_down"]
        assert sum(sum(line["bytes_up"].values()) for line in met) == moved["bytes_up"]
        assert {bundle for line in met for bundle in line["bytes_up"]} == {"weights", "labels"}


def test_participation_outcome_of_lost_device_is_its_event(run: Go) -> None:
    done = run(rounds=3, data__devices=8, faults={"dropout": 0.3, "corrupt": {"devices": 1, "how": "nan"}})
    found = {(line["round"], name): line["outcome"] for line in lines(done) for name in line["devices"]}
    events = {(one["round"], one["device"]): one["code"] for one in lines(done, "events.jsonl") if one["device"]}
    assert set(events.values()) >= {"SILENT", "NONFINITE"}
    assert {place: outcome for place, outcome in found.items() if outcome != "admitted"} == events


def test_participation_norms_are_min_median_max(run: Go) -> None:
    done = run(rounds=1)
    for line in lines(done):
        least, median, most = line["norms"]
        assert 0 < least <= median <= most


def test_participation_empty_upload_has_no_norm(run: Go) -> None:
    done = run(rounds=1, method={"name": "standalone"})
    assert all(line["bytes_up"] == {} and "norms" not in line for line in lines(done))


def test_participation_private_run_has_no_norms(run: Go) -> None:
    pytest.importorskip("dp_accounting")
    done = run(
        rounds=1, fleet={"participation": 0.5, "sampling": "poisson"}, model__normalization="group",
        method={"name": "fedavg", "weighting": "uniform"}, tiers=[{"name": "all", "share": 1.0}],
        privacy={"clip": 1.0, "noise": 1.0},
    )  # fmt: skip
    assert all("norms" not in line for line in lines(done))


def test_participation_is_independent_of_workers(run: Go) -> None:
    import fedloom

    first = run("first", rounds=2)
    second = fedloom.run(str(first.folder / "recipe.toml"), out=first.folder.parent / "second", workers=2)
    assert lines(first) == lines(second)
    assert [line["round"] for line in lines(second, "timings.jsonl")] == [1, 2]


def test_timings_have_their_own_file(run: Go) -> None:
    (line, *_) = lines(run(rounds=1), "timings.jsonl")
    assert list(line) == ["round", "seconds", "evaluation_seconds", "saving_seconds", "peak_memory"]
    assert line["seconds"] >= line["evaluation_seconds"] > 0


def test_summarize_fleet_lists_tiers_devices_and_label_counts(run: Go) -> None:
    done = run(rounds=1, data__partition={"kind": "label_shards", "labels_per_device": 5})
    summary = json.loads((done.folder / "fleet.json").read_text())
    assert [tier["name"] for tier in summary["tiers"]] == ["large", "small"]
    assert summary["tiers"][0]["parameters"] > summary["tiers"][1]["parameters"] > 0
    assert summary["tiers"][0]["macs"] > summary["tiers"][1]["macs"] > 0
    assert summary["regions"] == [["large"], ["large", "small"]]
    assert summary["device_tiers"] == ["large", "large", "small", "small"]
    held = json.loads((done.folder / "partition.json").read_text())["train"]
    assert [sum(line) for line in summary["holdings"]["counts"]] == [len(rows) for rows in held]
    assert all(sum(count > 0 for count in line) <= 5 for line in summary["holdings"]["counts"])
    assert summary["own_names"] == []


def test_tier_cka_compares_server_models(run: Go) -> None:
    done = run(rounds=1)
    same, other = json.loads((done.folder / "cka.json").read_text())
    assert (same["tier"], same["against"], other["tier"]) == ("large", "large", "small")
    assert same["cka"][-1][-1] == 1.0
    assert 0 <= other["cka"][-1][-1] < 1


@pytest.mark.parametrize(("method", "workers"), [("standalone", 1), ("standalone", 2), ("fedrep", 1)])
def test_tier_cka_without_server_models_uses_device_models(run: Go, method: str, workers: int) -> None:
    """Compared with models read from the checkpoint. The first devices of the tiers are 0 and 2."""
    done = run(options={"workers": workers}, rounds=1, method={"name": method})
    experiment = open_finished_run(done.folder, Registries(), done.data)
    x = experiment.dataset.preparation(experiment.dataset.test.x[:128])
    seen = []
    for device in ("0", "2"):
        kept = select_model(done.folder, experiment, ModelSelector(device=device), Registries(), done.data)
        seen.append(features(kept.model, kept.weights, x))
    found = json.loads((done.folder / "cka.json").read_text())
    assert [one["layers"] for one in found] == [list(one) for one in seen]
    for one, maps in zip(found, seen, strict=True):
        assert one["cka"] == [pytest.approx(line, abs=1e-5) for line in cka_map(maps, seen[0])]


def test_tier_cka_prefers_device_with_state(run: Go) -> None:
    done = run(rounds=1, method={"name": "standalone"}, data__devices=8, fleet={"participation": 0.25}, seed=1)
    asked = {name for line in lines(done) for name in line["devices"]}
    assert "0" not in asked  # else this would test nothing
    experiment = open_finished_run(done.folder, Registries(), done.data)
    x = experiment.dataset.preparation(experiment.dataset.test.x[:128])
    shown = json.loads((done.folder / "cka.json").read_text())
    first = min(asked)
    kept = select_model(done.folder, experiment, ModelSelector(device=first), Registries(), done.data)
    maps = features(kept.model, kept.weights, x)
    (own,) = [one for one in shown if one["tier"] == one["against"] == kept.tier]
    assert own["cka"] == [pytest.approx(line, abs=1e-5) for line in cka_map(maps, maps)]

"""Arms with as many rounds as the first one's bytes pay for."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedloom
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.folder import read_rows
from fedloom.studies.budget import with_rounds
from fedloom.studies.compare import plan_comparison
from tests.run_fixtures import small

CONTROLS = ["standalone", "small-for-all", "drop-the-small"]


def equal_bytes(**changes: Any) -> dict[str, Any]:
    schedule = {"batch_size": 100, "lr_schedule": {"kind": "cosine", "rounds": 6, "warmup": 2}}
    return small(rounds=6, training=schedule, compare={"rounds_by": "bytes"}, **changes)


def moved(folder: Path) -> float:
    return sum(row.value for row in read_rows(folder) if row.metric in ("bytes_down", "bytes_up"))


def test_comparison_by_bytes_gives_arms_the_rounds_that_the_first_ones_bytes_pay_for(tmp_path: Path) -> None:
    loaded = load(equal_bytes(), Registries())
    planned = plan_comparison(loaded, Registries(), 1, CONTROLS, tmp_path / "home", tmp_path)
    rounds = {name: each[0].loaded.recipe.rounds for name, each in planned.experiments.items()}
    assert rounds["heterofl"] == rounds["standalone"] == 6  # alone devices send nothing
    assert rounds["small-for-all"] > rounds["heterofl"]
    for name, (experiment,) in planned.experiments.items():
        recipe = experiment.loaded.recipe
        assert recipe.training.lr_schedule["rounds"] == rounds[name]
        assert recipe.training.lr_schedule["warmup"] == max(1, round(2 * rounds[name] / 6))
        assert recipe.evaluation.dense_last == 0.1


def test_compare_by_bytes_counts_nothing_beyond_them_and_resume_remembers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = equal_bytes(data__devices=4)
    result = fedloom.compare(document, seeds=2, controls=["small-for-all"], out=tmp_path / "home")
    budget, spent = (moved(tmp_path / "home" / arm / "seed-0") for arm in ("heterofl", "small-for-all"))
    last = max(row.round for row in read_rows(tmp_path / "home" / "small-for-all" / "seed-0"))
    assert spent <= budget * (1 + 1 / last)  # one round more or less
    assert spent > budget * (1 - 2 / last)
    lines = [line for line in result.verdict if line.startswith("at equal bytes")]
    assert len(lines) == 2
    assert json.loads((tmp_path / "home" / "comparison.json").read_text())["equal"] == "bytes"
    again = fedloom.resume(tmp_path / "home")
    assert again.verdict == result.verdict


@given(rounds=st.integers(1, 200), before=st.integers(1, 60), every=st.integers(1, 60))
def test_with_rounds_stretches_schedule_and_evaluations(rounds: int, before: int, every: int) -> None:
    schedule = {"kind": "milestones", "rounds": [before, 2 * before]}
    document = small(rounds=3 * before, training={"lr_schedule": schedule}, evaluation={"every": every})
    recipe = with_rounds(load(document, Registries()), rounds).recipe
    assert recipe.rounds == rounds
    first, second = recipe.training.lr_schedule["rounds"]
    assert (first, second) == tuple(max(1, round(at * rounds / (3 * before))) for at in (before, 2 * before))
    assert 1 <= recipe.evaluation.every <= max(1, round(every * rounds / (3 * before)))

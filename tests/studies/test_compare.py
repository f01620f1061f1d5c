"""A comparison that is interrupted and resumed has the same result, and finished runs are not repeated."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.folder import read_manifest
from fedloom.runs.resume import find_newest_run, read_status, verify
from fedloom.studies.compare import (
    Comparison,
    PendingRun,
    is_comparison,
    plan_comparison,
    reopen_comparison,
    run_side_by_side,
)
from tests.chaos import recipe

CONTROLS = ["standalone", "drop-the-small"]


def planned(home: Path) -> Comparison:
    return plan_comparison(load(recipe("heterofl", rounds=4), Registries()), Registries(), 2, CONTROLS, home, home)


def finished(home: Path) -> dict[str, str]:
    folders = [path.parent for path in home.glob("*/*/*.json")]
    manifests = {folder.relative_to(home).as_posix(): read_manifest(folder) for folder in folders}
    return {name: one["sha256"] + one["devices_sha256"] for name, one in manifests.items() if "sha256" in one}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    comparison = planned(tmp_path_factory.mktemp("whole") / "home")
    assert len(list(comparison.rounds())) == 2 * 3 * 4
    return comparison


@pytest.mark.parametrize("steps", [1, 8, 21, 23])
def test_comparison_interrupted_and_reopened_has_same_result(tmp_path: Path, complete: Comparison, steps: int) -> None:
    begun = planned(tmp_path / "home").rounds()
    for _ in range(steps):
        next(begun)
    begun.close()  # type: ignore[attr-defined]
    assert is_comparison(tmp_path / "home") and find_newest_run(tmp_path) == tmp_path / "home"
    again = reopen_comparison(tmp_path / "home", Registries(), tmp_path, 1)
    assert len(list(again.rounds())) <= 24 - steps + 1  # the last step may be repeated
    assert finished(tmp_path / "home") == finished(complete.home)
    assert again.result() == complete.result()
    assert read_manifest(tmp_path / "home")["status"] == "finished"


def test_comparison_reopened_does_not_repeat_finished_runs(complete: Comparison) -> None:
    before = finished(complete.home)
    again = reopen_comparison(complete.home, Registries(), complete.home, 1)
    assert list(again.rounds()) == []
    assert finished(complete.home) == before


def test_comparison_reopened_with_changed_recipe_is_refused(tmp_path: Path) -> None:
    begun = planned(tmp_path / "home").rounds()
    for _ in range(3):
        next(begun)
    begun.close()  # type: ignore[attr-defined]
    manifest = tmp_path / "home" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"batch_size": 6', '"batch_size": 3'))
    with pytest.raises(RecipeError, match="RECIPE_CHANGED"):
        list(reopen_comparison(tmp_path / "home", Registries(), tmp_path, 1).rounds())


def test_verify_of_comparison_is_refused(complete: Comparison) -> None:
    with pytest.raises(RecipeError, match="this is a comparison, not a run"):
        verify(complete.home, Registries(), complete.home, 1, 1)


def test_read_status_of_comparison_names_the_recipes_own_run_first(complete: Comparison) -> None:
    with pytest.raises(RecipeError) as caught:
        read_status(complete.home)
    own = next(iter(complete.experiments))
    assert caught.value.issues[0].hint.startswith(f"pass one of its runs: {complete.home / own}")


class GroupLog:
    """A lockstep that notes which runs it is given together."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def steps(self, runs: Mapping[str, Iterator[Any]]) -> Iterator[tuple[str, Any]]:
        self.groups.append(list(runs))
        for name, rounds in runs.items():
            for one in rounds:
                yield name, one


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([4, 4, 2], [[0, 1, 2]]),
        ([4, 4, 3], [[0, 1], [2]]),
        ([11, 1, 11, 9], [[0], [1], [2], [3]]),
        ([], [[]]),
    ],
    ids=["all fit", "last does not fit", "too large ones run alone", "nothing to run"],
)
def test_run_side_by_side_groups_runs_that_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], groups: list[list[int]]
) -> None:
    """A run starts when its group does, and the group shares the budget for the states of devices."""
    monkeypatch.setattr("fedloom.studies.compare.MEMORY_LIMIT", 10)
    lockstep, started = GroupLog(), list[int]()

    def pending(number: int, size: int) -> PendingRun:
        def start() -> Iterator[Any]:
            started.append(number)
            return iter([number])

        simulator = SimpleNamespace(client_states=SimpleNamespace(budget=12))
        return PendingRun(str(number), cast(Any, simulator), size, start)

    runs = [pending(number, size) for number, size in enumerate(sizes)]
    done = []
    for name, _ in run_side_by_side(cast(Any, lockstep), runs):
        done.append(name)
        assert started == [one for group in groups[: len(lockstep.groups)] for one in group]
    assert done == [str(number) for number in range(len(sizes))]
    assert lockstep.groups == [[str(number) for number in group] for group in groups]
    budgets = [run.simulator.client_states.budget for run in runs]
    assert budgets == [12 // len(group) for group in groups for _ in group]


def test_comparison_of_arms_that_do_the_same_says_so(tmp_path: Path) -> None:
    arms = {"other-checkpoints": ["checkpoints.every=2"], "other-rate": ["training.optimizer.lr=0.01"]}
    document = {**recipe("heterofl", rounds=1), "compare": {"arms": arms}}
    comparison = plan_comparison(load(document, Registries()), Registries(), 1, [], tmp_path / "home", tmp_path)
    list(comparison.rounds())
    (line,) = [line for line in comparison.result().verdict if "exactly the same" in line]
    assert (
        line == "heterofl and other-checkpoints did exactly the same: their models are equal to the bit; "
        "they differ only in checkpoints.every, which has no effect here"
    )

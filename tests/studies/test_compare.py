"""A comparison that is interrupted and resumed has the same result, and finished runs are not repeated."""

from pathlib import Path

import pytest

from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.runs.folder import read_manifest
from fedloom.runs.resume import find_newest_run, verify
from fedloom.studies.compare import Comparison, is_comparison, plan_comparison, reopen_comparison
from tests.chaos import recipe

CONTROLS = ["standalone", "drop-the-small"]


def planned(home: Path) -> Comparison:
    return plan_comparison(load(recipe("heterofl", rounds=4), Registry()), Registry(), 2, CONTROLS, home, home)


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
    again = reopen_comparison(tmp_path / "home", Registry(), tmp_path, 1)
    assert len(list(again.rounds())) <= 24 - steps + 1  # the last step may be repeated
    assert finished(tmp_path / "home") == finished(complete.home)
    assert again.result("global") == complete.result("global")
    assert read_manifest(tmp_path / "home")["status"] == "finished"


def test_comparison_reopened_does_not_repeat_finished_runs(complete: Comparison) -> None:
    before = finished(complete.home)
    again = reopen_comparison(complete.home, Registry(), complete.home, 1)
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
        list(reopen_comparison(tmp_path / "home", Registry(), tmp_path, 1).rounds())


def test_verify_of_comparison_is_refused(complete: Comparison) -> None:
    with pytest.raises(RecipeError, match="this is a comparison, not a run"):
        verify(complete.home, Registry(), complete.home, 1, 1)

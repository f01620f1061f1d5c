"""Where data sets and runs lie."""

from pathlib import Path

import pytest

from fedloom.recipe.errors import RecipeError
from fedloom.recipe.paths import resolve_data_folder, choose_output_folder


def test_the_data_folder(monkeypatch):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert resolve_data_folder() == Path("data")
    monkeypatch.setenv("FEDLOOM_DATA", "/elsewhere")
    assert resolve_data_folder() == Path("/elsewhere")
    assert resolve_data_folder("here") == resolve_data_folder(Path("here")) == Path("here")
    assert resolve_data_folder("~/sets") == Path.home() / "sets"


def test_a_runs_folder_is_named_after_time_and_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = choose_output_folder(None, "heterofl")
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-heterofl")
    assert not folder.exists()


def test_two_runs_of_one_second_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(choose_output_folder(None, "x"))
        found[-1].mkdir(parents=True)
    assert len(set(found)) == 3


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_folder_that_is_there_is_refused(kind, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir() if kind == "folder" else taken.touch()
    with pytest.raises(RecipeError, match="OUT_EXISTS"):
        choose_output_folder(taken, "x")
    assert choose_output_folder(str(tmp_path / "free"), "x") == tmp_path / "free"

"""Folders of data and runs."""

from pathlib import Path

import pytest

from fedloom.recipe.errors import RecipeError
from fedloom.recipe.paths import choose_output_folder, resolve_data_folder


def test_resolve_data_folder_option_beats_environment(monkeypatch):
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert resolve_data_folder() == Path("data")
    monkeypatch.setenv("FEDLOOM_DATA", "/elsewhere")
    assert resolve_data_folder() == Path("/elsewhere")
    assert resolve_data_folder("here") == resolve_data_folder(Path("here")) == Path("here")
    assert resolve_data_folder("~/sets") == Path.home() / "sets"


def test_choose_output_folder_default_is_named_after_time_and_method(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = choose_output_folder(None, "heterofl")
    assert folder.parent == Path("runs")
    assert folder.name.endswith("-heterofl")
    assert not folder.exists()


def test_choose_output_folder_same_second_gives_distinct_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for _ in range(3):
        found.append(choose_output_folder(None, "x"))
        found[-1].mkdir(parents=True)
    assert len(set(found)) == 3


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_choose_output_folder_existing_path_is_refused(kind, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir() if kind == "folder" else taken.touch()
    with pytest.raises(RecipeError, match="OUT_EXISTS"):
        choose_output_folder(taken, "x")
    assert choose_output_folder(str(tmp_path / "free"), "x") == tmp_path / "free"


def test_choose_output_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "a").write_text("")
    with pytest.raises(RecipeError, match="OUT_PLACE"):
        choose_output_folder(tmp_path / "a" / "run", "heterofl")

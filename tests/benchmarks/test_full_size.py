"""A round of a recipe, timed and weighed; here of one that takes no time."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import against, full_size

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["data.max_examples=20", "data.test_examples=20", "model.hidden=[4, 8]"]


@pytest.mark.slow
def test_full_size_main_measures_once_and_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    shutil.copy(RECIPES / "starter.toml", tmp_path / "demo.toml")
    monkeypatch.setattr(full_size, "PAPERS", tmp_path)
    changes = [word for one in SMALL for word in ("--set", one)]
    asked = ["demo", "--home", str(tmp_path / "home"), "--workers", "2", "--format", "json"]
    full_size.main([*asked, *changes])
    (found,) = json.loads(capsys.readouterr().out)["data"]["recipes"]
    assert 0 < found["training"] + found["evaluation"] < found["seconds"]
    assert found["megabytes"] > 50 and found["moved"] > 0
    asked_again = []
    failure = {"recipe": "demo", "seconds": 1.0, "megabytes": 1, "failed": "no"}
    monkeypatch.setattr(full_size, "measure", lambda *arguments: asked_again.append(arguments) or failure)
    full_size.main([*asked, *changes])
    assert json.loads(capsys.readouterr().out)["data"]["recipes"] == [found] and not asked_again
    for _ in range(2):  # the recipe itself is not the trial, and what has failed is tried again
        full_size.main(asked)
    assert len(asked_again) == 2


@pytest.mark.slow
def test_full_size_measure_failure_is_reported(tmp_path: Path) -> None:
    found = full_size.measure("no_such_recipe", tmp_path, 1, [])
    assert "failed" in found and "no_such_recipe" in full_size.format_rows([found])


def test_full_size_default_recipes_exist() -> None:
    assert all((full_size.ROOT / full_size.PAPERS / f"{name}.toml").is_file() for name in full_size.DEFAULT_RECIPES)


def test_against_runs_both_trees_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asked = []

    def measure(name: str, home: Path, workers: int, sets: list[str], tree: Path) -> dict[str, object]:
        asked.append(tree)
        seconds = 2.0 if tree == full_size.ROOT else 8.0
        return {"recipe": name, **dict.fromkeys(against.KEYS, seconds)}

    monkeypatch.setattr(full_size, "measure", measure)
    (tmp_path / "src" / "fedloom").mkdir(parents=True)
    name, papers = "heterofl_mnist", full_size.PAPERS
    (tmp_path / papers).mkdir(parents=True)
    ours = (full_size.ROOT / papers / f"{name}.toml").read_text()
    (tmp_path / papers / f"{name}.toml").write_text(ours.replace("epochs = 5", "epochs = 4"))
    options = [str(tmp_path), name, "--repeats", "2", "--home", str(tmp_path / "home")]
    against.main([*options, "--format", "json"])
    (found,) = json.loads(capsys.readouterr().out)["data"]["recipes"]
    assert asked == [full_size.ROOT, tmp_path] * 2
    assert found["seconds"] == {"ours": 2.0, "theirs": 8.0, "ratio": 0.25, "low": 0.25, "high": 0.25}
    assert found["changed_lines"] == ["-epochs = 4", "+epochs = 5"]
    failure = {"recipe": "demo", "seconds": 1.0, "failed": "no such key"}
    monkeypatch.setattr(full_size, "measure", lambda *arguments: failure)
    against.main(options)
    assert "ours: no such key" in capsys.readouterr().out


def test_against_folder_without_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        against.main([str(tmp_path)])


def test_measure_runs_code_of_given_tree(tmp_path: Path) -> None:
    """A tree whose command fails in its own words, so it was that one that ran."""
    (tmp_path / "src" / "fedloom").mkdir(parents=True)
    (tmp_path / "src" / "fedloom" / "__main__.py").write_text("raise SystemExit('another tree')\n")
    (tmp_path / "src" / "fedloom" / "__init__.py").write_text("")
    assert full_size.measure("demo", tmp_path, 1, [], tmp_path)["failed"] == "another tree"

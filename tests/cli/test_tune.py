"""fedloom tune on the command line."""

import json
from pathlib import Path

import pytest

from fedloom.cli.app import main
from fedloom.recipe.load import dumps
from tests.run_fixtures import small


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    return int(caught.value.code or 0)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(dumps(small(data__max_examples=20)))
    return "small.toml"


def test_tune_writes_choice_and_json_that_resume_repeats(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trials", "2", "--search", "training.optimizer.lr", "--out", "found", "--quiet"]
    assert run("tune", recipe, *options, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["data"]
    assert Path(found["arms"][0]["chosen_recipe"]).is_file()
    assert run("resume", "found", "--quiet", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["data"] == found
    assert run("resume", "found", "--quiet") == 0
    shown = capsys.readouterr().out
    assert "2 trials of training.optimizer.lr on 143 validation examples" in shown and "next: fedloom run" in shown
    assert run("run", str(found["arms"][0]["chosen_recipe"]), "--set", "rounds=1", "--out", "run", "--quiet") == 0


def test_tune_of_unknown_key_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", recipe, "--search", "training.optimizer.rate", "--out", "found") == 4
    assert "SEARCH_KEY" in capsys.readouterr().err and not Path("found").exists()


def test_list_shows_where_a_setting_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "methods", "fedprox") == 0
    assert "0.001..1.0:log" in capsys.readouterr().out

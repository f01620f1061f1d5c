"""The commit recorded with a result."""

import subprocess
from pathlib import Path

from fedloom.studies.reproduce import current_commit


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    command = ["git", *settings, *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_current_commit_ignores_generated_files(tmp_path: Path) -> None:
    results, recipe = tmp_path / "results.json", tmp_path / "inner" / "my.toml"
    recipe.parent.mkdir()
    for file in (results, recipe):
        file.write_text("first\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    here = git(tmp_path, "rev-parse", "--short=10", "HEAD")
    results.write_text("second\n")
    assert current_commit(recipe.parent, [results]) == here
    assert current_commit(recipe.parent) == f"{here}+changes"
    recipe.write_text("second\n")
    assert current_commit(recipe.parent, [results]) == f"{here}+changes"


def test_current_commit_outside_a_repository_is_none(tmp_path: Path) -> None:
    assert current_commit(tmp_path) is None
    assert current_commit(tmp_path / "nowhere") is None

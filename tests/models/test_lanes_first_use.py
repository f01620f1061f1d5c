"""The first use of lane kernels compiles them: it is announced, once for all workers, and works without a cache too."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedloom

pytest.importorskip("numba")
pytestmark = pytest.mark.slow

PACKAGE = Path(fedloom.__file__).parent
MESSAGE = "compiling kernels for this processor"
RECIPE = """
rounds = 1
[data]
dataset = "digits"
devices = 6
max_examples = 12
test_examples = 20
[model]
family = "mlp"
hidden = [8]
[[tiers]]
name = "all"
share = 1.0
[method]
name = "fedavg"
[engine]
kernels = "lanes"
"""


def run(folder: Path, name: str, cache: Path, source: Path = PACKAGE.parent, workers: int = 1) -> tuple[str, str]:
    """Run the recipe in a fresh process: the run's sha256, and what the user reads."""
    (folder / "recipe.toml").write_text(RECIPE)
    command = [sys.executable, "-m", "fedloom", "run", "recipe.toml", "--out", name, "--no-report"]
    made = subprocess.run(
        [*command, "--workers", str(workers)], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(source), "HOME": str(folder)},
    )  # fmt: skip
    return json.loads((folder / name / "manifest.json").read_text())["sha256"], made.stderr


def test_first_use_is_announced_once_and_next_comes_from_cache(tmp_path: Path) -> None:
    """With workers, which are forked after the kernels were compiled."""
    first, read = run(tmp_path, "first", tmp_path / "cache", workers=2)
    assert read.count(MESSAGE) == 1
    for name, workers in (("alone", 1), ("shared", 2)):
        again, read = run(tmp_path, name, tmp_path / "cache", workers=workers)
        assert MESSAGE not in read
        assert again == first


def test_use_without_folder_for_cache_compiles_anyway(tmp_path: Path) -> None:
    """As installed where nothing can be written: files stand where the folders would be, which stops root too."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "fedloom", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src" / "fedloom" / "models" / "lanes" / "__pycache__").write_text("")
    (tmp_path / ".cache").write_text("")
    known, _ = run(tmp_path, "known", tmp_path / "cache")
    found, read = run(tmp_path, "found", Path(os.devnull) / "cache", tmp_path / "src")
    assert MESSAGE in read
    assert found == known


def test_trial_of_model_does_not_import_sympy() -> None:
    """It takes a third of the time that lane kernels from the cache need before the first step."""
    code = (
        "import sys; from dataclasses import replace; from fedloom.testing import tiny_model;"
        "assert replace(tiny_model('mlp'), kernels='lanes').trains_interleaved(); assert 'sympy' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)

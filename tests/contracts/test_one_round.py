"""One round can be read: the files that run in it are counted, and the page that explains it is checked."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import fedloom
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.loop import rounds

SOURCE = Path(fedloom.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "one_round.md"
MOST_FILES, MOST_TO_READ = 35, 12

RECIPE: dict[str, Any] = {
    "rounds": 2,
    "data": {"dataset": "digits", "devices": 4, "max_examples": 20},
    "model": {"family": "convnet", "hidden": [2, 4]},
    "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
    "method": {"name": "heterofl"},
}


def files_of_first_round(tmp_path: Path) -> set[str]:
    """Source files with a function that is called in the first round of HeteroFL, evaluation included."""
    registries, files = Registries(), set[str]()
    running = rounds(assemble(load(RECIPE, registries), registries, tmp_path))

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(str(SOURCE)):
            files.add(Path(file).relative_to(SOURCE).as_posix())

    sys.setprofile(note)
    try:
        next(running)
    finally:
        sys.setprofile(None)
    return files


def test_round_in_process_runs_few_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = files_of_first_round(tmp_path)
    with capsys.disabled():
        print(f"\n{len(files)} source files run in a round:", *sorted(files))
    assert {"runs/loop.py", "client/fit.py", "client/losses.py"} <= files
    assert len(files) <= MOST_FILES


def test_one_round_page_names_files_that_run_in_order(tmp_path: Path) -> None:
    named = re.findall(r"^\d+\. `([\w/]+\.py)`", PAGE.read_text("utf-8"), re.MULTILINE)
    assert 0 < len(named) <= MOST_TO_READ
    assert len(set(named)) == len(named)
    assert set(named) <= files_of_first_round(tmp_path)

"""What the README says of the first run: its output, and that no tier loses to a simple alternative beyond noise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens.test_bits import GOLDEN, machine

ROOT = Path(__file__).parents[2]


def shown_output() -> list[str]:
    block = re.search(r"```\n(arm  .*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block
    return block[1].splitlines()


def losses(output: list[str]) -> list[str]:
    """Lines of the verdict in which the method is worse than an alternative beyond noise."""
    return [
        line for line in output if re.search(r": -[\d.]+ points against .*: (beyond noise|all \d+ seeds agree)", line)
    ]


def without_folder(output: list[str]) -> list[str]:
    return [re.sub(r"runs/[0-9]+-[0-9]+-compare", "runs/", line) for line in output]


def test_losses_finds_verdicts_beyond_noise() -> None:
    lost, won = (f"  small: {sign}8.6 points against small-for-all (± 5.4, 1 seed): " for sign in "-+")
    lines = [f"{lost}beyond noise", f"{won}beyond noise", f"{lost}within noise"]
    assert losses(lines) == [f"{lost}beyond noise"]


def test_readme_first_run_has_no_loss_beyond_noise() -> None:
    assert sum(line.endswith(": within noise") for line in shown_output()) == 3
    assert any("is within noise of the best simple alternative" in line for line in shown_output())
    assert losses(shown_output()) == []


@pytest.mark.slow
def test_first_run_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """To the digit on the machine of the golden file; elsewhere kernels round differently."""
    command, wide = [sys.executable, "-m", "fedloom", "run", "--no-report"], {**os.environ, "COLUMNS": "80"}
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True, env=wide)
    output = made.stdout.splitlines()
    assert losses(output) == []
    if machine() == GOLDEN["machine"]:
        shown = [line for line in without_folder(shown_output()) if not line.startswith("report: ")]
        assert without_folder(output) == shown

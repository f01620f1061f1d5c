"""What the README says of the first run: its output, and which tiers are better than with a simple alternative."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.goldens.test_bits import known_machine

ROOT = Path(__file__).parents[2]
SHOWN_BY = "machine 1"
WON = ["large", "medium"]


def shown_output() -> list[str]:
    block = re.search(r"```\n(arm  .*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    assert block
    return block[1].splitlines()


def claimed(output: list[str], sign: str) -> list[str]:
    """The tiers for which the verdict claims that the method is better (+) or worse (-) than an alternative."""
    claim = rf"  (\w+): \{sign}[\d.]+ points against .*: (?:beyond noise|all \d+ seeds agree)"
    return [found[1] for line in output if (found := re.fullmatch(claim, line))]


def without_folder(output: list[str]) -> list[str]:
    return [re.sub(r"runs/[0-9]+-[0-9]+-compare", "runs/", line) for line in output]


def test_claimed_finds_verdicts_beyond_noise() -> None:
    lines = [
        "  large: +8.6 points against small-for-all (± 5.4, 1 seed): beyond noise",
        "  medium: +4.0 points against drop-the-small (± 6.2, 5 seeds): all 5 seeds agree",
        "  small: -8.6 points against small-for-all (± 5.4, 1 seed): beyond noise",
        "  tiny: -8.6 points against small-for-all (± 9.4, 1 seed): within noise",
    ]
    assert (claimed(lines, "+"), claimed(lines, "-")) == (["large", "medium"], ["small"])


def test_readme_first_run_wins_where_it_says_so_and_loses_nowhere() -> None:
    assert (claimed(shown_output(), "+"), claimed(shown_output(), "-")) == (WON, [])


@pytest.mark.slow
def test_first_run_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """To the digit on one machine of the golden file; elsewhere kernels round differently."""
    command, wide = [sys.executable, "-m", "fedloom", "run", "--no-report"], {**os.environ, "COLUMNS": "80"}
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=True, env=wide)
    output = made.stdout.splitlines()
    assert (claimed(output, "+"), claimed(output, "-")) == (WON, [])
    if known_machine() == SHOWN_BY:
        shown = [line for line in without_folder(shown_output()) if not line.startswith("report: ")]
        assert without_folder(output) == shown

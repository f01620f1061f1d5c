"""A run that is killed repeatedly at random moments gives the same result as an uninterrupted one."""

from pathlib import Path

import pytest

from tests.chaos import FAMILIES, run_chaos


@pytest.mark.parametrize(
    "family", [one if one in ("heterofl", "top_k") else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
def test_resume_killed_run_gives_same_result(family: str, tmp_path: Path) -> None:
    result = run_chaos(family, kills=4, seed=0, home=tmp_path)
    assert result.kills == 4
    assert result.same


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_resume_killed_run_with_workers_gives_same_result(family: str, tmp_path: Path) -> None:
    result = run_chaos(family, kills=4, seed=1, home=tmp_path, workers=2)
    assert result.kills == 4
    assert result.same

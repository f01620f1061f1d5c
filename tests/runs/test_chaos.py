"""A run that is killed at random moments, again and again, ends as if nothing had happened."""

from pathlib import Path

import pytest

from tests.chaos import FAMILIES, story


@pytest.mark.parametrize("family", FAMILIES)
def test_resume_killed_run_gives_same_result(family: str, tmp_path: Path) -> None:
    told = story(family, kills=4, seed=0, home=tmp_path)
    assert told.kills == 4
    assert told.same


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_resume_killed_run_with_workers_gives_same_result(family: str, tmp_path: Path) -> None:
    told = story(family, kills=4, seed=1, home=tmp_path, workers=2)
    assert told.kills == 4
    assert told.same

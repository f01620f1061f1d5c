"""The gallery: one card per run, with its finding, its chart and a link to its report."""

import re
from pathlib import Path

import pytest

from fedloom.reporting.gallery import build_gallery
from fedloom.runs.resume import list_runs
from tests.reporting.synthetic import finals, write_comparison, write_run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_run(tmp_path / "first", finals(80, 60))
    (tmp_path / "first" / "report.html").write_text("the page")
    write_run(tmp_path / "broken <b>", finals(80, 60, status="failed"))
    (tmp_path / "broken <b>" / "recipe.toml").unlink()
    write_comparison(tmp_path / "both", {"heterofl": [finals(90, 80)], "small-for-all": [finals(70, 70)]})
    return tmp_path


def test_gallery_has_a_card_for_every_run(home: Path) -> None:
    html = build_gallery(home, list_runs(home)).replace("\u00a0", " ")
    assert html.count('<li class="run">') == 3
    assert "heterofl reaches an accuracy of 80.0 % on large and 60.0 % on small devices." in html
    assert "heterofl beats the best simple alternative on large devices by 20.0 points" in html
    assert html.count("<svg") == 2 and not re.search(r"https?://", html)


def test_gallery_links_reports_that_exist_and_names_the_command_otherwise(home: Path) -> None:
    html = build_gallery(home, list_runs(home)).replace("\u00a0", " ")
    assert 'href="first/report.html"' in html and "both/report.html" not in html
    assert f"No report yet: <code>fedloom report {home / 'both'}</code>" in html
    assert f"fedloom report {home / 'first'}" not in html


def test_gallery_of_broken_run_says_so_and_escapes_its_name(home: Path) -> None:
    html = build_gallery(home, list_runs(home)).replace("\u00a0", " ")
    assert "It cannot be shown: " in html and "broken &lt;b&gt;" in html and "broken <b>" not in html


def test_gallery_counts_what_has_not_finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert "3 runs; 1 of them has not finished." in build_gallery(home, list_runs(home))
    runs = {folder: manifest for folder, manifest in list_runs(home).items() if manifest["status"] == "finished"}
    assert "2 runs, all finished." in build_gallery(home, runs)
    assert "There is no run here yet" in build_gallery(tmp_path_factory.mktemp("empty"), {})

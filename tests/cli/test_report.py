"""fedloom report, and the page at the end of a run."""

import json

import pytest

import fedloom.cli.report as verb
from fedloom.api import run as api_run
from fedloom.api import verbs  # noqa: F401 - loaded before a test replaces what it imports
from fedloom.reporting.page import build_page
from fedloom.reporting.report_data import read_report_data
from fedloom.runs.folder import read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(fedloom_in):
    call, write, folder = fedloom_in
    write()
    assert call("run", "my.toml", "--out", "run", "--quiet").code == 0
    assert call("compare", "my.toml", "--controls", "standalone", "--out", "both", "--quiet").code == 0
    return call, folder


def test_report_run_writes_page_and_csvs(home):
    call, folder = home
    result = call("report", "run")
    assert (result.code, result.out) == (0, "report: run/report.html\n")
    assert (folder / "run/report.html").read_text().startswith("<!doctype html>")
    assert (folder / "run/figures/learning_rounds.csv").is_file()


def test_report_comparison_writes_one_page(home):
    call, folder = home
    result = call("report", "both", "--format", "json")
    assert (result.code, result.data) == (0, {"report": "both/report.html", "status": "finished"})
    html = (folder / "both/report.html").read_text()
    assert "Paired differences" in html and "fedloom compare my.toml --seeds 1 --controls standalone" in html


def test_report_several_runs_shows_paired_differences(home):
    call, folder = home
    assert call("report", "both/heterofl/seed-0", "both/standalone/seed-0", "--out", "page.html").code == 0
    assert "Paired differences" in (folder / "page.html").read_text()
    assert (folder / "page-figures/differences.csv").is_file()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["report", "nowhere"], "fedloom run my.toml"),
        (["report", "run", "both/heterofl/seed-0"], "--out"),
        (["report", "run", "--test", "other"], "available: global, local"),
    ],
)
def test_report_bad_arguments_are_refused(home, arguments, hint):
    result = home[0](*arguments, "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "RUN_FOLDER"
    assert hint in result.failure["hint"]


def test_report_watch_rewrites_until_finished(home, monkeypatch):
    """tests/reporting checks what the page of an unfinished run shows."""
    call, folder = home
    manifest = folder / "run/manifest.json"
    whole, seen = manifest.read_text(), []

    def write(runs, file, test, metric, refresh):
        seen.append(read_report_data(runs, test))
        page = build_page(seen[-1], refresh=refresh).html
        assert ("This page reloads every 0.5 seconds." in page) == seen[-1].is_running
        return seen[-1]

    def wait(seconds):
        assert seconds == 0.5
        if len(seen) == 2:
            manifest.write_text(whole)

    manifest.write_text(json.dumps({**json.loads(whole), "status": "running"}))
    monkeypatch.setattr(api_run, "write_report", write)
    monkeypatch.setattr(verb.time, "sleep", wait)
    result = call("report", "run", "--watch", "--every", "0.5")
    assert result.code == 0
    first, second = result.err.splitlines()  # what has not changed is not said again
    assert first == "run/report.html is rewritten every 0.5 s until the run is over; Ctrl-C stops watching"
    assert second.startswith("2 of 2 rounds: So far, after 2 of 2 rounds, accuracy on the global test: large ")
    assert [data.is_running for data in seen] == [True, True, False]


def test_run_end_writes_report_unless_disabled(fedloom, write, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLOOM_REPORT")
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("run", "my.toml", "--out", "with")
    assert result.out.endswith("run: with\nreport: with/report.html\n")
    assert (tmp_path / "with/report.html").is_file()
    assert "report" not in fedloom("run", "my.toml", "--out", "without", "--no-report").out
    assert not (tmp_path / "without/report.html").exists()


def test_run_report_failure_is_only_a_warning(fedloom, write, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLOOM_REPORT")
    monkeypatch.setattr(api_run, "write_report", lambda *_: 1 / 0)
    write(("rounds = 2", "rounds = 1"))
    result = fedloom("run", "my.toml", "--out", "run")
    assert result.code == 0
    assert "no report: ZeroDivisionError" in result.err
    assert read_manifest(tmp_path / "run")["status"] == "finished"


@pytest.fixture(scope="module")
def compared(home):
    """One comparison with --format html: (result, folder)."""
    call, folder = home
    arguments = ["--set", "rounds=1", "--controls", "", "--out", "compared", "--no-report", "--quiet"]
    return call("compare", "my.toml", *arguments, "--format", "html"), folder / "compared"


def test_compare_format_html_overrides_no_report(compared):
    result, folder = compared
    assert result.code == 0
    assert result.out == (folder / "report.html").read_text() + "\n"


@pytest.mark.parametrize(
    ("file", "begins"), [("results.md", "| arm |"), ("results.csv", "arm,tier,"), ("results.tex", "\\begin{table}")]
)
def test_compare_writes_all_table_files(compared, file, begins):
    assert (compared[1] / file).read_text().startswith(begins)


def test_compare_format_table_prints_the_file(compared, home):
    """Shown again from the folder of the finished comparison."""
    arguments = ["--set", "rounds=1", "--controls", "", "--out", "again", "--quiet"]
    result = home[0]("compare", "my.toml", *arguments, "--format", "csv")
    assert result.out == (compared[1] / "results.csv").read_text()

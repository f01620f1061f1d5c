"""fedloom report, and the page at the end of a run."""

import json
import re
import sys
import urllib.request

import pytest

import fedloom.cli.report as verb
from fedloom.api import run as api_run
from fedloom.api import verbs  # noqa: F401 - loaded before a test replaces what it imports
from fedloom.reporting import live
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
        (["report", "run", "--test", "other"], "available: global, local"),
    ],
)
def test_report_bad_arguments_are_refused(home, arguments, hint):
    result = home[0](*arguments, "--format", "json")
    assert result.code == 4
    assert result.failure["error_code"] == "RUN_FOLDER"
    assert hint in result.failure["hint"]


def test_report_watch_serves_until_finished(home, monkeypatch):
    """tests/reporting checks what the page of an unfinished run shows."""
    call, folder = home
    manifest = folder / "run/manifest.json"
    whole, seen, opened = manifest.read_text(), [], []

    def write(runs, file, test, metric, refresh):
        seen.append(build_page(read_report_data(runs, test), refresh=refresh))
        assert ("This page updates itself every 0.5 seconds." in seen[-1].html) == seen[-1].is_running
        return seen[-1]

    def wait(seconds):
        assert seconds == 0.5
        with urllib.request.urlopen(opened[0], timeout=5) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        if len(seen) == 2:
            manifest.write_text(whole)

    manifest.write_text(json.dumps({**json.loads(whole), "status": "running"}))
    monkeypatch.setattr(api_run, "write_report", write)
    monkeypatch.setattr(verb.time, "sleep", wait)
    monkeypatch.setattr(verb.webbrowser, "open", opened.append)
    monkeypatch.setattr(live.LiveServer, "wait_until_seen", lambda self, seconds: True)
    result = call("report", "run", "--watch", "--open", "--every", "0.5")
    assert result.code == 0
    first, second = result.err.splitlines()  # what has not changed is not said again
    assert first == f"{opened[0]} shows the run until it is over; Ctrl-C stops watching"
    assert second.startswith("2 of 2 rounds: So far, after 2 of 2 rounds, heterofl reaches an accuracy of ")
    assert [page.is_running for page in seen] == [True, True, False]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(opened[0], timeout=5)


def test_report_watch_of_finished_run_serves_nothing(home):
    result = home[0]("report", "run", "--watch")
    assert (result.code, result.err, result.out) == (0, "", "report: run/report.html\n")


def test_report_open_shows_the_file(home, monkeypatch):
    call, folder = home
    opened = []
    monkeypatch.setattr(verb.webbrowser, "open", opened.append)
    assert call("report", "run", "--open").code == 0
    assert opened == [(folder / "run/report.html").resolve().as_uri()]


def test_report_several_runs_without_out_is_beside_the_first(home):
    call, folder = home
    result = call("report", "run", "both/heterofl/seed-0", "--format", "json")
    assert result.code == 4 and "named twice" in result.failure["message"]  # the same recipe and seed
    result = call("report", "both/heterofl/seed-0", "both/standalone/seed-0", "run", "--format", "json")
    assert result.code == 4
    result = call("report", "both/standalone/seed-0", "run", "--format", "json")
    assert result.data["report"].endswith("both/standalone/report-seed-0-run.html")
    assert "Paired differences" in (folder / "both/standalone/report-seed-0-run.html").read_text()


def test_list_runs_html_writes_a_gallery(home):
    call, folder = home
    result = call("list", "runs", ".", "--html", "--format", "json")
    assert result.data == {"gallery": "index.html", "runs": 2}
    html = (folder / "index.html").read_text()
    assert html.count('<li class="run">') == 2 and 'href="run/report.html"' in html
    assert call("list", "methods", "--html").code == 4


def test_run_open_shows_the_page_while_it_runs(fedloom, write, tmp_path, monkeypatch):
    """The browser is a program that fetches the page it is given, from the process that serves it."""
    script = tmp_path / "browser.py"
    script.write_text(
        "import sys, urllib.request\n"
        "text = urllib.request.urlopen(sys.argv[1]).read().decode()\n"
        f"open({str(tmp_path / 'fetched.html')!r}, 'w').write(text)\n"
    )
    monkeypatch.setenv("BROWSER", f"{sys.executable} {script} %s")
    write(("rounds = 2", "rounds = 40"))
    result = fedloom("run", "my.toml", "--out", "run", "--open")
    assert result.code == 0
    assert re.match(r"http://127\.0\.0\.1:\d+/ shows the run from its first round on", result.err)
    assert "In progress: " in (tmp_path / "fetched.html").read_text()
    assert "In progress: " not in (tmp_path / "run/report.html").read_text()


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

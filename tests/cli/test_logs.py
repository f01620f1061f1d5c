"""fedloom.logs: the package's messages on stderr, for the command line and for notebooks."""

import logging
import subprocess
import sys

import pytest

from fedloom import logs
from fedloom.api import run as api_run
from fedloom.api import verbs  # noqa: F401 - loaded before a test replaces what it imports

logger = logging.getLogger("fedloom.anything")


@pytest.fixture
def root():
    """The package's logger, restored after the test."""
    level, handlers, propagate = logs.ROOT.level, list(logs.ROOT.handlers), logs.ROOT.propagate
    yield logs.ROOT
    logs.ROOT.setLevel(level)
    logs.ROOT.handlers[:], logs.ROOT.propagate = handlers, propagate


def test_logs_without_show_are_silent():
    code = "import fedloom, logging; logging.getLogger('fedloom.anything').warning('hidden')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_show_called_twice_writes_once_and_changes_the_level(root, capsys):
    logs.show()
    logger.info("progress")
    logs.show("WARNING")
    logger.info("hidden")
    logger.warning("a warning of %d %%", 5)
    assert capsys.readouterr() == ("", "progress\na warning of 5 %\n")


@pytest.mark.parametrize(("level", "expected"), [("INFO", "progress\nwarning\n"), ("WARNING", "warning\n")])
def test_showing_writes_only_inside_the_context(level, expected, root, capsys):
    before = root.level, root.propagate, list(root.handlers)
    with pytest.raises(ZeroDivisionError), logs.showing(level):
        logger.info("progress")
        logger.warning("warning")
        raise ZeroDivisionError
    logger.warning("after")
    assert capsys.readouterr().err == expected
    assert (root.level, root.propagate, root.handlers) == before


def test_showing_after_show_restores_it(root, capsys):
    logs.show("WARNING")
    with logs.showing("INFO"):
        logger.info("inside")
    logger.info("hidden")
    logger.warning("outside")
    assert capsys.readouterr().err == "inside\noutside\n"


def test_quiet_run_still_shows_warnings(fedloom, write, monkeypatch):
    """A report that cannot be written is a warning, not progress."""
    write(("rounds = 2", "rounds = 1"))

    def fail(*arguments):
        raise OSError("no room")

    monkeypatch.setenv("FEDLOOM_REPORT", "on")
    monkeypatch.setattr(api_run, "write_report", fail)
    result = fedloom("run", "my.toml", "--out", "run", "--quiet")
    assert (result.code, result.err) == (0, "no report: OSError: no room; `fedloom report run` says more\n")

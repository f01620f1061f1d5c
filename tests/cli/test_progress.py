"""Progress: bars on a terminal, lines elsewhere, nothing with --quiet; the terminal is restored."""

import contextlib
import io
import json
import os
import pty

import pytest
from rich.console import Console
from rich.text import Text

from fedloom import logs
from fedloom.api.progress import progress_bars, round_display
from fedloom.cli.app import main
from fedloom.evaluation import Row
from fedloom.fleet import Traffic
from fedloom.runs.loop import RoundResult

HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"  # the cursor


def ended(number, of=4, seconds=2.0, **accuracies):
    rows = [Row(number, "server", tier, "", "global", "accuracy", value) for tier, value in accuracies.items()]
    return RoundResult(number, of, Traffic(1_000, 2_000, asked=4, replied=4), (), tuple(rows), seconds, {})


@pytest.fixture
def terminal():
    """A console that treats its file as a terminal 120 characters wide."""
    return Console(force_terminal=True, file=io.StringIO(), width=120, color_system=None)


def frames(console):
    """Everything that was drawn, as a list of lines."""
    drawn = console.file.getvalue().replace("\r", "\n")
    return [Text.from_ansi(one).plain.rstrip() for one in drawn.split("\n")]


@pytest.fixture
def clock(monkeypatch):
    """The clock on the wall, which decides how long a run will take: others may run beside it."""
    now = [1000.0]
    monkeypatch.setattr("fedloom.api.progress.time.monotonic", lambda: now[0])
    return now


def test_progress_bars_show_round_time_left_and_metrics(terminal, clock):
    with progress_bars(terminal, {"heterofl": 4}) as show:
        assert frames(terminal)[-1].endswith("round 0/4")
        clock[0] += 2.0
        show("heterofl", ended(1, seconds=1.0, large=47.0, small=32.4))
        first = frames(terminal)[-1]
        clock[0] += 4.0
        show("heterofl", ended(2, seconds=1.0))
        second = frames(terminal)[-1]
    assert first.endswith(" round 1/4 1 s own, 6 s left large  47.0 %  small  32.4 %")
    assert second.endswith(
        " round 2/4 2 s own, 6 s left large  47.0 %  small  32.4 %"
    )  # two rounds of 3 s; no evaluation


def test_progress_bars_long_run_shows_hours_and_minutes(terminal, clock):
    with progress_bars(terminal, {"a": 40}) as show:
        clock[0] += 200.0
        show("a", ended(1, of=40, seconds=200.0))
    assert " 2:10:00 left" in frames(terminal)[-2]


def test_progress_bars_finished_run_leaves_its_line(terminal):
    with progress_bars(terminal, {"one": 2, "[two]": 2}) as show:
        for name in ("one", "[two]"):
            show(name, ended(1, of=2, large=50.0))
        show("one", ended(2, of=2, large=60.0))
        mark = len(terminal.file.getvalue())
        show("[two]", ended(2, of=2, large=70.0))
        show("[two]", ended(3, of=3, large=71.0))  # a last exchange
    drawn = frames(terminal)
    lines = [one for one in drawn if "replies" in one]
    assert lines == [
        "one  round 2/2  large  60.0 %  4/4 replies  1 kB down 2 kB up  2.0 s  4 s in all",
        "[two]  round 2/2  large  70.0 %  4/4 replies  1 kB down 2 kB up  2.0 s  4 s in all",
        "[two]  round 3/3  large  71.0 %  4/4 replies  1 kB down 2 kB up  2.0 s  6 s in all",
    ]
    assert "one" not in terminal.file.getvalue()[mark:]


def test_progress_bars_interrupted_restores_the_cursor(terminal):
    with pytest.raises(KeyboardInterrupt), progress_bars(terminal, {"a": 4}) as show:
        show("a", ended(1))
        assert HIDDEN in terminal.file.getvalue() and SHOWN not in terminal.file.getvalue()
        raise KeyboardInterrupt
    assert terminal.file.getvalue().endswith(SHOWN)
    assert not terminal._live_stack


def test_round_display_without_terminal_logs_lines(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with logs.showing("INFO"), round_display({"a": 4}) as show:
        show("a", ended(1, large=47.0))
    assert capsys.readouterr().err == "a  round 1/4  large  47.0 %  4/4 replies  1 kB down 2 kB up  2.0 s\n"
    with logs.showing("WARNING"), round_display({"a": 4}) as show:
        show("a", ended(1))
    assert capsys.readouterr() == ("", "")


def on_a_terminal(monkeypatch, *arguments, term="xterm"):
    """The command with a real terminal as its stderr: (stdout, everything the terminal received)."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    out = io.StringIO()
    with (
        os.fdopen(theirs, "w") as screen,
        contextlib.redirect_stderr(screen),
        contextlib.redirect_stdout(out),
        pytest.raises(SystemExit) as left,
    ):
        main([*arguments, "--workers", "1"])
    got = b""
    with contextlib.suppress(OSError):  # end of the stream
        while chunk := os.read(ours, 65536):
            got += chunk
    os.close(ours)
    assert left.value.code == 0
    return out.getvalue(), got.decode()


def test_run_on_terminal_shows_bars(fedloom, write, monkeypatch):
    write()
    out, screen = on_a_terminal(monkeypatch, "run", "my.toml", "--no-report", "--format", "json")
    assert json.loads(out)["status"] == "ok"
    assert "━" in screen and " round 1/2 " in screen and " s left " in screen
    assert "heterofl  round 2/2  " in screen
    assert screen.index(HIDDEN) < screen.rindex(SHOWN)


def test_run_quiet_or_dumb_terminal_shows_no_bar(fedloom, write, monkeypatch):
    write(("rounds = 2", "rounds = 1"))
    assert on_a_terminal(monkeypatch, "run", "my.toml", "--no-report", "--quiet")[1] == ""
    _, screen = on_a_terminal(monkeypatch, "run", "my.toml", "--no-report", term="dumb")
    assert screen.startswith("heterofl  round 1/1  ") and screen.count("\n") == 1


def test_attack_on_terminal_shows_a_bar_per_run(fedloom, write, monkeypatch):
    write()
    _, screen = on_a_terminal(monkeypatch, "attack", "my.toml", "--attacks", "sign_flip", "--format", "json")
    for attack in ("none", "sign_flip"):
        assert all(f"{attack} against {rule}, seed 0  round 2/2  " in screen for rule in ("none", "default"))
    assert "━" in screen and screen.index(HIDDEN) < screen.rindex(SHOWN)

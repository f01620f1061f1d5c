"""Progress of runs: on a terminal a bar per run, elsewhere one line per round."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .. import logs
from ..wording import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from rich import progress as rich_progress
    from rich.console import Console

    from ..runs.checkpoint import Checkpoint
    from ..runs.experiment import Experiment
    from ..runs.loop import RoundResult
    from ..runs.trackers import Trackers


logger = logging.getLogger(__name__)

ShowRound = Callable[[str, "RoundResult"], None]
"""Called with a run's name and the round that has just ended."""

Progress = bool | ShowRound | None
"""True: shown on stderr; False: not at all; a function: called; None: as log messages."""


def run_experiment(
    experiment: "Experiment",
    folder: "Path",
    name: str,
    since: "Checkpoint | None" = None,
    trackers: "Trackers | None" = None,
    progress: Progress = None,
    until: float | None = None,
) -> bool:
    """Run an experiment into its folder, from the checkpoint if there is one, and show its progress.

    `until`: by the monotonic clock, when to stop after the round in progress; False if it stopped, to be resumed.
    """
    from ..runs.privacy import summarize_privacy
    from ..runs.recorder import record_rounds
    from ..runs.trackers import NONE

    steps = closing(record_rounds(experiment, folder, since, trackers or NONE))
    with explain_interrupt(folder), display({name: experiment.loaded.recipe.rounds}, progress) as show, steps as rounds:
        for result in rounds:
            show(name, result)
            if until is not None and time.monotonic() >= until and result.number < result.of:
                return False
    privacy = summarize_privacy(experiment.loaded.recipe)
    if privacy:
        logger.info("%s  %s", name, privacy)
    return True


@contextmanager
def explain_interrupt(folder: "Path") -> Iterator[None]:
    """After Ctrl-C, say what is saved in the folder of a run or comparison, and which command goes on."""
    from ..recipe.paths import has_no_round
    from ..runs.own_names import list_with_options
    from ..studies.compare import is_comparison

    try:
        yield
    except KeyboardInterrupt:
        files = list_with_options(folder)
        resume, finish = (f"fedloom {verb} {folder}{files}" for verb in ("resume", "finish"))
        if has_no_round(folder):
            logger.warning("no round was finished; %s starts again", resume)
        elif is_comparison(folder):
            logger.warning("all finished rounds are saved in %s; %s goes on", folder, resume)
        else:
            logger.warning("all finished rounds are saved in %s; %s goes on, %s ends it there", folder, resume, finish)
        raise


class RunGroup(Protocol):
    """Runs that share a loop: a comparison, a bench of attacks."""

    def round_counts(self) -> Mapping[str, int]:
        """Number of rounds of each unfinished run, by its name."""
        ...

    def rounds(self) -> "Generator[tuple[str, RoundResult], None, None]":
        """Run them; yields a run's name and result after each of its rounds."""
        ...


def run_group(runs: RunGroup, progress: Progress = None, until: float | None = None) -> None:
    """Run them all and show their progress; `until`: when to stop, by the monotonic clock, what is then unfinished."""
    with display(runs.round_counts(), progress) as show, closing(runs.rounds()) as rounds:
        for name, result in rounds:
            show(name, result)
            if until is not None and time.monotonic() >= until and result.number < result.of:
                return


@contextmanager
def display(runs: Mapping[str, int], progress: Progress) -> Iterator[ShowRound]:
    """How rounds of these runs (name -> number of rounds) are shown."""
    if callable(progress):
        yield progress
    elif progress is False:
        yield lambda name, result: None
    elif progress:
        with logs.showing(), round_display(runs) as show:
            yield show
    else:
        with round_display(runs) as show:
            yield show


@contextmanager
def round_display(runs: Mapping[str, int]) -> Iterator[ShowRound]:
    """How rounds of these runs (name -> number of rounds) are shown: as bars on a terminal, as log lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if logger.isEnabledFor(logging.INFO) and sys.stderr.isatty() and not console.is_dumb_terminal:
        with progress_bars(console, runs) as show:
            yield show
    else:
        spent = OwnSeconds()
        yield lambda name, result: logger.info(format_round(name, result) + spent.add(name, result))


class OwnSeconds:
    """The seconds that each run has taken itself, without those of others beside it."""

    def __init__(self) -> None:
        self.by_run: dict[str, float] = {}

    def add(self, run: str, result: "RoundResult") -> str:
        """Count a round; returns what the line of the last one says besides."""
        self.by_run[run] = self.by_run.get(run, 0.0) + result.seconds
        return f"  {format_seconds(self.by_run[run])} in all" if result.number == result.of > 1 else ""


@contextmanager
def progress_bars(console: "Console", runs: Mapping[str, int]) -> Iterator[ShowRound]:
    """A bar per run; a finished run leaves its last line above the bars.

    Bars are redrawn only when a round ends: a redrawing thread could hold the terminal's lock while workers are forked.
    """
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    texts = (
        "{task.description}",
        "round {task.completed}/{task.total}",
        "{task.fields[spent]}",
        "{task.fields[left]}",
        "{task.fields[metrics]}",
    )
    name, number, spent, left, metrics = (
        TextColumn(text, markup=False, table_column=Column(no_wrap=True)) for text in texts
    )
    columns = (name, BarColumn(bar_width=12), number, spent, left, metrics)
    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False) as progress:
        bars = {
            run: _Bar(progress.add_task(run, total=rounds, spent="", left="", metrics=""))
            for run, rounds in runs.items()
        }
        progress.refresh()
        own = OwnSeconds()
        yield lambda run, result: _update(progress, bars, own, run, result)


@dataclass
class _Bar:
    task: "rich_progress.TaskID"
    started: float = field(default_factory=lambda: time.monotonic())
    rounds: int = 0  # since then
    metrics: str = ""

    def seconds_left(self, rounds: int) -> float:
        """By the clock on the wall: a run may have to wait for others that run beside it."""
        return rounds * (time.monotonic() - self.started) / self.rounds


def _update(
    progress: "rich_progress.Progress", bars: dict[str, _Bar], own: OwnSeconds, run: str, result: "RoundResult"
) -> None:
    in_all = own.add(run, result)
    if result.number < result.of:
        bar = bars[run]
        bar.rounds += 1
        bar.metrics = _format_metrics(result) or bar.metrics  # not every round is evaluated
        left = f"{format_seconds(bar.seconds_left(result.of - result.number))} left"
        spent = f"{format_seconds(own.by_run[run])} own,"
        progress.update(bar.task, completed=result.number, spent=spent, left=left, metrics=bar.metrics)
    else:
        if run in bars:  # a method's last exchange comes after the last round
            progress.remove_task(bars.pop(run).task)
        progress.console.print(format_round(run, result) + in_all, markup=False, highlight=False, soft_wrap=True)
    progress.refresh()


def format_round(name: str, result: "RoundResult") -> str:
    """One line: metrics per tier on the test that the method is for, replies, refusals, bytes, seconds."""
    traffic = f"{format_bytes(result.traffic.bytes_down)} down {format_bytes(result.traffic.bytes_up)} up"
    values = {row.metric: row.value for row in result.rows}
    if "bytes_down_compressed" in values:
        down, up = (format_bytes(values[f"bytes_{way}_compressed"]) for way in ("down", "up"))
        traffic += f" (compressed {down} and {up})"
    number = f"round {result.number:>{len(str(result.of))}}/{result.of}"
    if result.number > result.of:
        number = "last exchange"
    parts = [name, number, _format_metrics(result), _format_replies(result), traffic, f"{result.seconds:.1f} s"]
    return "  ".join(filter(None, parts))


def _format_replies(result: "RoundResult") -> str:
    """How many replied; of those that did not, how many devices and why, each counted once; and what else happened."""
    from ..engines.gate import CODES

    first = {refusal.device: refusal for refusal in reversed(result.refused) if refusal.device}
    refused = [refusal for refusal in first.values() if refusal.code in CODES]
    missing = [refusal for refusal in first.values() if refusal.code not in CODES]
    parts = [f"{result.traffic.replied}/{result.traffic.asked} replies"]
    for word, lost in (("refused", refused), ("missing", missing)):
        if lost:
            parts.append(f"{len(lost)} {word} ({lost[-1].code}: {lost[-1].reason})")
    return ", ".join([*parts, *(refusal.reason for refusal in result.refused if not refusal.device)])


def _format_metrics(result: "RoundResult") -> str:
    from ..reporting.paired_stats import ACCURACY, metric_of

    metric = metric_of(result.rows, name=result.headline or None)
    rows = [row for row in result.headline_rows if row.metric == metric.name]
    several = len({row.candidate for row in rows}) > 1
    unit = metric.unit if metric == ACCURACY else f"{metric.unit} {metric.name}"
    values = [f"{row.tier} {metric.number(row.value):>5}{unit}" for row in rows]
    named = [f"{row.candidate} {value}" if several else value for row, value in zip(rows, values, strict=True)]
    test = next((row.test for row in rows), "global")
    return (f"{test} test: " if test != "global" else "") + "  ".join(named)

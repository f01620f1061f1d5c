"""How runs go: on a terminal a bar for each that is under way, elsewhere one line per round."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .output import note

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ..runs.build import Experiment
    from ..runs.checkpoint import Checkpoint
    from ..runs.loop import RoundResult
    from ..runs.trackers import Trackers


Tell = Callable[[str, "RoundResult"], None]
"""Of a run's name, and the round that it has just ended."""


def follow(
    experiment: "Experiment",
    folder: "Path",
    name: str,
    quiet: bool,
    since: "Checkpoint | None" = None,
    followers: "Trackers | None" = None,
) -> None:
    """Run an experiment into its folder, or go on with it, and say how it goes."""
    from ..runs.privacy import told
    from ..runs.recorder import recorded
    from ..runs.trackers import NONE

    with telling(quiet, {name: experiment.loaded.recipe.rounds}) as tell:
        for done in recorded(experiment, folder, since, followers or NONE):
            tell(name, done)
    privacy = told(experiment.loaded.recipe)
    if privacy:
        note(f"{name}  {privacy}", quiet)


class Several(Protocol):
    """Runs side by side."""

    def lengths(self) -> Mapping[str, int]:
        """How many rounds each run that is not finished has, under its name."""
        ...

    def rounds(self) -> "Iterator[tuple[str, RoundResult]]":
        """Run them, round by round under their names."""
        ...


def follow_several(runs: Several, quiet: bool) -> None:
    """Run them all, and say how they go."""
    with telling(quiet, runs.lengths()) as tell:
        for name, done in runs.rounds():
            tell(name, done)


@contextmanager
def telling(quiet: bool, runs: Mapping[str, int]) -> Iterator[Tell]:
    """What is to be told of every round of these runs, which have so many: nothing to the quiet, and bars only to
    somebody who sees them move."""
    from rich.console import Console

    console = Console(stderr=True)
    if not quiet and sys.stderr.isatty() and not console.is_dumb_terminal:
        with bars(console, runs) as tell:
            yield tell
    else:
        yield lambda name, done: note(line(name, done), quiet)


@contextmanager
def bars(console: "Console", runs: Mapping[str, int]) -> Iterator[Tell]:
    """A bar for each run; one that is over leaves its last line above those that are not. Bars move when a round ends
    and not in between: a thread that moved them could hold the terminal just when workers are forked."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    texts = ("{task.description}", "round {task.completed}/{task.total}", "{task.fields[left]}", "{task.fields[marks]}")
    name, number, left, newest = (TextColumn(one, markup=False, table_column=Column(no_wrap=True)) for one in texts)
    columns = (name, BarColumn(bar_width=20), number, left, newest)
    with Progress(*columns, console=console, auto_refresh=False, redirect_stdout=False) as progress:
        shown = {run: Bar(progress.add_task(run, total=rounds, left="", marks="")) for run, rounds in runs.items()}
        progress.refresh()
        yield lambda run, done: _move(progress, shown, run, done)


@dataclass
class Bar:
    task: "TaskID"
    seconds: list[float] = field(default_factory=list)  # of the rounds seen
    marks: str = ""


def _move(progress: "Progress", shown: dict[str, Bar], run: str, done: "RoundResult") -> None:
    if done.number < done.of:
        bar = shown[run]
        bar.seconds.append(done.seconds)
        bar.marks = _marks(done) or bar.marks  # not every round is judged
        left = f"{_span((done.of - done.number) * sum(bar.seconds) / len(bar.seconds))} left"
        progress.update(bar.task, completed=done.number, left=left, marks=bar.marks)
    else:
        if run in shown:  # a method's last exchange comes after the last round
            progress.remove_task(shown.pop(run).task)
        progress.console.print(line(run, done), markup=False, highlight=False, soft_wrap=True)
    progress.refresh()


def line(name: str, done: "RoundResult") -> str:
    """Accuracy per tier, votes, refusals, bytes."""
    moved = f"{_size(done.traffic.down)} down {_size(done.traffic.up)} up"
    coded = {
        row.metric: row.value for row in done.rows if row.metric in ("bytes_down_compressed", "bytes_up_compressed")
    }
    moved += (
        f" (coded {_size(coded['bytes_down_compressed'])} and {_size(coded['bytes_up_compressed'])})" if coded else ""
    )
    lost = f"  {len(done.refused)} refused ({done.refused[0].code}: {done.refused[0].reason})" if done.refused else ""
    votes = f"{done.traffic.replied}/{done.traffic.asked} replies"
    number = f"round {done.number:>{len(str(done.of))}}/{done.of}"
    return f"{name}  {number}  {_marks(done)}  {votes}{lost}  {moved}  {done.seconds:.1f} s"


def _marks(done: "RoundResult") -> str:
    from ..reporting.paired_stats import metric_of

    metric = metric_of(done.rows)
    known = [row for row in done.rows if row.metric == metric.name and not row.device]
    judged = [row for row in known if row.test == "global"] or known
    several = len({row.candidate for row in judged}) > 1
    unit = metric.unit or f" {metric.name}"
    return "  ".join(f"{f'{row.candidate} ' if several else ''}{row.tier} {row.value:5.1f}{unit}" for row in judged)


def _span(seconds: float) -> str:
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

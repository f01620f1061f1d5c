"""One line per round: accuracy per tier, votes, refusals, bytes."""

from typing import TYPE_CHECKING

from .output import note

if TYPE_CHECKING:
    from pathlib import Path

    from ..experiment import Experiment, Round
    from ..experiment.running.checkpoint import Point


def follow(experiment: "Experiment", folder: "Path", name: str, quiet: bool, since: "Point | None" = None) -> None:
    """Run an experiment into its folder, or go on with it, and say how it goes."""
    from ..experiment import recorded
    from ..experiment.assembly.privacy import told

    for done in recorded(experiment, folder, since):
        note(line(name, done), quiet)
    privacy = told(experiment.loaded.recipe)
    if privacy:
        note(f"{name}  {privacy}", quiet)


def line(name: str, done: "Round") -> str:
    judged = [row for row in done.rows if row.metric == "accuracy" and not row.device and row.test == "global"] or [
        row for row in done.rows if row.metric == "accuracy" and not row.device
    ]
    several = len({row.candidate for row in judged}) > 1
    marks = "  ".join(f"{f'{row.candidate} ' if several else ''}{row.tier} {row.value:5.1f} %" for row in judged)
    moved = f"{_size(done.traffic.down)} down {_size(done.traffic.up)} up"
    coded = {row.metric: row.value for row in done.rows if row.metric in ("down_coded", "up_coded")}
    moved += f" (coded {_size(coded['down_coded'])} and {_size(coded['up_coded'])})" if coded else ""
    lost = f"  {len(done.refused)} refused ({done.refused[0].code}: {done.refused[0].reason})" if done.refused else ""
    votes = f"{done.traffic.replied}/{done.traffic.asked} replies"
    number = f"round {done.number:>{len(str(done.of))}}/{done.of}"
    return f"{name}  {number}  {marks}  {votes}{lost}  {moved}  {done.seconds:.1f} s"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

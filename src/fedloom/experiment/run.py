"""The loop: draw a cohort, let the method have its round, judge when due."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from ..engines import Refusal
from ..evaluation import Row
from ..fleet import Ask, Device, Traffic, Turn
from ..reporting import Final, read_rows, summarise
from ..tensors import Parcel
from .assemble import Experiment
from .checkpoint import Point
from .clock import round_seconds
from .merging import merge_for
from .privacy import spent
from .quarantine import note_refusals, trusted


@dataclass(frozen=True)
class Round:
    """What one round did."""

    number: int
    of: int
    traffic: Traffic
    refused: tuple[Refusal, ...]
    rows: tuple[Row, ...]
    seconds: float
    server: Parcel


def rounds(experiment: Experiment, since: Point | None = None) -> Iterator[Round]:
    """All rounds of an experiment, one after the other, or those that are left."""
    recipe, method, fleet, engine, faults = (
        experiment.loaded.recipe, experiment.method, experiment.fleet, experiment.engine, experiment.faults,
    )  # fmt: skip
    gone = since.number if since else 0
    server = since.server if since and gone else method.start(fleet, recipe.seed, experiment.warm)
    for number in range(gone + 1, recipe.rounds + 1):
        began, before = time.perf_counter(), len(experiment.refusals)
        last = number == recipe.rounds
        turn = _turn(experiment, number, trusted(experiment, faults.cohort(number)))
        server = faults.settled(experiment.standing, turn, server, method.round(server, turn))
        note_refusals(experiment, turn, [one for _, one in experiment.refusals[before:]])
        due = last or number % recipe.evaluation.every == 0
        rows = judged(experiment, server, number, last) if due else []
        engine.commit(number)
        yield _done(experiment, turn, server, rows, began, before)
        faults.give_up(experiment.standing)
    if gone > recipe.rounds:  # the last exchange is over too
        return
    began, before = time.perf_counter(), len(experiment.refusals)
    turn = _turn(experiment, recipe.rounds + 1, trusted(experiment, faults.members(recipe.rounds + 1)))
    ended = method.finish(server, turn)
    if ended is not None:  # a last exchange is one more round, in which everybody may take part
        ended = faults.settled(experiment.standing, turn, server, ended)
        rows = judged(experiment, ended, turn.number, True)
        engine.commit(turn.number)
        yield _done(experiment, turn, ended, rows, began, before)


def _turn(experiment: Experiment, number: int, cohort: list[Device]) -> Turn:
    merge = merge_for(experiment, number)
    turn = Turn(number, cohort, experiment.fleet, experiment.engine, merge, experiment.public)
    return experiment.faults.around(turn)


def _done(experiment: Experiment, turn: Turn, server: Parcel, rows: list[Row], began: float, before: int) -> Round:
    figures = {
        "down": turn.traffic.down,
        "up": turn.traffic.up,
        "clock": round_seconds(experiment, turn),
        "epsilon": spent(experiment.loaded.recipe, turn.number),
    }
    moved = [Row(turn.number, "", "", "", "", name, one) for name, one in figures.items() if one is not None]
    moved += experiment.faults.rows(experiment.standing, turn)
    return Round(
        turn.number, max(turn.number, experiment.loaded.recipe.rounds), turn.traffic,
        tuple(one for _, one in experiment.refusals[before:]), (*rows, *moved), time.perf_counter() - began, server,
    )  # fmt: skip


def judged(experiment: Experiment, server: Parcel, number: int, last: bool) -> list[Row]:
    """Judging asks devices too, but is no part of the round: it moves no state and its traffic is not counted."""
    when = experiment.loaded.recipe.evaluation.per_device
    per_device = when == "always" or (when == "last" and last)
    candidates = experiment.method.candidates(server)
    return experiment.judge.rows(candidates, experiment.fleet, asker(experiment, number), number, per_device, last)


def asker(experiment: Experiment, number: int) -> Ask:
    """How a judgement asks devices, outside of a method's turn."""
    return lambda task, inboxes: experiment.engine.ask(task, inboxes, number)


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder."""

    folder: Path

    def rows(self) -> list[Row]:
        return list(read_rows(self.folder))

    @property
    def final(self) -> list[Final]:
        return [one for one in summarise(self.rows()) if one.candidate]


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: the same bits on every machine, and no slower for nets of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

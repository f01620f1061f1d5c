"""The loop: draw a cohort, let the method have its round, judge when due."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...engines import Refusal
from ...evaluation import Row
from ...fleet import PLAIN, Ask, Device, Traffic, Turn
from ...reporting import Final, read_rows, summarise
from ...tensors import Parcel
from ..assembly.assemble import Experiment, simulation
from ..assembly.clock import round_seconds
from ..assembly.coding import coded
from ..assembly.merging import merge_for
from ..assembly.privacy import spent
from ..assembly.quarantine import note_refusals, trusted
from ..finished.wanted import Input, Wanted
from ..recipes.places import data_folder
from ..recipes.tables import Tables
from .attendance import Line, attendance
from .checkpoint import Point

if TYPE_CHECKING:
    from ..finished.exporting import Exported


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
    attendance: tuple[Line, ...] = ()
    judging: float = 0.0  # seconds of those


def rounds(experiment: Experiment, since: Point | None = None) -> Iterator[Round]:
    """All rounds of an experiment, one after the other, or those that are left."""
    recipe, method, fleet, faults = experiment.loaded.recipe, experiment.method, experiment.fleet, experiment.faults
    gone = since.number if since else 0
    server = since.server if since and gone else method.start(fleet, recipe.seed, experiment.warm)
    for number in range(gone + 1, recipe.rounds + 1):
        began, before = time.perf_counter(), len(experiment.refusals)
        turn = _turn(experiment, number, trusted(experiment, faults.cohort(number)))
        server = faults.settled(experiment.standing, turn, server, method.round(server, turn))
        note_refusals(experiment, turn, [one for _, one in experiment.refusals[before:]])
        yield _done(experiment, turn, server, began, before)
        faults.give_up(experiment.standing)
    if gone > recipe.rounds:  # the last exchange is over too
        return
    began, before = time.perf_counter(), len(experiment.refusals)
    turn = _turn(experiment, recipe.rounds + 1, trusted(experiment, faults.members(recipe.rounds + 1)))
    ended = method.finish(server, turn)
    if ended is not None:  # a last exchange is one more round, in which everybody may take part
        ended = faults.settled(experiment.standing, turn, server, ended)
        yield _done(experiment, turn, ended, began, before)


def _turn(experiment: Experiment, number: int, cohort: list[Device]) -> Turn:
    merge = merge_for(experiment, number)
    turn = Turn(number, cohort, experiment.fleet, experiment.engine, merge, experiment.public, experiment.deployed)
    return experiment.faults.around(coded(turn, experiment.loaded.recipe, simulation(experiment)))


def _done(experiment: Experiment, turn: Turn, server: Parcel, began: float, before: int) -> Round:
    """Judge what a round has made, if it is time to, and let the round count."""
    recipe, number, trained = experiment.loaded.recipe, turn.number, time.perf_counter()
    met = _met(experiment, turn, before)
    last = number >= recipe.rounds
    due = last or number % recipe.evaluation.every == 0
    rows = judged(experiment, server, number, last) if due else []
    judging = time.perf_counter() - trained
    experiment.engine.commit(number)
    return Round(
        number, max(number, recipe.rounds), turn.traffic, tuple(one for _, one in experiment.refusals[before:]),
        (*rows, *_figures(experiment, turn)), time.perf_counter() - began, server, met, judging,
    )  # fmt: skip


def _met(experiment: Experiment, turn: Turn, before: int) -> tuple[Line, ...]:
    """Before anything is judged, for who judges is asked too. With differential privacy a norm would give away what the
    noise hides."""
    refused = [one for _, one in experiment.refusals[before:]]
    return attendance(turn, refused, with_norms=experiment.loaded.recipe.privacy.clip is None)


def _figures(experiment: Experiment, turn: Turn) -> list[Row]:
    """Of the round as a whole."""
    found = {
        "down": turn.traffic.down,
        "up": turn.traffic.up,
        **_coded(turn),
        "clock": round_seconds(experiment, turn),
        "epsilon": spent(experiment.loaded.recipe, turn.number),
    }
    moved = [Row(turn.number, "", "", "", "", name, one) for name, one in found.items() if one is not None]
    return moved + experiment.faults.rows(experiment.standing, turn)


def _coded(turn: Turn) -> dict[str, int]:
    """The same bytes as they travel, where that is not as they are."""
    if turn.coding is PLAIN:
        return {}
    return {"down_coded": turn.traffic.coded_down, "up_coded": turn.traffic.coded_up}


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
    """A finished run, read from its folder. `tables` and `data` are the names and the data it was made with, where
    those are not the usual ones: its models need them."""

    folder: Path
    tables: Tables = field(default_factory=Tables)
    data: Path = field(default_factory=data_folder)

    def rows(self) -> list[Row]:
        return list(read_rows(self.folder))

    def columns(self) -> dict[str, list[Any]]:
        """The rows, column by column: what every library for tables takes."""
        rows = self.rows()
        return {one.name: [getattr(row, one.name) for row in rows] for one in fields(Row)}

    def frame(self) -> Any:
        """The rows as a data frame of pandas, which must be installed."""
        return import_module("pandas").DataFrame(self.columns())

    def model(self, tier: str | None = None, *, device: str | None = None, macs: int | None = None) -> nn.Module:
        """A tier's model, that of the largest if nothing is said; the one a device keeps; or the largest sub-net of at
        most so many multiply-adds. It takes examples as they are stored, and is ready to be used, not to be trained."""
        from ..finished.exporting import model_of

        return model_of(self.folder, Wanted(tier, device, macs), self.tables, self.data)

    def export(
        self,
        to: str,
        tier: str | None = None,
        *,
        device: str | None = None,
        macs: int | None = None,
        out: str | Path | None = None,
        given: Input = "stored",
    ) -> "Exported":
        """The same as a file in a format, with a card, proved to make what the run's model makes."""
        from ..finished.exporting import export

        place = None if out is None else Path(out)
        return export(self.folder, Wanted(tier, device, macs), to, place, given, self.tables, self.data)

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

"""The loop: draw a cohort, let the method have its round, judge when due.

Who was asked in a round and what came of it, tier by tier: what a report shows, and rows do not say.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..engines import Refusal
from ..evaluation import Row
from ..fleet import PLAIN, Ask, Device, Traffic, Turn
from ..tensors import Parcel
from .build import Experiment, merge_for, simulation
from .checkpoint import Point
from .clock import round_seconds
from .compression import coded
from .privacy import spent
from .quarantine import note_refusals, trusted

if TYPE_CHECKING:
    pass


ADMITTED, MISSING = "admitted", "missing"
Line = dict[str, Any]


def attendance(turn: Turn, refusals: Iterable[Refusal], with_norms: bool) -> tuple[Line, ...]:
    """One line for each tier and outcome: the devices, what they were sent, what they sent, bundle by bundle, and how
    far they moved what they were given (least, median, most)."""
    lost: dict[str, str] = {}
    for refusal in refusals:
        lost.setdefault(refusal.device, refusal.code)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(turn.traffic.carriers):
        heard = ADMITTED if name in turn.traffic.examples else MISSING
        groups.setdefault((turn.traffic.carriers[name].tier, lost.get(name, heard)), []).append(name)
    return tuple(
        {
            "round": turn.number, "tier": tier, "outcome": outcome, "devices": names,
            **_moved(turn.traffic, names), **(_norms(turn.traffic, names) if with_norms else {}),
        }
        for (tier, outcome), names in sorted(groups.items())
    )  # fmt: skip


def _moved(traffic: Traffic, names: Sequence[str]) -> Line:
    up: Counter[str] = Counter()
    for name in names:
        up.update(traffic.sent.get(name, {}))
    return {"down": sum(traffic.moved[name] for name in names) - up.total(), "up": dict(sorted(up.items()))}


def _norms(traffic: Traffic, names: Sequence[str]) -> Line:
    found = [traffic.norms[name] for name in names if name in traffic.norms]
    if not found:
        return {}
    return {"norms": [float(f"{one:.6g}") for one in (min(found), statistics.median(found), max(found))]}


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


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: the same bits on every machine, and no slower for nets of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

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
from ..fleet import PLAIN, Ask, Device, RoundContext, Traffic
from ..tensors import Parcel
from .build import Experiment, merge_for, simulation
from .checkpoint import Checkpoint
from .clock import round_seconds
from .compression import coded
from .privacy import spent
from .quarantine import note_refusals, trusted

if TYPE_CHECKING:
    pass


ADMITTED, MISSING = "admitted", "missing"
Line = dict[str, Any]


def participation(context: RoundContext, refusals: Iterable[Refusal], with_norms: bool) -> tuple[Line, ...]:
    """One line for each tier and outcome: the devices, what they were sent, what they sent, bundle by bundle, and how
    far they moved what they were given (least, median, most)."""
    lost: dict[str, str] = {}
    for refusal in refusals:
        lost.setdefault(refusal.device, refusal.code)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(context.traffic.devices):
        heard = ADMITTED if name in context.traffic.examples else MISSING
        groups.setdefault((context.traffic.devices[name].tier, lost.get(name, heard)), []).append(name)
    return tuple(
        {
            "round": context.number, "tier": tier, "outcome": outcome, "devices": names,
            **_moved(context.traffic, names), **(_norms(context.traffic, names) if with_norms else {}),
        }
        for (tier, outcome), names in sorted(groups.items())
    )  # fmt: skip


def _moved(traffic: Traffic, names: Sequence[str]) -> Line:
    up: Counter[str] = Counter()
    for name in names:
        up.update(traffic.uploaded.get(name, {}))
    return {"bytes_down": sum(traffic.bytes_by_device[name] for name in names) - up.total(), "bytes_up": dict(sorted(up.items()))}


def _norms(traffic: Traffic, names: Sequence[str]) -> Line:
    found = [traffic.norms[name] for name in names if name in traffic.norms]
    if not found:
        return {}
    return {"norms": [float(f"{one:.6g}") for one in (min(found), statistics.median(found), max(found))]}


@dataclass(frozen=True)
class RoundResult:
    """What one round did."""

    number: int
    of: int
    traffic: Traffic
    refused: tuple[Refusal, ...]
    rows: tuple[Row, ...]
    seconds: float
    server: Parcel
    participation: tuple[Line, ...] = ()
    judging: float = 0.0  # seconds of those


def rounds(experiment: Experiment, since: Checkpoint | None = None) -> Iterator[RoundResult]:
    """All rounds of an experiment, one after the other, or those that are left."""
    recipe, method, fleet, faults = experiment.loaded.recipe, experiment.method, experiment.fleet, experiment.faults
    gone = since.number if since else 0
    server = since.server if since and gone else method.start(fleet, recipe.seed, experiment.warm)
    for number in range(gone + 1, recipe.rounds + 1):
        began, before = time.perf_counter(), len(experiment.refusals)
        context = _turn(experiment, number, trusted(experiment, faults.cohort(number)))
        server = faults.settled(experiment.standing, context, server, method.round(server, context))
        note_refusals(experiment, context, [one for _, one in experiment.refusals[before:]])
        yield _done(experiment, context, server, began, before)
        faults.give_up(experiment.standing)
    if gone > recipe.rounds:  # the last exchange is over too
        return
    began, before = time.perf_counter(), len(experiment.refusals)
    context = _turn(experiment, recipe.rounds + 1, trusted(experiment, faults.members(recipe.rounds + 1)))
    ended = method.finish(server, context)
    if ended is not None:  # a last exchange is one more round, in which everybody may take part
        ended = faults.settled(experiment.standing, context, server, ended)
        yield _done(experiment, context, ended, began, before)


def _turn(experiment: Experiment, number: int, cohort: list[Device]) -> RoundContext:
    aggregate = merge_for(experiment, number)
    context = RoundContext(
        number, cohort, experiment.fleet, experiment.engine, aggregate, experiment.public, experiment.deployed
    )
    return experiment.faults.around(coded(context, experiment.loaded.recipe, simulation(experiment)))


def _done(experiment: Experiment, context: RoundContext, server: Parcel, began: float, before: int) -> RoundResult:
    """Judge what a round has made, if it is time to, and let the round count."""
    recipe, number, trained = experiment.loaded.recipe, context.number, time.perf_counter()
    met = _met(experiment, context, before)
    last = number >= recipe.rounds
    due = last or number % recipe.evaluation.every == 0
    rows = judged(experiment, server, number, last) if due else []
    judging = time.perf_counter() - trained
    experiment.engine.commit(number)
    return RoundResult(
        number, max(number, recipe.rounds), context.traffic, tuple(one for _, one in experiment.refusals[before:]),
        (*rows, *_figures(experiment, context)), time.perf_counter() - began, server, met, judging,
    )  # fmt: skip


def _met(experiment: Experiment, context: RoundContext, before: int) -> tuple[Line, ...]:
    """Before anything is judged, for who judges is asked too. With differential privacy a norm would give away what the
    noise hides."""
    refused = [one for _, one in experiment.refusals[before:]]
    return participation(context, refused, with_norms=experiment.loaded.recipe.privacy.clip is None)


def _figures(experiment: Experiment, context: RoundContext) -> list[Row]:
    """Of the round as a whole."""
    found = {
        "bytes_down": context.traffic.bytes_down,
        "bytes_up": context.traffic.bytes_up,
        **_coded(context),
        "simulated_seconds": round_seconds(experiment, context),
        "epsilon": spent(experiment.loaded.recipe, context.number),
    }
    moved = [Row(context.number, "", "", "", "", name, one) for name, one in found.items() if one is not None]
    return moved + experiment.faults.rows(experiment.standing, context)


def _coded(context: RoundContext) -> dict[str, int]:
    """The same bytes as they travel, where that is not as they are."""
    if context.coding is PLAIN:
        return {}
    return {"bytes_down_compressed": context.traffic.compressed_bytes_down, "bytes_up_compressed": context.traffic.compressed_bytes_up}


def judged(experiment: Experiment, server: Parcel, number: int, last: bool) -> list[Row]:
    """Judging asks devices too, but is no part of the round: it moves no state and its traffic is not counted."""
    when = experiment.loaded.recipe.evaluation.per_device
    per_device = when == "always" or (when == "last" and last)
    candidates = experiment.method.eval_targets(server)
    return experiment.evaluator.rows(candidates, experiment.fleet, asker(experiment, number), number, per_device, last)


def asker(experiment: Experiment, number: int) -> Ask:
    """How a evaluation asks devices, outside of a method's turn."""
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

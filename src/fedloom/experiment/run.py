"""The loop: draw a cohort, let the method have its round, judge when due, write it down."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ..engines import Refusal
from ..evaluation import Row
from ..evaluation.judge import judged_tiers
from ..evaluation.metrics import unigram_perplexity
from ..fleet import Ask, Device, ServerModel, Traffic, Turn, draw_cohort
from ..reporting import Final, Journal, read_rows, summarise
from ..tensors import Parcel, fingerprint
from .assemble import Experiment
from .clock import round_seconds
from .toml import dumps

SHARED = "shared.safetensors"


class NothingAdmitted(Exception):  # noqa: N818 - named for what is wrong
    """A run in which no reply of any device could be used: nothing was learned, and it must not look as if."""

    def __init__(self, first: Refusal, folder: Path):
        super().__init__(f"no reply was ever admitted; device {first.device}: {first.code}: {first.reason}")
        self.hint = f"every refusal is in {folder / 'events.jsonl'}"


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


def rounds(experiment: Experiment) -> Iterator[Round]:
    """All rounds of an experiment, one after the other."""
    recipe, method, fleet, engine = (
        experiment.loaded.recipe, experiment.method, experiment.fleet, experiment.engine,
    )  # fmt: skip
    server = method.start(fleet, recipe.seed, experiment.warm)
    for number in range(1, recipe.rounds + 1):
        began, before = time.perf_counter(), len(experiment.refusals)
        last = number == recipe.rounds
        turn = _turn(experiment, number, draw_cohort(fleet, recipe.fleet.participation, number))
        server = method.round(server, turn)
        engine.commit(number)
        due = last or number % recipe.evaluation.every == 0
        rows = judged(experiment, server, number, last) if due else []
        yield _done(experiment, turn, server, rows, began, before)
    began, before = time.perf_counter(), len(experiment.refusals)
    turn = _turn(experiment, recipe.rounds + 1, fleet.members(recipe.rounds + 1))
    ended = method.finish(server, turn)
    if ended is not None:  # a last exchange is one more round, in which everybody may take part
        engine.commit(turn.number)
        yield _done(experiment, turn, ended, judged(experiment, ended, turn.number, True), began, before)


def _turn(experiment: Experiment, number: int, cohort: list[Device]) -> Turn:
    return Turn(number, cohort, experiment.fleet, experiment.engine, public=experiment.public)


def _done(experiment: Experiment, turn: Turn, server: Parcel, rows: list[Row], began: float, before: int) -> Round:
    figures = {"down": turn.traffic.down, "up": turn.traffic.up, "clock": round_seconds(experiment, turn)}
    moved = [Row(turn.number, "", "", "", "", name, one) for name, one in figures.items() if one is not None]
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


def recorded(experiment: Experiment, folder: Path) -> Iterator[Round]:
    """The rounds of an experiment, each written into the run's folder before it is handed on."""
    journal, seen, replied, began = Journal(folder), 0, 0, time.perf_counter()
    with one_thread(), closing(experiment.engine):
        journal.open(dumps(experiment.loaded.recipe.document()), manifest(experiment))
        with journal.watched():
            experiment.partition.save(folder / "partition.json")
            for done in rounds(experiment):
                journal.rows(done.rows)
                new, seen = experiment.refusals[seen:], len(experiment.refusals)
                journal.events({"round": number, **asdict(refusal)} for number, refusal in new)
                replied += done.traffic.replied
                yield done
            if not replied and experiment.refusals:
                raise NothingAdmitted(experiment.refusals[0][1], folder)
            save_models(experiment, done.server, journal)
            seconds = round(time.perf_counter() - began, 3)
            journal.update(status="finished", sha256=fingerprint(done.server), seconds=seconds)


def save_models(experiment: Experiment, server: Parcel, journal: Journal) -> None:
    """Every tier's model with its normalisation statistics, ready to be used; where the server has no whole model, the
    weights that it has."""
    fleet, number = experiment.fleet, experiment.loaded.recipe.rounds
    ask = asker(experiment, number)
    candidates = experiment.method.candidates(server)
    if "weights" in server and not any(isinstance(one, ServerModel) for one in candidates.values()):
        journal.tensors(SHARED, server["weights"])
    for name, candidate in candidates.items():
        if not isinstance(candidate, ServerModel):
            continue
        models = {tier: candidate.weights(tier) for tier in judged_tiers(candidate, fleet)}
        for tier, weights in experiment.judge.statistics.fill(models, fleet, ask, number).items():
            about = {"family": tier.model.family, "tier": tier.name, "settings": repr(dict(tier.model.settings))}
            journal.model(tier.name if name == "server" else f"{tier.name}.{name}", weights, about)


def manifest(experiment: Experiment) -> Mapping[str, Any]:
    return {
        "seed": experiment.loaded.recipe.seed,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "data": experiment.dataset.fingerprint(),
        "partition": experiment.partition.fingerprint(),
        "test_examples": len(experiment.dataset.test),
        **unigram(experiment),
    }


def unigram(experiment: Experiment) -> Mapping[str, float]:
    """For text with hidden words, how well they are guessed by one who knows only how often each word occurs."""
    dataset, hidden = experiment.dataset, experiment.judge.text.hidden()
    if hidden is None or dataset.test.y.dim() < 2 or not bool(hidden.any()):
        return {}
    asked = dataset.test.y[hidden]
    return {"unigram_perplexity_hidden": unigram_perplexity(dataset.train.y, asked, dataset.classes)}


@contextmanager
def one_thread() -> Iterator[None]:
    """One torch thread: the same bits on every machine, and no slower for nets of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

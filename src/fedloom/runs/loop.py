"""The loop: draw a cohort, let the method have its round, evaluate when due."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..engines import DeviceEnd, Refusal, ServerEnd
from ..evaluation import Row
from ..fleet import UNCOMPRESSED, Device, EvalTarget, RoundContext, Traffic, Transport, expected_participants, make_ask
from ..footprints import Aggregate, DPAggregator, ServerStep, split_moments
from ..results import Record, Result
from ..tensors import Parcel
from ..wording import pluralize
from .checkpoint import Checkpoint
from .experiment import Experiment
from .privacy import compute_epsilon

ADMITTED, MISSING = "admitted", "missing"
Line = dict[str, Any]
AnyParcel = TypeVar("AnyParcel", Parcel, Parcel | None)


@dataclass(frozen=True, repr=False)
class RoundResult(Result):
    """What one round did.

    Parameters
    ----------
    number : the round, from 1.
    of : how many rounds the recipe has; a method's last exchange comes after them.
    traffic : bytes and devices, asked and replied.
    refused : replies that were not admitted, with the reason.
    rows : everything that was measured, as in `rows.jsonl`.
    seconds : the time it took, evaluation included; not that of other runs beside it.
    server : the server's state after the round.
    participation : a line per tier and outcome.
    evaluation_seconds : the part of `seconds` that went into evaluation.
    test : the test that the method is for: "global", or "local" for personal models.
    headline : the metric that the round is reported by; "": accuracy or perplexity, whichever it has.
    """

    number: int
    of: int
    traffic: Traffic
    refused: tuple[Refusal, ...]
    rows: tuple[Row, ...]
    seconds: float
    server: Parcel
    participation: tuple[Line, ...] = ()
    evaluation_seconds: float = 0.0
    test: str = "global"
    headline: str = ""

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of each tier's model: `result.metrics["small"]["accuracy"]`.

        On the test that the method is for (`test`). With several candidates the keys are candidate and tier, such as
        "personal small". Empty if the round was not evaluated.
        """
        rows = self.headline_rows
        several = len({row.candidate for row in rows}) > 1
        metrics: dict[str, dict[str, float]] = {}
        for row in rows:
            metrics.setdefault(f"{row.candidate} {row.tier}" if several else row.tier, {})[row.metric] = row.value
        return metrics

    @property
    def headline_rows(self) -> list[Row]:
        """The rows of whole tiers on the test that the method is for, or on another if it was not evaluated."""
        rows = [row for row in self.rows if row.candidate and not row.device]
        test = self.test if any(row.test == self.test for row in rows) else next((row.test for row in rows), "")
        return [row for row in rows if row.test == test]

    @property
    def title(self) -> str:
        replies = f"{self.traffic.replied} of {pluralize(self.traffic.asked, 'reply')}"
        name = f"round {self.number} of {self.of}" if self.number <= self.of else "last exchange"
        return f"{name}: {replies}, {self.seconds:.1f} s"

    def records(self) -> list[Record]:
        return [{"tier": tier, **values} for tier, values in self.metrics.items()]

    def content(self) -> dict[str, Any]:
        return {
            "round": self.number, "of": self.of, "test": self.test, "metrics": self.metrics, "seconds": self.seconds,
            "asked": self.traffic.asked, "replied": self.traffic.replied,
            "bytes_down": self.traffic.bytes_down, "bytes_up": self.traffic.bytes_up,
        }  # fmt: skip


def rounds(experiment: Experiment, since: Checkpoint | None = None) -> Iterator[RoundResult]:
    """All rounds of an experiment, one after the other, or those after a checkpoint."""
    recipe, method, faults = experiment.loaded.recipe, experiment.method, experiment.faults
    done = since.number if since else 0
    server = since.server if since and done else method.start(experiment.fleet, recipe.seed, experiment.warm)
    for number in range(done + 1, recipe.rounds + 1):
        running = _Round(experiment, number, faults.cohort(number))
        server = running.settle(server, running.play(method.round, server))
        yield running.finish(server)
        faults.check_failures(experiment.state)
    if done > recipe.rounds:  # the last exchange is over too
        return
    running = _Round(experiment, recipe.rounds + 1, faults.members(recipe.rounds + 1))
    finished = running.play(method.finish, server)
    if finished is not None:  # a last exchange is one more round, in which all devices may take part
        yield running.finish(running.settle(server, finished, last_exchange=True))


class _Round:
    """One round while it runs."""

    def __init__(self, experiment: Experiment, number: int, cohort: list[Device]):
        self.clock = experiment.simulator.executor.clock  # other experiments may run side by side
        self.experiment, self.started, self.refusals_before = experiment, self.clock(), len(experiment.refusals)
        limit = experiment.loaded.recipe.admission.quarantine
        if limit is not None:
            cohort = [device for device in cohort if not experiment.state.is_quarantined(device, limit)]
        self.context = round_context(experiment, number, cohort)

    @property
    def refusals(self) -> list[Refusal]:
        return [refusal for _, refusal in self.experiment.refusals[self.refusals_before :]]

    def play(self, half: Callable[[Parcel, RoundContext], AnyParcel], server: Parcel) -> AnyParcel:
        """The method's round, or its last exchange. A server optimizer keeps its moments beside the method's state.

        The method never sees them: what it sends to devices is its own state.
        """
        optimizer = self.experiment.server_optimizer
        if optimizer is None:
            return half(server, self.context)
        own, moments = split_moments(server)
        step = ServerStep(optimizer, self.context.aggregate, own, moments)
        after = half(own, replace(self.context, aggregate=step))
        return after if after is None else {**after, **step.moments}

    def settle(self, before: Parcel, after: Parcel, last_exchange: bool = False) -> Parcel:
        """The server state that the round ends with; devices that were refused too often are quarantined."""
        experiment, context = self.experiment, self.context
        server = experiment.faults.settle(experiment.state, experiment.client_states, context, before, after)
        limit = experiment.loaded.recipe.admission.quarantine
        if limit is not None and not last_exchange:
            quarantined = experiment.state.note_refusals(context, self.refusals, limit)
            experiment.refusals.extend((context.number, refusal) for refusal in quarantined)
        return server

    def finish(self, server: Parcel) -> RoundResult:
        """Evaluate what the round has made, if it is time to, and commit the states of its devices."""
        experiment, context, recipe = self.experiment, self.context, self.experiment.loaded.recipe
        trained, number = self.clock(), context.number
        # before evaluation, which asks devices too; with differential privacy a norm would reveal what noise hides
        lines = participation(context, self.refusals, with_norms=recipe.privacy.clip is None)
        rows = evaluate_if_due(experiment, server, number, last=number >= recipe.rounds)
        evaluated = self.clock() - trained
        if experiment.screening:
            experiment.screening.commit()
        experiment.engine.commit(number)
        headlines = (name for name, info in experiment.evaluator.declared_metrics.items() if info.headline)
        return RoundResult(
            number, recipe.rounds, context.traffic, tuple(self.refusals),
            (*rows, *_figures(experiment, context)), self.clock() - self.started, server, lines, evaluated,
            experiment.headline_test, next(headlines, ""),
        )  # fmt: skip


def round_context(experiment: Experiment, number: int, cohort: list[Device]) -> RoundContext:
    """What a method gets for a round: cohort, engine, aggregation, and the transports between."""
    context = RoundContext(
        number,
        cohort,
        experiment.fleet,
        experiment.engine,
        aggregate_for(experiment, number),
        experiment.public,
        experiment.deployed,
        wire=experiment.compression or UNCOMPRESSED,
    )
    context = experiment.faults.apply(context)
    return replace(context, transports=tuple(_transports(experiment, context)))


def _transports(experiment: Experiment, context: RoundContext) -> Iterator[Transport]:
    """From the server to the devices."""
    simulator, compression = experiment.simulator, experiment.compression
    if experiment.screening:
        yield experiment.screening
    if experiment.attack:
        yield experiment.attack
    if compression:
        yield ServerEnd(compression, simulator.gate.report, simulator.gate.max_examples)
    injector = experiment.faults.injector(context)
    if injector:
        yield injector
    if compression:
        yield DeviceEnd(compression, simulator.client_states.residual)


def aggregate_for(experiment: Experiment, round_number: int) -> Aggregate:
    """The recipe's aggregation; with differential privacy, one whose noise is the round's own."""
    privacy, fleet = experiment.loaded.recipe.privacy, experiment.fleet
    if privacy.clip is None or privacy.noise is None:
        return experiment.aggregate
    expected = expected_participants(fleet, experiment.loaded.recipe.fleet.participation)
    participants = [
        (experiment.method.aggregation_footprint(tier, fleet, round_number), expected[tier.name])
        for tier in fleet.active_tiers
        if expected[tier.name] > 0
    ]
    return DPAggregator(privacy.clip, privacy.noise, participants, fleet.seed, round_number)


def eval_targets(experiment: Experiment, server: Parcel) -> Mapping[str, EvalTarget]:
    """The method's models to evaluate. It sees its own state, without the moments of a server optimizer."""
    own = server if experiment.server_optimizer is None else split_moments(server)[0]
    return experiment.method.eval_targets(own)


def evaluate_if_due(experiment: Experiment, server: Parcel, number: int, last: bool) -> list[Row]:
    """The rows of a round's models; none if the round is not to be evaluated. The last one always is."""
    recipe = experiment.loaded.recipe
    dense = number > recipe.rounds * (1 - recipe.evaluation.dense_last)
    due = last or dense or number % recipe.evaluation.every == 0
    return evaluate(experiment, server, number, last) if due else []


def evaluate(experiment: Experiment, server: Parcel, number: int, last: bool) -> list[Row]:
    """Evaluation asks devices too, but is no part of the round: it changes no state and its traffic is not counted."""
    when = experiment.loaded.recipe.evaluation.per_device
    per_device = when == "always" or (when == "last" and last)
    targets = eval_targets(experiment, server)
    return experiment.evaluator.rows(
        targets, experiment.fleet, make_ask(experiment.engine, number), number, per_device, last
    )


def _figures(experiment: Experiment, context: RoundContext) -> list[Row]:
    """Rows about the round as a whole."""
    traffic, recipe, compressed = context.traffic, experiment.loaded.recipe, {}
    if experiment.compression:
        compressed = {
            "bytes_down_compressed": traffic.compressed_bytes_down,
            "bytes_up_compressed": traffic.compressed_bytes_up,
        }
    figures = {
        "bytes_down": traffic.bytes_down,
        "bytes_up": traffic.bytes_up,
        **compressed,
        "simulated_seconds": experiment.faults.round_seconds(context),
        "epsilon": None if recipe.privacy.clip is None else compute_epsilon(recipe, context.number),
    }
    rows = [Row(context.number, "", "", "", "", name, value) for name, value in figures.items() if value is not None]
    return rows + experiment.faults.rows(experiment.state, context)


def participation(context: RoundContext, refusals: Iterable[Refusal], with_norms: bool) -> tuple[Line, ...]:
    """A line per tier and outcome: the devices, bytes down, bytes up per bundle, and the least, median and largest norm
    of their updates."""
    lost: dict[str, str] = {}
    for refusal in refusals:
        lost.setdefault(refusal.device, refusal.code)
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(context.traffic.devices):
        outcome = ADMITTED if name in context.traffic.examples else MISSING
        groups.setdefault((context.traffic.devices[name].tier, lost.get(name, outcome)), []).append(name)
    return tuple(
        {
            "round": context.number, "tier": tier, "outcome": outcome, "devices": names,
            **_bytes(context.traffic, names), **(_norms(context.traffic, names) if with_norms else {}),
        }
        for (tier, outcome), names in sorted(groups.items())
    )  # fmt: skip


def _bytes(traffic: Traffic, names: Sequence[str]) -> Line:
    up: Counter[str] = Counter()
    for name in names:
        up.update(traffic.uploaded.get(name, {}))
    return {
        "bytes_down": sum(traffic.bytes_by_device[name] for name in names) - up.total(),
        "bytes_up": dict(sorted(up.items())),
    }


def _norms(traffic: Traffic, names: Sequence[str]) -> Line:
    norms = [traffic.norms[name] for name in names if name in traffic.norms]
    if not norms:
        return {}
    return {"norms": [float(f"{one:.6g}") for one in (min(norms), statistics.median(norms), max(norms))]}


@contextmanager
def single_thread() -> Iterator[None]:
    """One torch thread: the same bits on every machine, and no slower for nets of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""Compare a recipe with other arms and controls over paired seeds. All arms are assembled before any of them runs."""

import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..analysis.costs import dry_run
from ..engines import InProcess, Lockstep, WorkerPool
from ..evaluation import Row
from ..evaluation.metrics import UndeclaredDirection
from ..files import write_atomic
from ..fleet import Fleet, count_parameters
from ..models import compute_cost
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.schema import CompareConfig
from ..registry import suggest
from ..reporting.device_outcomes import compare_pairs, device_sentences, summarize_devices
from ..reporting.paired_stats import Arm, ComparedMetric, metric_of
from ..reporting.search import SEARCH_FOLDER, read_searches, search_sentence
from ..reporting.tables import DESCRIPTION_FILE, DESCRIPTION_FORMAT, ComparisonResult, ComparisonTerms, conclude
from ..reporting.targets import BudgetUnit, budget_lines, limit_to_budget
from ..runs.build import assemble
from ..runs.correct_examples import read_correct
from ..runs.data import data_spec_of
from ..runs.experiment import Experiment
from ..runs.faults import NoQuorum
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.loop import RoundResult, single_thread
from ..runs.own_names import describe_names, list_own_names, load_recipe_of
from ..runs.recorder import NothingAdmitted, record_rounds, utc_now
from ..runs.resume import changed_keys, read_resume_point
from ..runs.trackers import TrackerChoice, build_trackers
from ..tensors import payload_bytes
from ..wording import join_words
from .budget import spend_equal_bytes
from .controls import CONTROLS, NO_ARMS, build_arms, errors_at_arm, served_models

logger = logging.getLogger(__name__)

KIND = "comparison"
MEMORY_LIMIT = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class PendingRun:
    """A run that is yet to be started."""

    name: str
    simulator: InProcess
    memory: int  # bytes
    start: Callable[[], Iterator[RoundResult]]


def run_side_by_side(lockstep: Lockstep, runs: Iterable[PendingRun]) -> Iterator[tuple[str, RoundResult]]:
    """Run as many side by side as memory allows, in order; yields (name, round)."""
    group: list[PendingRun] = []
    for run in runs:
        if group and sum(one.memory for one in group) + run.memory > MEMORY_LIMIT:
            yield from _run_group(lockstep, group)
            group = []
        group.append(run)
    yield from _run_group(lockstep, group)


def _run_group(lockstep: Lockstep, group: Sequence[PendingRun]) -> Iterator[tuple[str, RoundResult]]:
    steps = {run.name: run.start() for run in group}
    for run in group:
        run.simulator.client_states.budget //= len(group)
    yield from lockstep.steps(steps)


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # by arm, then seed
    fleet: Fleet  # of the recipe itself
    lockstep: Lockstep
    settings: CompareConfig = field(default_factory=CompareConfig)
    candidates: Mapping[str, str] = field(default_factory=dict)  # by arm; empty: the first
    command: str = ""  # repeats it
    track: Sequence[TrackerChoice] = ()  # names or classes: every run gets trackers of its own
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods that do not fit, and why
    test: str | None = None  # that verdicts are about; None: the one that the first arm's method is for
    equal: BudgetUnit = "rounds"  # what every arm counts up to: the first one's rounds, bytes or simulated seconds

    @property
    def seeds(self) -> list[int]:
        """The same in every arm."""
        return [experiment.fleet.seed for experiment in next(iter(self.experiments.values()))]

    @property
    def headlines(self) -> dict[str, str]:
        """The test that each arm's method is for."""
        return {arm: experiments[0].headline_test for arm, experiments in self.experiments.items()}

    @property
    def verdict_test(self) -> str:
        """The test that the verdict is about: arms that are made for different tests are judged on the first one's."""
        return self.test or next(iter(self.headlines.values()))

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def unfinished_runs(self) -> dict[str, tuple[Experiment, Path]]:
        """The runs that are not finished, by name."""
        unfinished = {}
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                if not (_has_started(folder) and read_manifest(folder)["status"] == "finished"):
                    name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                    unfinished[name] = experiment, folder
        return unfinished

    def round_counts(self) -> dict[str, int]:
        """The number of rounds of each unfinished run."""
        return {name: experiment.loaded.recipe.rounds for name, (experiment, _) in self.unfinished_runs().items()}

    def rounds(self) -> Generator[tuple[str, RoundResult], None, None]:
        """Run what is unfinished, as many runs side by side as memory allows; yields (name, round)."""
        self.open()
        status = "interrupted"
        try:
            with single_thread(), closing(self.lockstep.pool):
                yield from run_side_by_side(self.lockstep, map(self._pending, self.unfinished_runs().items()))
            status = "failed" if self.unfinished_runs() else "finished"
        except Exception:
            status = "failed"
            raise
        finally:
            self._write_manifest(status)

    def open(self) -> None:
        """Write what is needed to go on from its folder, before anything runs."""
        self._write_manifest(status="running")
        self.write_description()

    def with_recipes(self, recipes: Mapping[str, LoadedRecipe], registries: Registries, data: Path) -> "Comparison":
        """The same comparison with other settings in its arms, such as those that a search has chosen."""
        first, loaded = next(iter(self.experiments.values()))[0], next(iter(recipes.values()))
        same_data = loaded.recipe.data == first.loaded.recipe.data
        experiment = assemble(loaded, registries, data, first.dataset if same_data else None)
        workers = self.lockstep.pool.workers
        planned = _plan(recipes, experiment, registries, self.seeds, self.home, data, workers)
        return replace(
            planned, settings=self.settings, candidates=self.candidates, command=self.command, track=self.track,
            left_out=self.left_out, test=self.test, equal=self.equal,
        )  # fmt: skip

    def _log_failure(self, name: str, steps: Iterator[RoundResult]) -> Iterator[RoundResult]:
        """Let the other runs continue if this one fails."""
        try:
            yield from steps
        except (NoQuorum, NothingAdmitted) as error:
            logger.warning("%s failed: %s", name, error)

    def _pending(self, unfinished: tuple[str, tuple[Experiment, Path]]) -> PendingRun:
        name, (experiment, folder) = unfinished

        def start() -> Iterator[RoundResult]:
            since = read_resume_point(folder, experiment) if _has_started(folder) else None
            trackers = build_trackers(self.track, name, several_runs=True)
            return self._log_failure(name, record_rounds(experiment, folder, since, trackers))

        return PendingRun(name, experiment.simulator, estimate_memory(experiment), start)

    def check_simulated_seconds(self) -> None:
        """Raise unless every arm's tiers have a speed and a bandwidth, and a server that trains has a speed."""
        for arm, (first, *_) in self.experiments.items():
            clock, fleet, hint = first.faults.clock, first.fleet, ""
            if not clock.knows(tier.name for tier in fleet.active_tiers):
                key, hint = "tiers", "give every tier its speed and bandwidth"
            elif clock.server_seconds(fleet.global_model, [1]) is None:
                key, hint = "fleet", f"the server trains in {arm}; set fleet.server_speed"
            if hint:
                message = "the duration of a round is unknown"
                raise first.loaded.error(RecipeIssue((key,), "CLOCK_UNKNOWN", message, hint))

    def _write_manifest(self, status: str) -> None:
        """Write what is needed to resume it from its folder."""
        arms = {name: experiments[0].loaded.recipe.document() for name, experiments in self.experiments.items()}
        started = read_manifest(self.home)["started"] if (self.home / MANIFEST).is_file() else utc_now()
        self.home.mkdir(parents=True, exist_ok=True)
        manifest = {"kind": KIND, "status": status, "started": started, "seeds": self.seeds, "arms": arms}
        manifest |= self._describe_names()
        write_atomic(self.home / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())

    def _describe_names(self) -> dict[str, Any]:
        first = next(iter(self.experiments.values()))[0]
        own: dict[str, set[str]] = {}
        for each in self.experiments.values():
            for kind, names in list_own_names(each[0].loaded.recipe, first.registries).items():
                own.setdefault(kind, set()).update(names)
        return {
            **describe_names(first.loaded.recipe, first.registries),
            "own_names": {kind: sorted(names) for kind, names in own.items()},
        }

    def result(self) -> ComparisonResult:
        """Conclude once everything has run, counting of every run only what fits the first arm's budget."""
        arms, equal = [self._arm(name) for name in self.experiments], self.equal
        counted, terms = limit_to_budget(arms, equal), self.terms()
        result = conclude(counted, terms)
        round_counts = {each[0].loaded.recipe.rounds for each in self.experiments.values()}
        budgets = budget_lines(arms, equal) if equal != "rounds" or len(round_counts) > 1 else []
        unfinished = self.unfinished_runs()
        failures = [f"{name} failed" for name in unfinished]
        outcomes = summarize_devices(counted, self._device_tiers())
        pairs = compare_pairs(counted, terms.tiers, terms.test, terms.examples)
        details = [] if unfinished else device_sentences(counted, outcomes)
        details += map(search_sentence, read_searches(self.home / SEARCH_FOLDER))
        notes = self.identical_arms()
        self.write_description(details, notes)
        verdict = [*result.verdict, *budgets, *failures, *details, *notes]
        return replace(
            result, verdict=verdict, left_out=dict(self.left_out), pairs=pairs, devices=outcomes,
            details=details,
        )  # fmt: skip

    def _device_tiers(self) -> dict[str, str]:
        """The recipe's tier of each device; empty if tiers are redrawn every round."""
        return {one.name: one.tier for one in self.fleet.devices(1)} if self.fleet.assignment == "fixed" else {}

    def identical_arms(self) -> list[str]:
        """A line for arms that did exactly the same: comparing them says nothing. Says what they differ in."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in self.experiments:
            manifests = [read_manifest(folder) for folder in self.folders(name) if _has_started(folder)]
            marks = [f"{one.get('sha256')} {one.get('devices_sha256')}" for one in manifests if "sha256" in one]
            if len(marks) == len(self.seeds):
                groups.setdefault(tuple(marks), []).append(name)
        return [self._describe_identical(names) for names in groups.values() if len(names) > 1]

    def _describe_identical(self, names: Sequence[str]) -> str:
        first, *others = [self.experiments[name][0].loaded.recipe.document() for name in names]
        keys = dict.fromkeys(key for other in others for key in changed_keys(first, other))
        shown = [*list(keys)[:3], *([f"{len(keys) - 3} more"] if len(keys) > 3 else [])]
        only = f"they differ only in {join_words(shown)}, which has no effect here" if keys else ""
        why = only or "their recipes are the same"
        return f"{join_words(names)} did exactly the same: their models are equal to the bit; {why}"

    def terms(self) -> ComparisonTerms:
        by_size = sorted(self.fleet.tiers, key=lambda tier: -count_parameters(tier.model.shapes()))
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        tiers, controls = [tier.name for tier in by_size], [name for name in self.experiments if name in CONTROLS]
        settings = self.settings
        chosen = settings.baseline, settings.margin, settings.metric or ""
        return ComparisonTerms(tiers, shares, self.verdict_test, examples, controls, *chosen, self.headlines)

    def write_description(self, details: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
        """Write how the runs belong together, so that `fedloom report` can compare them again.

        `details` and `notes`: sentences of the result that need more than the rows of tiers.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        path = self.home / DESCRIPTION_FILE
        earlier = json.loads(path.read_text()) if path.is_file() else {}
        settings = {
            "equal": self.equal, "command": self.command or earlier.get("command", ""), "left_out": dict(self.left_out),
            "details": list(details), "notes": list(notes),
        }  # fmt: skip
        arms = {}
        for name in self.experiments:
            arm = self._arm(name, read=False)
            folders = [str(folder.relative_to(self.home)) for folder in self.folders(name)]
            serving = {tier: asdict(served) for tier, served in arm.serving.items()}
            evaluated = {"candidate": arm.candidate, "shares": dict(arm.shares)}
            arms[name] = {"runs": folders, "seeds": self.seeds, "serving": serving, **evaluated}
        description = {"format": DESCRIPTION_FORMAT, "arms": arms, "terms": asdict(self.terms()), **settings}
        write_atomic(path, (json.dumps(description, indent=2) + "\n").encode())

    def _metric(self, arm: str, rows: Iterable[Row] = ()) -> ComparedMetric:
        """The one that the comparison is about."""
        return metric_of(rows, self.experiments[arm][0].evaluator.declared_metrics, self.settings.metric)

    def _arm(self, name: str, read: bool = True) -> Arm:
        runs = [list(read_rows(folder)) for folder in self.folders(name)] if read else []
        fleet = self.experiments[name][0].fleet
        shares = {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        same_tiers = shares.keys() == {tier.name for tier in self.fleet.tiers}  # a control may have one tier
        statuses = [read_manifest(folder)["status"] for folder in self.folders(name)] if read else []
        return Arm(
            name,
            served_models(name, self.fleet, fleet),
            runs,
            self.candidates.get(name, ""),
            shares if same_tiers else {},
            self._metric(name, (row for rows in runs for row in rows)),
            {tier.name: compute_cost(tier.model).macs for tier in fleet.tiers},
            frozenset(index for index, status in enumerate(statuses) if status == "failed"),
            [read_correct(folder) for folder in self.folders(name)] if read else [],
        )


def _has_started(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def estimate_memory(experiment: Experiment) -> int:
    """Estimate the bytes of an experiment by a dry run: the server's state and twice the uploads of a round."""
    fleet, method, loaded = experiment.fleet, experiment.method, experiment.loaded
    moved = dry_run(loaded, method, fleet, data_spec_of(experiment.dataset), experiment.compression)
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    sent = sum(share * moved.bytes_up[tier.name] for tier, share in shares)
    optimizer = experiment.server_optimizer
    copies = 1 + (0 if optimizer is None else len(optimizer.start(torch.zeros(()))))  # of the weights, with moments
    state = copies * payload_bytes(method.start(fleet, fleet.seed, experiment.warm))
    return int(state + 2 * loaded.recipe.fleet.participation * fleet.size * sent)


def plan_comparison(
    loaded: LoadedRecipe, registries: Registries, seeds: int, controls: Sequence[str], home: Path, data: Path,
    workers: int = 1, beside: Mapping[str, LoadedRecipe] = NO_ARMS,
) -> Comparison:  # fmt: skip
    """Plan the recipe, its own arms, those in `beside` and controls, for `seeds` seeds from the recipe's on."""
    first = assemble(loaded, registries, data)
    numbers = range(loaded.recipe.seed, loaded.recipe.seed + seeds)
    arms = build_arms(loaded, registries, first.fleet, controls, beside)
    if loaded.recipe.compare.rounds_by == "bytes":
        arms = spend_equal_bytes(arms, registries, data, first.dataset)
    return _plan(arms, first, registries, numbers, home, data, workers)


def reopen_comparison(home: Path, registries: Registries, data: Path, workers: int) -> Comparison:
    """Reopen a comparison from its folder; finished runs are not repeated."""
    manifest = read_manifest(home)
    arms = {name: load_recipe_of(home, registries, document) for name, document in manifest["arms"].items()}
    first = assemble(next(iter(arms.values())), registries, data)
    planned = _plan(arms, first, registries, manifest["seeds"], home, data, workers)
    described = read_description(home)
    settings = planned.settings.model_copy(update=_described_settings(described))
    return replace(
        planned, settings=settings, left_out=described.get("left_out", {}), test=described.get("terms", {}).get("test"),
        equal=described.get("equal", "rounds"),
    )  # fmt: skip


def read_description(home: Path) -> dict[str, Any]:
    """How the runs of a comparison belong together; empty before it has begun."""
    path = home / DESCRIPTION_FILE
    description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return description


def _described_settings(description: Mapping[str, Any]) -> dict[str, Any]:
    """The terms that a comparison was started with; the recipes of its runs do not have them."""
    terms = description.get("terms", {})
    known = {key: terms[key] for key in ("metric", "baseline", "margin") if key in terms}
    return {**known, "metric": known.get("metric") or None}


def is_comparison(home: Path) -> bool:
    return (home / MANIFEST).is_file() and read_manifest(home).get("kind") == KIND


def _plan(
    recipes: Mapping[str, LoadedRecipe], first: Experiment, registries: Registries, seeds: Sequence[int], home: Path,
    data: Path, workers: int,
) -> Comparison:  # fmt: skip
    loaded = first.loaded
    check_direction(first)
    experiments, candidates, lockstep = {}, {}, Lockstep(WorkerPool(workers))
    for arm, recipe in recipes.items():
        with errors_at_arm(loaded, arm):
            seeded = [recipe.with_document({**recipe.recipe.document(), "seed": seed}) for seed in seeds]
            experiments[arm] = [assemble(one, registries, data, first.dataset, executor=lockstep) for one in seeded]
        candidates[arm] = choose_candidate(loaded, arm, experiments[arm][0])
    return Comparison(home, experiments, first.fleet, lockstep, loaded.recipe.compare, candidates)


def check_direction(experiment: Experiment, name: str | None = None) -> None:
    """Raise if the metric that would be compared, or the one named, does not say whether higher is better."""
    loaded = experiment.loaded
    metric = metric_of((), experiment.evaluator.declared_metrics, name or loaded.recipe.compare.metric)
    if not metric.is_directed:
        error = UndeclaredDirection(metric.name)
        raise loaded.error(RecipeIssue(("evaluation", "metrics"), "METRIC_DIRECTION", str(error), error.hint))


def choose_candidate(loaded: LoadedRecipe, arm: str, experiment: Experiment) -> str:
    """The candidate named by the recipe; "" (the first) for controls that lack it."""
    name = loaded.recipe.compare.candidate
    if name is None:
        return ""
    method, fleet = experiment.method, experiment.fleet
    names = method.eval_targets(method.start(fleet, fleet.seed, experiment.warm))
    if name in names:
        return name
    if arm in loaded.recipe.compare.arms or arm == loaded.recipe.method.name:
        message = f"{arm} has no candidate of that name"
        raise loaded.error(RecipeIssue(("compare", "candidate"), "RECIPE_NAME", message, suggest(name, names), name))
    return ""

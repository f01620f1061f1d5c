"""Compare a recipe with other arms and controls over paired seeds. All arms are assembled before any of them runs."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..analysis.costs import dry_run
from ..engines import InProcess, Lockstep, WorkerPool
from ..files import write_atomic
from ..fleet import Fleet, count_parameters
from ..models import compute_cost
from ..recipe.errors import RecipeIssue, suggest
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..recipe.schema import CompareConfig
from ..reporting.paired_stats import Arm, metric_of
from ..reporting.tables import DESCRIPTION_FILE, DESCRIPTION_FORMAT, ComparisonResult, ComparisonTerms, conclude
from ..reporting.targets import BudgetUnit, budget_lines, limit_to_budget
from ..runs.build import assemble
from ..runs.data import data_spec_of
from ..runs.experiment import Experiment
from ..runs.faults import NoQuorum
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.loop import RoundResult, single_thread
from ..runs.recorder import NothingAdmitted, record_rounds, utc_now
from ..runs.resume import read_resume_point
from ..runs.trackers import build_trackers
from ..tensors import payload_bytes
from .controls import CONTROLS, NO_ARMS, build_arms, errors_at_arm, served_models

logger = logging.getLogger(__name__)

KIND = "comparison"
MEMORY_LIMIT = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # by arm, then seed
    fleet: Fleet  # of the recipe itself
    lockstep: Lockstep
    settings: CompareConfig = field(default_factory=CompareConfig)
    candidates: Mapping[str, str] = field(default_factory=dict)  # by arm; empty: the first
    command: str = ""  # repeats it
    track: Sequence[str] = ()  # names of trackers

    @property
    def seeds(self) -> list[int]:
        """The same in every arm."""
        return [experiment.fleet.seed for experiment in next(iter(self.experiments.values()))]

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

    def rounds(self) -> Iterator[tuple[str, RoundResult]]:
        """Run what is unfinished, as many runs side by side as memory allows; yields (name, round)."""
        self._write_manifest(status="running")
        self.write_description("global")
        with single_thread(), closing(self.lockstep.pool):
            for group in self._side_by_side():
                for simulator, _ in group.values():
                    simulator.client_states.budget //= len(group)
                yield from self.lockstep.steps({name: steps for name, (_, steps) in group.items()})
        self._write_manifest(status="failed" if self.unfinished_runs() else "finished")

    def _log_failure(self, name: str, steps: Iterator[RoundResult]) -> Iterator[RoundResult]:
        """Let the other runs continue if this one fails."""
        try:
            yield from steps
        except (NoQuorum, NothingAdmitted) as error:
            logger.warning("%s failed: %s", name, error)

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[RoundResult]]]]:
        """Groups of runs that fit into memory together."""
        group: dict[str, tuple[InProcess, Iterator[RoundResult]]] = {}
        free = MEMORY_LIMIT
        for name, (experiment, folder) in self.unfinished_runs().items():
            size = estimate_memory(experiment)
            if group and size > free:
                yield group
                group, free = {}, MEMORY_LIMIT
            since = read_resume_point(folder, experiment) if _has_started(folder) else None
            followers = build_trackers(self.track, name)
            group[name] = (
                experiment.simulator,
                self._log_failure(name, record_rounds(experiment, folder, since, followers)),
            )
            free -= size
        yield group

    def check_simulated_seconds(self) -> None:
        """Raise unless every arm's tiers have a speed and a bandwidth."""
        for first, *_ in self.experiments.values():
            if not first.faults.clock.knows(tier.name for tier in first.fleet.active_tiers):
                hint = "give every tier its speed and bandwidth"
                raise first.loaded.error(
                    RecipeIssue(("tiers",), "CLOCK_UNKNOWN", "the duration of a round is unknown", hint)
                )

    def _write_manifest(self, status: str) -> None:
        """Write what is needed to resume it from its folder."""
        arms = {name: experiments[0].loaded.recipe.document() for name, experiments in self.experiments.items()}
        started = read_manifest(self.home)["started"] if (self.home / MANIFEST).is_file() else utc_now()
        self.home.mkdir(parents=True, exist_ok=True)
        manifest = {"kind": KIND, "status": status, "started": started, "seeds": self.seeds, "arms": arms}
        write_atomic(self.home / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())

    def result(self, test: str, equal: BudgetUnit = "rounds") -> ComparisonResult:
        """Conclude once everything has run, counting of every run only what fits the first arm's budget."""
        arms = [self._arm(name) for name in self.experiments]
        self.write_description(test, equal)
        result = conclude(limit_to_budget(arms, equal), self.terms(test))
        round_counts = {each[0].loaded.recipe.rounds for each in self.experiments.values()}
        budgets = budget_lines(arms, equal) if equal != "rounds" or len(round_counts) > 1 else []
        failures = [f"{name} failed" for name in self.unfinished_runs()]
        return replace(result, verdict=[*result.verdict, *budgets, *failures])

    def terms(self, test: str) -> ComparisonTerms:
        by_size = sorted(self.fleet.tiers, key=lambda tier: -count_parameters(tier.model.shapes()))
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        tiers, controls = [tier.name for tier in by_size], [name for name in self.experiments if name in CONTROLS]
        return ComparisonTerms(tiers, shares, test, examples, controls, self.settings.baseline, self.settings.margin)

    def write_description(self, test: str, equal: BudgetUnit = "rounds") -> None:
        """Write how the runs belong together, so that `fedloom report` can compare them again."""
        self.home.mkdir(parents=True, exist_ok=True)
        path = self.home / DESCRIPTION_FILE
        earlier = json.loads(path.read_text()) if path.is_file() else {}
        settings = {"equal": equal, "command": self.command or earlier.get("command", "")}
        arms = {}
        for name in self.experiments:
            arm = self._arm(name, read=False)
            folders = [str(folder.relative_to(self.home)) for folder in self.folders(name)]
            serving = {tier: asdict(served) for tier, served in arm.serving.items()}
            details = {"candidate": arm.candidate, "shares": dict(arm.shares)}
            arms[name] = {"runs": folders, "seeds": self.seeds, "serving": serving, **details}
        description = {"format": DESCRIPTION_FORMAT, "arms": arms, "terms": asdict(self.terms(test)), **settings}
        write_atomic(path, (json.dumps(description, indent=2) + "\n").encode())

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
            metric_of(row for rows in runs for row in rows),
            {tier.name: compute_cost(tier.model).macs for tier in fleet.tiers},
            frozenset(index for index, status in enumerate(statuses) if status == "failed"),
        )


def _has_started(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def estimate_memory(experiment: Experiment) -> int:
    """Estimate the bytes of an experiment by a dry run: the server's state and twice the uploads of a round."""
    fleet, method, loaded = experiment.fleet, experiment.method, experiment.loaded
    moved = dry_run(loaded, method, fleet, data_spec_of(experiment.dataset))
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    sent = sum(share * moved.bytes_up[tier.name] for tier, share in shares)
    state = payload_bytes(method.start(fleet, fleet.seed, experiment.warm))
    return int(state + 2 * loaded.recipe.fleet.participation * fleet.size * sent)


def plan_comparison(
    loaded: LoadedRecipe, registry: Registry, seeds: int, controls: Sequence[str], home: Path, data: Path,
    workers: int = 1, beside: Mapping[str, LoadedRecipe] = NO_ARMS,
) -> Comparison:  # fmt: skip
    """Plan the recipe, its own arms, those in `beside` and controls, for `seeds` seeds from the recipe's on."""
    first = assemble(loaded, registry, data)
    numbers = range(loaded.recipe.seed, loaded.recipe.seed + seeds)
    arms = build_arms(loaded, registry, first.fleet, controls, beside)
    return _plan(arms, first, registry, numbers, home, data, workers)


def reopen_comparison(home: Path, registry: Registry, data: Path, workers: int) -> Comparison:
    """Reopen a comparison from its folder; finished runs are not repeated."""
    manifest = read_manifest(home)
    arms = {name: load(document, registry) for name, document in manifest["arms"].items()}
    first = assemble(next(iter(arms.values())), registry, data)
    return _plan(arms, first, registry, manifest["seeds"], home, data, workers)


def is_comparison(home: Path) -> bool:
    return (home / MANIFEST).is_file() and read_manifest(home).get("kind") == KIND


def _plan(
    recipes: Mapping[str, LoadedRecipe], first: Experiment, registry: Registry, seeds: Sequence[int], home: Path,
    data: Path, workers: int,
) -> Comparison:  # fmt: skip
    loaded = first.loaded
    experiments, candidates, lockstep = {}, {}, Lockstep(WorkerPool(workers))
    for arm, recipe in recipes.items():
        with errors_at_arm(loaded, arm):
            seeded = [recipe.with_document({**recipe.recipe.document(), "seed": seed}) for seed in seeds]
            experiments[arm] = [assemble(one, registry, data, first.dataset, executor=lockstep) for one in seeded]
        candidates[arm] = choose_candidate(loaded, arm, experiments[arm][0])
    return Comparison(home, experiments, first.fleet, lockstep, loaded.recipe.compare, candidates)


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

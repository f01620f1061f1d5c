"""A recipe beside others and its controls, with several seeds: paired by seed, assembled whole before anything runs."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..analysis.costs import dry_run
from ..engines import InProcess, WorkerPool, lockstep
from ..files import write_atomic
from ..fleet import Fleet, count_parameters
from ..models import cost
from ..recipe.errors import RecipeIssue, suggest
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..recipe.schema import CompareConfig
from ..reporting import Arm, targets
from ..reporting.paired_stats import metric_of
from ..reporting.result import DESCRIPTION_FILE, DESCRIPTION_FORMAT, ComparisonResult, ComparisonTerms, conclude
from ..reporting.targets import BudgetUnit, limit_to_budget
from ..runs.build import Experiment, assemble, member, simulation
from ..runs.data import outline_of
from ..runs.faults import NoQuorum
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.loop import RoundResult, one_thread
from ..runs.recorder import NothingAdmitted, now, recorded
from ..runs.resume import standing_of
from ..runs.trackers import followed_by
from ..tensors import payload_bytes
from .controls import CONTROLS, NO_ARMS, build_arms, errors_at_arm, served_models

log = logging.getLogger(__name__)

KIND = "comparison"
MEMORY_LIMIT = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # arm by arm, seed by seed
    fleet: Fleet  # of the recipe itself
    workers: int = 1
    said: CompareConfig = field(default_factory=CompareConfig)  # by the recipe
    candidates: Mapping[str, str] = field(default_factory=dict)  # arm by arm, where not its first one counts
    command: str = ""  # that runs it again
    track: Sequence[str] = ()  # what follows every run, besides its folder

    @property
    def seeds(self) -> list[int]:
        """The same in every arm."""
        return [experiment.fleet.seed for experiment in next(iter(self.experiments.values()))]

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def unfinished_runs(self) -> dict[str, tuple[Experiment, Path]]:
        """The runs that are not finished, under their names."""
        found = {}
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                if not (_begun(folder) and read_manifest(folder)["status"] == "finished"):
                    name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                    found[name] = experiment, folder
        return found

    def round_counts(self) -> dict[str, int]:
        """How many rounds each run that is not finished has."""
        return {name: experiment.loaded.recipe.rounds for name, (experiment, _) in self.unfinished_runs().items()}

    def rounds(self) -> Iterator[tuple[str, RoundResult]]:
        """Run everything that is left, as many arms and seeds side by side as memory allows, round by round under their
        names."""
        self._write(status="running")
        self.write_description("global")
        everything = [one for experiments in self.experiments.values() for one in experiments]
        crew = WorkerPool([member(one) for one in everything], self.workers)
        with one_thread(), closing(crew):
            for some in self._side_by_side():
                for engine, _ in some.values():
                    engine.memory.budget //= len(some)
                yield from lockstep(some, crew.outcomes)
        self._write(status="failed" if self.unfinished_runs() else "finished")

    def _alone(self, name: str, steps: Iterator[RoundResult]) -> Iterator[RoundResult]:
        """That a run fails is no reason for the others to end."""
        try:
            yield from steps
        except (NoQuorum, NothingAdmitted) as error:
            log.warning("%s failed: %s", name, error)

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[RoundResult]]]]:
        some: dict[str, tuple[InProcess, Iterator[RoundResult]]] = {}
        room = MEMORY_LIMIT
        for name, (experiment, folder) in self.unfinished_runs().items():
            size = estimate_memory(experiment)
            if some and size > room:
                yield some
                some, room = {}, MEMORY_LIMIT
            since = standing_of(folder, experiment) if _begun(folder) else None
            followers = followed_by(self.track, name)
            some[name] = simulation(experiment), self._alone(name, recorded(experiment, folder, since, followers))
            room -= size
        yield some

    def refuse_without_clock(self) -> None:
        """Raise unless it is known how fast the devices of all arms are."""
        for first, *_ in self.experiments.values():
            if not first.faults.clock.knows(tier.name for tier in first.fleet.active_tiers):
                hint = "give every tier its speed and bandwidth"
                raise first.loaded.error(
                    RecipeIssue(("tiers",), "CLOCK_UNKNOWN", "nobody knows a round's seconds", hint)
                )

    def _write(self, status: str) -> None:
        """Enough to go on with it from its folder."""
        arms = {name: experiments[0].loaded.recipe.document() for name, experiments in self.experiments.items()}
        began = read_manifest(self.home)["started"] if (self.home / MANIFEST).is_file() else now()
        self.home.mkdir(parents=True, exist_ok=True)
        said = {"kind": KIND, "status": status, "started": began, "seeds": self.seeds, "arms": arms}
        write_atomic(self.home / MANIFEST, (json.dumps(said, indent=2) + "\n").encode())

    def result(self, test: str, equal: BudgetUnit = "rounds") -> ComparisonResult:
        """What came of it, once all has run; of every run only what it did with the budget of the first arm."""
        whole = [self._arm(name) for name in self.experiments]
        self.write_description(test, equal)
        found = conclude(limit_to_budget(whole, equal), self.terms(test))
        round_counts = {each[0].loaded.recipe.rounds for each in self.experiments.values()}
        told = targets.budget_lines(whole, equal) if equal != "rounds" or len(round_counts) > 1 else []
        return replace(found, verdict=[*found.verdict, *told, *(f"{name} failed" for name in self.unfinished_runs())])

    def terms(self, test: str) -> ComparisonTerms:
        by_size = sorted(self.fleet.tiers, key=lambda tier: -count_parameters(tier.model.shapes()))
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        tiers, controls = [tier.name for tier in by_size], [name for name in self.experiments if name in CONTROLS]
        return ComparisonTerms(tiers, shares, test, examples, controls, self.said.baseline, self.said.margin)

    def write_description(self, test: str, equal: BudgetUnit = "rounds") -> None:
        """Write down, beside the runs, what they are to each other: so that they can be compared again later."""
        self.home.mkdir(parents=True, exist_ok=True)
        earlier = json.loads((self.home / DESCRIPTION_FILE).read_text()) if (self.home / DESCRIPTION_FILE).is_file() else {}
        how = {"equal": equal, "command": self.command or earlier.get("command", "")}
        arms = {}
        for name in self.experiments:
            arm = self._arm(name, read=False)
            folders = [str(folder.relative_to(self.home)) for folder in self.folders(name)]
            served = {tier: asdict(one) for tier, one in arm.serving.items()}
            about = {"candidate": arm.candidate, "shares": dict(arm.shares)}
            arms[name] = {"runs": folders, "seeds": self.seeds, "serving": served, **about}
        said = {"format": DESCRIPTION_FORMAT, "arms": arms, "terms": asdict(self.terms(test)), **how}
        write_atomic(self.home / DESCRIPTION_FILE, (json.dumps(said, indent=2) + "\n").encode())

    def _arm(self, name: str, read: bool = True) -> Arm:
        runs = [list(read_rows(folder)) for folder in self.folders(name)] if read else []
        own = self.experiments[name][0].fleet
        shares = {tier.name: share for tier, share in zip(own.tiers, own.shares, strict=True)}
        alike = shares.keys() == {tier.name for tier in self.fleet.tiers}  # a control may have one tier alone
        failed = {at for at, one in enumerate(self.folders(name)) if read and read_manifest(one)["status"] == "failed"}
        return Arm(
            name, served_models(name, self.fleet, own), runs, self.candidates.get(name, ""), shares if alike else {},
            metric_of(row for rows in runs for row in rows), {tier.name: cost(tier.model).macs for tier in own.tiers},
            frozenset(failed),
        )  # fmt: skip


def _begun(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def estimate_memory(experiment: Experiment) -> int:
    """About how many bytes an experiment takes: the server's state, and what a round's devices send, as it comes and as
    it is handed on. Found by a rehearsal."""
    fleet, method, loaded = experiment.fleet, experiment.method, experiment.loaded
    moved = dry_run(loaded, method, fleet, outline_of(experiment.dataset))
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    sent = sum(share * moved.up.get(tier.name, 0) for tier, share in shares)
    state = payload_bytes(method.start(fleet, fleet.seed, experiment.warm))
    return int(state + 2 * loaded.recipe.fleet.participation * fleet.size * sent)


def plan_comparison(
    loaded: LoadedRecipe, registry: Registry, seeds: int, controls: Sequence[str], home: Path, data: Path, workers: int = 1,
    beside: Mapping[str, LoadedRecipe] = NO_ARMS,
) -> Comparison:  # fmt: skip
    """The recipe, its arms, those beside it and controls, each with so many seeds from the recipe's on; all share the
    data."""
    first = assemble(loaded, registry, data)
    numbers = range(loaded.recipe.seed, loaded.recipe.seed + seeds)
    return _plan(build_arms(loaded, registry, first.fleet, controls, beside), first, registry, numbers, home, data, workers)


def reopen_comparison(home: Path, registry: Registry, data: Path, workers: int) -> Comparison:
    """A comparison that was begun in this folder; what is finished of it is not run again."""
    said = read_manifest(home)
    found = {name: load(document, registry) for name, document in said["arms"].items()}
    first = assemble(next(iter(found.values())), registry, data)
    return _plan(found, first, registry, said["seeds"], home, data, workers)


def is_comparison(home: Path) -> bool:
    return (home / MANIFEST).is_file() and read_manifest(home).get("kind") == KIND


def _plan(
    recipes: Mapping[str, LoadedRecipe], first: Experiment, registry: Registry, seeds: Sequence[int], home: Path, data: Path,
    workers: int,
) -> Comparison:  # fmt: skip
    loaded = first.loaded
    experiments, candidates = {}, {}
    for arm, recipe in recipes.items():
        with errors_at_arm(loaded, arm):
            experiments[arm] = [
                assemble(recipe.with_document({**recipe.recipe.document(), "seed": seed}), registry, data, first.dataset)
                for seed in seeds
            ]
        candidates[arm] = choose_candidate(loaded, arm, experiments[arm][0])
    return Comparison(home, experiments, first.fleet, workers, loaded.recipe.compare, candidates)


def choose_candidate(loaded: LoadedRecipe, arm: str, experiment: Experiment) -> str:
    """The candidate that the recipe wants judged. A control may lack it; then its first one counts, said by ""."""
    wanted = loaded.recipe.compare.candidate
    if wanted is None:
        return ""
    method, fleet = experiment.method, experiment.fleet
    names = method.eval_targets(method.start(fleet, fleet.seed, experiment.warm))
    if wanted in names:
        return wanted
    if arm in loaded.recipe.compare.arms or arm == loaded.recipe.method.name:
        said = f"{arm} has no candidate of that name"
        raise loaded.error(RecipeIssue(("compare", "candidate"), "RECIPE_NAME", said, suggest(wanted, names), wanted))
    return ""

"""A recipe beside others and its controls, with several seeds: paired by seed, assembled whole before anything runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ..analysis.costs import dry_run
from ..engines import InProcess, WorkerPool, lockstep
from ..files import write_whole
from ..fleet import Fleet, parameters
from ..models import cost
from ..recipe.errors import RecipeIssue, nearest
from ..recipe.load import Loaded, load
from ..recipe.registry import Registry
from ..recipe.schema import Compare
from ..reporting import Arm, targets
from ..reporting.paired_stats import metric_of
from ..reporting.result import DESCRIPTION, FORMAT, Result, Terms, conclude
from ..reporting.targets import Unit, at_equal_budgets
from ..runs.build import Experiment, assemble, member, simulation
from ..runs.data import outline_of
from ..runs.faults import NoQuorum
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.loop import RoundResult, one_thread
from ..runs.recorder import NothingAdmitted, now, recorded
from ..runs.resume import Noticed, standing_of
from ..runs.trackers import followed_by
from ..tensors import payload_bytes
from .controls import CONTROLS, NOBODY, arms, serving, told_at_its_line

KIND = "comparison"
ROOM = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # arm by arm, seed by seed
    fleet: Fleet  # of the recipe itself
    workers: int = 1
    said: Compare = field(default_factory=Compare)  # by the recipe
    candidates: Mapping[str, str] = field(default_factory=dict)  # arm by arm, where not its first one counts
    command: str = ""  # that runs it again
    noticed: Noticed = lambda said: None
    track: Sequence[str] = ()  # what follows every run, besides its folder

    @property
    def seeds(self) -> list[int]:
        """The same in every arm."""
        return [experiment.fleet.seed for experiment in next(iter(self.experiments.values()))]

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def left(self) -> dict[str, tuple[Experiment, Path]]:
        """The runs that are not finished, under their names."""
        found = {}
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                if not (_begun(folder) and read_manifest(folder)["status"] == "finished"):
                    name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                    found[name] = experiment, folder
        return found

    def lengths(self) -> dict[str, int]:
        """How many rounds each run that is not finished has."""
        return {name: experiment.loaded.recipe.rounds for name, (experiment, _) in self.left().items()}

    def rounds(self) -> Iterator[tuple[str, RoundResult]]:
        """Run everything that is left, as many arms and seeds side by side as memory allows, round by round under their
        names."""
        self._write(status="running")
        self.describe("global")
        everything = [one for experiments in self.experiments.values() for one in experiments]
        crew = WorkerPool([member(one) for one in everything], self.workers)
        with one_thread(), closing(crew):
            for some in self._side_by_side():
                for engine, _ in some.values():
                    engine.memory.budget //= len(some)
                yield from lockstep(some, crew.outcomes)
        self._write(status="failed" if self.left() else "finished")

    def _alone(self, name: str, steps: Iterator[RoundResult]) -> Iterator[RoundResult]:
        """That a run fails is no reason for the others to end."""
        try:
            yield from steps
        except (NoQuorum, NothingAdmitted) as error:
            self.noticed(f"{name} failed: {error}")

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[RoundResult]]]]:
        some: dict[str, tuple[InProcess, Iterator[RoundResult]]] = {}
        room = ROOM
        for name, (experiment, folder) in self.left().items():
            size = needs(experiment)
            if some and size > room:
                yield some
                some, room = {}, ROOM
            since = standing_of(folder, experiment, self.noticed) if _begun(folder) else None
            followers = followed_by(self.track, name, self.noticed)
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
        write_whole(self.home / MANIFEST, (json.dumps(said, indent=2) + "\n").encode())

    def result(self, test: str, equal: Unit = "rounds") -> Result:
        """What came of it, once all has run; of every run only what it did with the budget of the first arm."""
        whole = [self._arm(name) for name in self.experiments]
        self.describe(test, equal)
        found = conclude(at_equal_budgets(whole, equal), self.terms(test))
        lengths = {each[0].loaded.recipe.rounds for each in self.experiments.values()}
        told = targets.said(whole, equal) if equal != "rounds" or len(lengths) > 1 else []
        return replace(found, verdict=[*found.verdict, *told, *(f"{name} failed" for name in self.left())])

    def terms(self, test: str) -> Terms:
        by_size = sorted(self.fleet.tiers, key=lambda tier: -parameters(tier.model.shapes()))
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        tiers, controls = [tier.name for tier in by_size], [name for name in self.experiments if name in CONTROLS]
        return Terms(tiers, shares, test, examples, controls, self.said.baseline, self.said.margin)

    def describe(self, test: str, equal: Unit = "rounds") -> None:
        """Write down, beside the runs, what they are to each other: so that they can be compared again later."""
        self.home.mkdir(parents=True, exist_ok=True)
        earlier = json.loads((self.home / DESCRIPTION).read_text()) if (self.home / DESCRIPTION).is_file() else {}
        how = {"equal": equal, "command": self.command or earlier.get("command", "")}
        arms = {}
        for name in self.experiments:
            arm = self._arm(name, read=False)
            folders = [str(folder.relative_to(self.home)) for folder in self.folders(name)]
            served = {tier: asdict(one) for tier, one in arm.serving.items()}
            about = {"candidate": arm.candidate, "shares": dict(arm.shares)}
            arms[name] = {"runs": folders, "seeds": self.seeds, "serving": served, **about}
        said = {"format": FORMAT, "arms": arms, "terms": asdict(self.terms(test)), **how}
        write_whole(self.home / DESCRIPTION, (json.dumps(said, indent=2) + "\n").encode())

    def _arm(self, name: str, read: bool = True) -> Arm:
        runs = [list(read_rows(folder)) for folder in self.folders(name)] if read else []
        own = self.experiments[name][0].fleet
        shares = {tier.name: share for tier, share in zip(own.tiers, own.shares, strict=True)}
        alike = shares.keys() == {tier.name for tier in self.fleet.tiers}  # a control may have one tier alone
        failed = {at for at, one in enumerate(self.folders(name)) if read and read_manifest(one)["status"] == "failed"}
        return Arm(
            name, serving(name, self.fleet, own), runs, self.candidates.get(name, ""), shares if alike else {},
            metric_of(row for rows in runs for row in rows), {tier.name: cost(tier.model).macs for tier in own.tiers},
            frozenset(failed),
        )  # fmt: skip


def _begun(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def needs(experiment: Experiment) -> int:
    """About how many bytes an experiment takes: the server's state, and what a round's devices send, as it comes and as
    it is handed on. Found by a rehearsal."""
    fleet, method, loaded = experiment.fleet, experiment.method, experiment.loaded
    moved = dry_run(loaded, method, fleet, outline_of(experiment.dataset))
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    sent = sum(share * moved.up.get(tier.name, 0) for tier, share in shares)
    state = payload_bytes(method.start(fleet, fleet.seed, experiment.warm))
    return int(state + 2 * loaded.recipe.fleet.participation * fleet.size * sent)


def comparison(
    loaded: Loaded, tables: Registry, seeds: int, controls: Sequence[str], home: Path, data: Path, workers: int = 1,
    beside: Mapping[str, Loaded] = NOBODY,
) -> Comparison:  # fmt: skip
    """The recipe, its arms, those beside it and controls, each with so many seeds from the recipe's on; all share the
    data."""
    first = assemble(loaded, tables, data)
    numbers = range(loaded.recipe.seed, loaded.recipe.seed + seeds)
    return _planned(arms(loaded, tables, first.fleet, controls, beside), first, tables, numbers, home, data, workers)


def reopened_comparison(home: Path, tables: Registry, data: Path, workers: int, noticed: Noticed) -> Comparison:
    """A comparison that was begun in this folder; what is finished of it is not run again."""
    said = read_manifest(home)
    found = {name: load(document, tables) for name, document in said["arms"].items()}
    first = assemble(next(iter(found.values())), tables, data)
    planned = _planned(found, first, tables, said["seeds"], home, data, workers)
    return replace(planned, noticed=noticed)


def is_comparison(home: Path) -> bool:
    return (home / MANIFEST).is_file() and read_manifest(home).get("kind") == KIND


def _planned(
    recipes: Mapping[str, Loaded], first: Experiment, tables: Registry, seeds: Sequence[int], home: Path, data: Path,
    workers: int,
) -> Comparison:  # fmt: skip
    loaded = first.loaded
    experiments, candidates = {}, {}
    for arm, recipe in recipes.items():
        with told_at_its_line(loaded, arm):
            experiments[arm] = [
                assemble(recipe.changed({**recipe.recipe.document(), "seed": seed}), tables, data, first.dataset)
                for seed in seeds
            ]
        candidates[arm] = candidate(loaded, arm, experiments[arm][0])
    return Comparison(home, experiments, first.fleet, workers, loaded.recipe.compare, candidates)


def candidate(loaded: Loaded, arm: str, experiment: Experiment) -> str:
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
        raise loaded.error(RecipeIssue(("compare", "candidate"), "RECIPE_NAME", said, nearest(wanted, names), wanted))
    return ""

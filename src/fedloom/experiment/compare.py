"""A recipe beside others and its controls, with several seeds: paired by seed, assembled whole before anything runs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engines import Crew, InProcess, convoy
from ..fleet import Fleet, parameters
from ..reporting import Arm, Overall, overall, read_rows, table, verdict
from ..reporting.targets import Claim, Reach, conclusions, reaches, targets
from ..tensors import payload_bytes
from .assemble import Experiment, assemble, member, simulation
from .controls import CONTROLS, arms, serving, told_at_its_line
from .costing import rehearse
from .load import Loaded
from .problems import Problem, nearest
from .recipe import Compare
from .record import recorded
from .run import Round, one_thread
from .sources import outline_of
from .tables import Tables

ROOM = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # arm by arm, seed by seed
    fleet: Fleet  # of the recipe itself
    workers: int = 1
    said: Compare = field(default_factory=Compare)  # by the recipe
    candidates: Mapping[str, str] = field(default_factory=dict)  # arm by arm, where not its first one counts

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def rounds(self) -> Iterator[tuple[str, Round]]:
        """Run everything, as many arms and seeds side by side as memory allows, round by round under their names."""
        everything = [one for experiments in self.experiments.values() for one in experiments]
        crew = Crew([member(one) for one in everything], self.workers)
        with one_thread(), closing(crew):
            for some in self._side_by_side():
                for engine, _ in some.values():
                    engine.memory.budget //= len(some)
                yield from convoy(some, crew.outcomes)

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[Round]]]]:
        some: dict[str, tuple[InProcess, Iterator[Round]]] = {}
        room = ROOM
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                size = needs(experiment)
                if some and size > room:
                    yield some
                    some, room = {}, ROOM
                name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                some[name] = simulation(experiment), recorded(experiment, folder)
                room -= size
        yield some

    def result(self, test: str) -> "Result":
        """What came of it, once all has run."""
        judged = [self._arm(name) for name in self.experiments]
        by_size = sorted(self.fleet.tiers, key=lambda tier: -parameters(tier.model.shapes()))
        tiers = [tier.name for tier in by_size]
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        reached = self._reached(judged, tiers, test)
        claims, lines = conclusions(reached)
        others = [arm for arm in judged[1:] if arm.name not in CONTROLS or arm.name == "standalone"]
        against = [overall(judged[0], other, shares, test) for other in others]
        fleet = [one for one in against if one]
        lines = verdict(judged, tiers, shares, test, examples) + [str(one) for one in fleet] + lines
        return Result(table(judged, tiers, shares, test), lines, reached, claims, fleet)

    def _arm(self, name: str) -> Arm:
        runs = [list(read_rows(folder)) for folder in self.folders(name)]
        own = self.experiments[name][0].fleet
        shares = {tier.name: share for tier, share in zip(own.tiers, own.shares, strict=True)}
        alike = shares.keys() == {tier.name for tier in self.fleet.tiers}  # a control may have one tier alone
        return Arm(name, serving(name, self.fleet, own), runs, self.candidates.get(name, ""), shares if alike else {})

    def _reached(self, judged: Sequence[Arm], tiers: Sequence[str], test: str) -> list[Reach]:
        if self.said.baseline is None:
            return []
        return reaches(judged, targets(judged, tiers, test, self.said.baseline, self.said.margin), test)


def needs(experiment: Experiment) -> int:
    """About how many bytes an experiment takes: the server's state, and what a round's devices send, as it comes and as
    it is handed on. Found by a rehearsal."""
    fleet, method, loaded = experiment.fleet, experiment.method, experiment.loaded
    moved = rehearse(loaded, method, fleet, outline_of(experiment.dataset))
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    sent = sum(share * moved.up.get(tier.name, 0) for tier, share in shares)
    state = payload_bytes(method.start(fleet, fleet.seed, experiment.warm))
    return int(state + 2 * loaded.recipe.fleet.participation * fleet.size * sent)


@dataclass(frozen=True)
class Result:
    records: list[dict[str, Any]]
    verdict: list[str]
    reached: list[Reach] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    overall: list[Overall] = field(default_factory=list)


def comparison(
    loaded: Loaded, tables: Tables, seeds: int, controls: Sequence[str], home: Path, data: Path, workers: int = 1
) -> Comparison:
    """The recipe, its arms and controls, each with so many seeds from the recipe's on; all share the data."""
    first = assemble(loaded, tables, data)
    experiments, candidates = {}, {}
    for arm, recipe in arms(loaded, tables, first.fleet, controls).items():
        with told_at_its_line(loaded, arm):
            experiments[arm] = [
                assemble(recipe.changed({**recipe.recipe.document(), "seed": seed}), tables, data, first.dataset)
                for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds)
            ]
        candidates[arm] = candidate(loaded, arm, experiments[arm][0])
    return Comparison(home, experiments, first.fleet, workers, loaded.recipe.compare, candidates)


def candidate(loaded: Loaded, arm: str, experiment: Experiment) -> str:
    """The candidate that the recipe wants judged. A control may lack it; then its first one counts, said by ""."""
    wanted = loaded.recipe.compare.candidate
    if wanted is None:
        return ""
    method, fleet = experiment.method, experiment.fleet
    names = method.candidates(method.start(fleet, fleet.seed, experiment.warm))
    if wanted in names:
        return wanted
    if arm in loaded.recipe.compare.arms or arm == loaded.recipe.method.name:
        said = f"{arm} has no candidate of that name"
        raise loaded.error(Problem(("compare", "candidate"), "RECIPE_NAME", said, nearest(wanted, names), wanted))
    return ""

"""A recipe beside its controls, with several seeds: paired by seed, assembled whole before anything runs."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines import Crew, InProcess, convoy
from ..fleet import Fleet, parameters
from ..reporting import Arm, read_rows, table, verdict
from .assemble import Experiment, assemble, member, simulation
from .controls import arms, serving
from .load import Loaded
from .run import Round, one_thread, recorded
from .tables import Tables

ROOM = 2 << 30  # bytes for the replies of experiments that run side by side


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # arm by arm, seed by seed
    fleet: Fleet  # of the recipe itself
    workers: int = 1

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def rounds(self) -> Iterator[tuple[str, Round]]:
        """Run everything, as many arms and seeds side by side as memory allows, round by round under their names."""
        everything = [one for experiments in self.experiments.values() for one in experiments]
        crew = Crew([member(one) for one in everything], self.workers)
        with one_thread(), closing(crew):
            for some in self._side_by_side():
                yield from convoy(some, crew.outcomes)

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[Round]]]]:
        some: dict[str, tuple[InProcess, Iterator[Round]]] = {}
        room = ROOM
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                if some and needs(experiment) > room:
                    yield some
                    some, room = {}, ROOM
                name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                some[name] = simulation(experiment), recorded(experiment, folder)
                room -= needs(experiment)
        yield some

    def result(self, test: str) -> "Result":
        """What came of it, once all has run."""
        judged = [
            Arm(arm, serving(arm, self.fleet), [list(read_rows(folder)) for folder in self.folders(arm)])
            for arm in self.experiments
        ]
        by_size = sorted(self.fleet.tiers, key=lambda tier: -parameters(tier.model.shapes()))
        tiers = [tier.name for tier in by_size]
        shares = {tier.name: share for tier, share in zip(self.fleet.tiers, self.fleet.shares, strict=True)}
        examples = len(next(iter(self.experiments.values()))[0].dataset.test)
        return Result(table(judged, tiers, shares, test), verdict(judged, tiers, shares, test, examples))


def needs(experiment: Experiment) -> int:
    """About how many bytes the replies of one question take, as they come and as they are handed on."""
    cohort = experiment.loaded.recipe.fleet.participation * experiment.fleet.size
    return int(2 * 4 * cohort * parameters(experiment.fleet.whole.shapes()))


@dataclass(frozen=True)
class Result:
    records: list[dict[str, Any]]
    verdict: list[str]


def comparison(
    loaded: Loaded, tables: Tables, seeds: int, controls: Sequence[str], home: Path, data: Path, workers: int = 1
) -> Comparison:
    """The recipe and its controls, each with so many seeds from the recipe's on; all share one copy of the data."""
    first = assemble(loaded, tables, data)
    experiments = {
        arm: [
            assemble(recipe.changed({**recipe.recipe.document(), "seed": seed}), tables, data, first.dataset)
            for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds)
        ]
        for arm, recipe in arms(loaded, first.fleet, controls).items()
    }
    return Comparison(home, experiments, first.fleet, workers)

"""A recipe beside its controls, with several seeds: paired by seed, assembled whole before anything runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..fleet import Fleet, parameters
from ..reporting import Arm, read_rows, table, verdict
from .assemble import Experiment, assemble
from .controls import arms, serving
from .load import Loaded
from .run import Round, recorded
from .tables import Tables


@dataclass(frozen=True)
class Comparison:
    home: Path
    experiments: dict[str, list[Experiment]]  # arm by arm, seed by seed
    fleet: Fleet  # of the recipe itself

    def folders(self, arm: str) -> list[Path]:
        return [self.home / arm / f"seed-{experiment.fleet.seed}" for experiment in self.experiments[arm]]

    def rounds(self) -> Iterator[tuple[str, Round]]:
        """Run everything, round by round, under the name of its arm."""
        for arm, experiments in self.experiments.items():
            for experiment, folder in zip(experiments, self.folders(arm), strict=True):
                name = arm if len(experiments) == 1 else f"{arm} seed {experiment.fleet.seed}"
                for done in recorded(experiment, folder):
                    yield name, done

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
            assemble(recipe.changed({**recipe.recipe.document(), "seed": seed}), tables, data, first.dataset, workers)
            for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds)
        ]
        for arm, recipe in arms(loaded, first.fleet, controls).items()
    }
    return Comparison(home, experiments, first.fleet)

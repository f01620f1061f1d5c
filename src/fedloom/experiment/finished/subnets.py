"""How good the sub-nets of a finished run are, and the best one within a budget.

Every sub-net is judged as the run's own models were, with normalisation statistics of its own. What was measured once
is kept in the run's folder and not measured again.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...durable import write_whole
from ...engines import ProcessPool
from ...evaluation.metrics import hits, percent
from ...evaluation.pareto import front, hyper_volume
from ...fleet import Ask, Engine, Fleet, Tier
from ...footprints import part_of
from ...models import Model, cost
from ...seeds import SUBNET_EXAMPLES, generator
from ...tensors import Tensors, filed
from ..assembly.assemble import finder, simulation
from ..recipes.problems import Problem, RecipeError
from ..running.run import asker, one_thread
from .supernet import Budget, Supernet

KEPT = "subnets.jsonl"
AT_ONCE = 4  # nets a worker, between two lines of progress
UNITS = {"macs": "MACs", "parameters": "parameters", "latency_ms": "ms on this machine"}
OPTIONS = {"macs": "--macs", "parameters": "--params", "latency_ms": "--latency-ms"}


@dataclass(frozen=True)
class Subnet:
    """What is known of a sub-net; `settings` are all that its family needs to build it."""

    settings: dict[str, Any]
    parameters: int
    macs: int
    accuracy: float
    examples: int  # of the test set, that it was judged on

    @property
    def point(self) -> tuple[float, float]:
        return self.macs, self.accuracy


@dataclass(frozen=True)
class Search:
    """Some sub-nets of a supernet, to be judged on so many test examples."""

    supernet: Supernet
    nets: tuple[Model, ...]
    examples: int
    budget: Budget | None = None

    @property
    def file(self) -> Path:
        return self.supernet.folder / KEPT

    def rows(self) -> dict[Model, Subnet]:
        """What is known by now of the search's nets."""
        known = {_key(row.settings): row for row in _read(self.file) if row.examples == self.examples}
        keyed = {net: _key(dict(net.settings)) for net in self.nets}
        return {net: known[key] for net, key in keyed.items() if key in known}

    def measure(self, workers: int = 1) -> Iterator[list[Subnet]]:
        """Judge what is not known yet; some at a time, each kept before it is handed on."""
        known = self.rows()
        tiers = [self._tier(number, net) for number, net in enumerate(self.nets) if net not in known]
        with one_thread(), closing(self._engine(tiers, workers)) as engine:
            for start in range(0, len(tiers), AT_ONCE * workers):
                rows = self._judged(tiers[start : start + AT_ONCE * workers], engine)
                with self.file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(row), default=repr) + "\n" for row in rows)
                yield rows

    def best(self) -> tuple[Model, Subnet]:
        """The most accurate of those that fit the budget; of equals the one that costs less."""
        rows = self.rows().items()
        able = [(net, row) for net, row in rows if self.budget is None or self.budget.fits(net)]
        return max(able, key=lambda one: (one[1].accuracy, -one[1].macs, -one[1].parameters))

    def front(self) -> list[Subnet]:
        """Those that none betters in multiply-adds and accuracy, from cheap to dear."""
        rows = list(self.rows().values())
        kept = set(front(row.point for row in rows))
        return sorted((row for row in rows if row.point in kept), key=lambda row: row.macs)

    def hyper_volume(self) -> float:
        """Of the front, in multiply-adds times percent; the reference is the dearest net and no accuracy."""
        points = [row.point for row in self.rows().values()]
        return hyper_volume(points, (max(macs for macs, _ in points), 0.0))

    def save(self, net: Model, path: Path) -> None:
        """A net's weights with its normalisation statistics, ready to be used."""
        weights, number = self.weights(net), self.nets.index(net)
        about = {"family": net.family, "tier": f"subnet-{number}", "settings": repr(dict(net.settings))}
        write_whole(path, filed(weights, about))

    def weights(self, net: Model) -> Tensors:
        """With the normalisation statistics that it is judged with."""
        tier = self._tier(self.nets.index(net), net)
        with one_thread(), closing(self._engine([tier], 1)) as engine:
            return self._filled([tier], self._ask(engine))[tier]

    def _tier(self, number: int, net: Model) -> Tier:
        return Tier(f"subnet-{number}", net, part_of(net, self.supernet.whole))

    @cached_property
    def _questions(self) -> Tensor:
        """Rows of the test set: always the same for one number of them, or what was kept would not compare."""
        experiment = self.supernet.experiment
        draw = generator(experiment.loaded.recipe.seed, SUBNET_EXAMPLES)
        return torch.from_numpy(draw.permutation(len(experiment.dataset.test))[: self.examples]).sort().values

    def _engine(self, tiers: list[Tier], workers: int) -> Engine:
        """The run's own, whose workers know the sub-nets as if they were tiers."""
        experiment = self.supernet.experiment
        alone, fleet = simulation(experiment), experiment.fleet
        if workers == 1:
            return alone
        known = Fleet(tuple(tiers), (), fleet.size, fleet.seed)
        return ProcessPool(replace(alone), known, finder(experiment.method, experiment.judge), workers)

    def _ask(self, engine: Engine) -> Ask:
        """As after the run's last round, so that statistics are the run's own."""
        experiment = self.supernet.experiment
        return asker(replace(experiment, engine=engine), experiment.loaded.recipe.rounds)

    def _filled(self, tiers: list[Tier], ask: Ask) -> dict[Tier, Tensors]:
        """Weights with statistics."""
        experiment = self.supernet.experiment
        weights = {tier: tier.footprint.read(self.supernet.weights) for tier in tiers}
        fill, rounds = experiment.judge.statistics.fill, experiment.loaded.recipe.rounds
        return dict(fill(weights, experiment.fleet, ask, rounds))

    def _judged(self, tiers: list[Tier], engine: Engine) -> list[Subnet]:
        """By the run's own judge: a net that is a tier of the run gets the accuracy the run reported."""
        experiment, ask = self.supernet.experiment, self._ask(engine)
        labels = experiment.dataset.test.y[self._questions]
        answers = experiment.judge.logits(self._filled(tiers, ask), experiment.fleet, ask, self._questions)
        return [_row(tier.model, float(hits(answers[tier], labels).sum()), self.examples) for tier in tiers]


def search(supernet: Supernet, count: int, seed: int, budget: Budget | None = None, cap: int | None = None) -> Search:
    """What to judge: so many sub-nets, drawn by the seed, and enough of them within the budget."""
    nets = supernet.sample_within(budget, count, seed) if budget else supernet.sample(count, seed)
    if budget and not any(map(budget.fits, nets)):
        form, least = ".3g" if budget.kind == "latency_ms" else ",.0f", min(map(budget.spends, nets))
        said = f"no sub-net fits in {budget.most:{form}} {UNITS[budget.kind]}; the smallest takes {least:{form}}"
        raise RecipeError([Problem((), "BUDGET_SMALL", said)], OPTIONS[budget.kind])
    whole_test = len(supernet.experiment.dataset.test)
    return Search(supernet, tuple(nets), min(cap or whole_test, whole_test), budget)


def _row(net: Model, right: float, examples: int) -> Subnet:
    spent = cost(net)
    return Subnet(dict(net.settings), spent.parameters, spent.macs, percent(right, examples), examples)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=repr)


def _read(file: Path) -> Iterator[Subnet]:
    """Kept rows; a line that was cut off when the machine went down is measured again."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            yield Subnet(**json.loads(line))
        except (ValueError, TypeError):
            continue

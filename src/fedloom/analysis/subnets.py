"""How good the sub-nets of a finished run are, and the best one within a budget.

Every sub-net is judged as the run's own models were, with normalization statistics of its own. What was measured once
is kept in the run's folder and not measured again.

A finished run's global model, opened again, and the sub-nets that can be cut out of it.

FedSup promises a net for whatever device without training again (Kim & Yun, 2022, section 3). What is drawn depends on
the seed alone.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..engines import ProcessPool
from ..evaluation.metrics import is_correct, percent
from ..evaluation.pareto import hypervolume, pareto_front
from ..files import read_json_lines, write_atomic
from ..fleet import Ask, Engine, Fleet, Tier
from ..footprints import subnet_footprint
from ..methods._supernet import SpaceChoice, build_space
from ..models import SPACES, Model, SearchSpace, cost
from ..recipe.errors import RecipeError, RecipeIssue, recipe_error, suggest
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..runs.build import Experiment, assemble, finder, simulation
from ..runs.folder import read_manifest
from ..runs.loop import asker, one_thread
from ..seeds import SUBNET_EXAMPLES, SUBNET_SEARCH, SUBNET_SEARCH_IN_BUDGET, generator
from ..tensors import Tensors, to_safetensors
from .profiling import latency_ms

ENOUGH = 0.1  # such a share of the nets asked for must fit a budget, or more are drawn
PATIENCE = 4  # draws for each net that is still wanted


BudgetKind = Literal["macs", "parameters", "latency_ms"]


@dataclass(frozen=True)
class Budget:
    kind: BudgetKind
    most: float

    def spends(self, net: Model) -> float:
        return latency_ms(net) if self.kind == "latency_ms" else float(getattr(cost(net), self.kind))

    def fits(self, net: Model) -> bool:
        return self.spends(net) <= self.most


@dataclass(frozen=True)
class Supernet:
    """A finished run's global model and the sizes it may be cut to."""

    folder: Path
    experiment: Experiment
    weights: Tensors
    whole: Model
    tiers: tuple[Model, ...]
    space: SearchSpace

    def part(self, net: Model) -> Model:
        """The same net, if it lies in the global model."""
        try:
            subnet_footprint(net, self.whole)
        except Exception as error:  # whatever a family says of sizes it cannot be built in
            said = f"a sub-net of this space cannot be cut out of the largest tier's model: {error}"
            raise recipe_error(self.folder, "SPACE_SHAPE", said, "say another --space") from error
        return net

    def sample(self, count: int, seed: int) -> list[Model]:
        """The smallest, the largest, the tiers' own and random others, none twice. More begin with the same."""
        space, whole, draw = self.space, self.whole, generator(seed, SUBNET_SEARCH)
        found = dict.fromkeys([space.smallest(whole), space.largest(whole), *self.tiers])
        if space.count() <= count:
            found |= dict.fromkeys(self._of(picks) for picks in product(*self._places))
        while len(found) < count < space.count():
            found[space.sample(whole, draw)] = None
        return [self.part(net) for net in found]

    def sample_within(self, budget: Budget, count: int, seed: int) -> list[Model]:
        """A sample in which enough nets fit a budget, as far as there are so many."""
        nets = dict.fromkeys(self.sample(count, seed))
        lacking = round(ENOUGH * count) - sum(map(budget.fits, nets))
        if self.space.count() <= count or not budget.fits(self.space.smallest(self.whole)):
            return list(nets)
        draw, most = generator(seed, SUBNET_SEARCH_IN_BUDGET), len(nets) + max(0, lacking)
        for _ in range(PATIENCE * lacking):
            if len(nets) < most:
                nets[self._drawn_within(budget, draw)] = None
        return list(nets)

    def _drawn_within(self, budget: Budget, draw: np.random.Generator) -> Model:
        """A random net of which, in random order, as few choices are made small as it takes to fit.

        Drawing until one fits, as a device does, takes thousands of draws where a budget is small.
        """
        places = self._places
        picks = [values[int(draw.integers(len(values)))] for values in places]
        order = [int(place) for place in draw.permutation(len(places))]

        def shrunk(number: int) -> Model:
            small = set(order[:number])
            pairs = enumerate(zip(places, picks, strict=True))
            return self.part(self._of([values[0] if at in small else pick for at, (values, pick) in pairs]))

        return shrunk(bisect_left(range(len(places)), True, key=lambda number: budget.fits(shrunk(number))))

    @cached_property
    def _places(self) -> list[tuple[Any, ...]]:
        """All choices one after the other, those of a list place by place."""
        return [values for _, choices in self.space.choices for values in (choices if _listed(choices) else (choices,))]

    def _of(self, picks: Sequence[Any]) -> Model:
        """The net of one pick for each place."""
        left = iter(picks)
        sizes = {
            name: tuple(islice(left, len(choices))) if _listed(choices) else next(left)
            for name, choices in self.space.choices
        }
        return self.whole.with_settings(**sizes)


def _listed(choices: tuple[Any, ...]) -> bool:
    return isinstance(choices[0], tuple)


def open_supernet(folder: Path, registry: Registry, data: Path, space: str | None = None) -> Supernet:
    """Of a run's folder. The space is the one said, else the method's own, else what the tiers differ in."""
    experiment = assemble(finished_recipe(folder, registry), registry, data)
    if experiment.dataset.fingerprint() != read_manifest(folder).get("data"):
        said = "the data is not what the run was made with, so what was measured would mean nothing"
        raise recipe_error(folder, "RUN_DATA", said, "say its --data-dir")
    assert experiment.warm is not None  # the recipe starts from the run's own model
    choice: SpaceChoice = getattr(experiment.method, "space", "tiers") if space is None else space
    if isinstance(choice, str) and choice not in (known := ("tiers", *SPACES)):
        problem = RecipeIssue((), "SPACE_NAME", f"there is no space {choice!r}", suggest(choice, known))
        raise RecipeError([problem], "--space")
    # every setting said, so that equal nets are equal however they were come by
    sizes = tuple(tier.model.with_settings(**tier.model.full_settings()) for tier in experiment.fleet.active_tiers)
    whole = sizes[experiment.fleet.active_tiers.index(experiment.fleet.largest)]
    return Supernet(folder, experiment, experiment.warm, whole, sizes, build_space(choice, sizes))


def finished_recipe(folder: Path, registry: Registry) -> LoadedRecipe:
    """The recipe of a finished run, with the run's own global model to start from."""

    def wrong(said: str, hint: str = "") -> RecipeError:
        return recipe_error(folder, "RUN_FOLDER", said, hint)

    if not (folder / "manifest.json").is_file():
        raise wrong("this is not the folder of a run", "fedloom run my.toml --out my-run makes one")
    status = read_manifest(folder).get("status")
    if status != "finished":
        raise wrong(f"a sub-net is cut out of a finished run; this one is {status}")
    if not (folder / "models").is_dir():
        raise wrong("the run's method keeps no model on the server, so there is nothing to cut a sub-net out of")
    loaded = load(folder / "recipe.toml", registry)
    return loaded.with_document({**loaded.recipe.document(), "start": {"from": str(folder)}})


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
class SubnetSearch:
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
        kept = set(pareto_front(row.point for row in rows))
        return sorted((row for row in rows if row.point in kept), key=lambda row: row.macs)

    def hypervolume(self) -> float:
        """Of the front, in multiply-adds times percent; the reference is the dearest net and no accuracy."""
        points = [row.point for row in self.rows().values()]
        return hypervolume(points, (max(macs for macs, _ in points), 0.0))

    def save(self, net: Model, path: Path) -> None:
        """A net's weights with its normalization statistics, ready to be used."""
        weights, number = self.weights(net), self.nets.index(net)
        about = {"family": net.family, "tier": f"subnet-{number}", "settings": repr(dict(net.settings))}
        write_atomic(path, to_safetensors(weights, about))

    def weights(self, net: Model) -> Tensors:
        """With the normalization statistics that it is judged with."""
        tier = self._tier(self.nets.index(net), net)
        with one_thread(), closing(self._engine([tier], 1)) as engine:
            return self._filled([tier], self._ask(engine))[tier]

    def _tier(self, number: int, net: Model) -> Tier:
        return Tier(f"subnet-{number}", net, subnet_footprint(net, self.supernet.whole))

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
        return ProcessPool(replace(alone), known, finder(experiment.method, experiment.evaluator), workers)

    def _ask(self, engine: Engine) -> Ask:
        """As after the run's last round, so that statistics are the run's own."""
        experiment = self.supernet.experiment
        return asker(replace(experiment, engine=engine), experiment.loaded.recipe.rounds)

    def _filled(self, tiers: list[Tier], ask: Ask) -> dict[Tier, Tensors]:
        """Weights with statistics."""
        experiment = self.supernet.experiment
        weights = {tier: tier.footprint.read(self.supernet.weights) for tier in tiers}
        fill, rounds = experiment.evaluator.statistics.fill, experiment.loaded.recipe.rounds
        return dict(fill(weights, experiment.fleet, ask, rounds))

    def _judged(self, tiers: list[Tier], engine: Engine) -> list[Subnet]:
        """By the run's own judge: a net that is a tier of the run gets the accuracy the run reported."""
        experiment, ask = self.supernet.experiment, self._ask(engine)
        labels = experiment.dataset.test.y[self._questions]
        answers = experiment.evaluator.logits(self._filled(tiers, ask), experiment.fleet, ask, self._questions)
        return [_row(tier.model, float(is_correct(answers[tier], labels).sum()), self.examples) for tier in tiers]


def start_search(supernet: Supernet, count: int, seed: int, budget: Budget | None = None, cap: int | None = None) -> SubnetSearch:
    """What to judge: so many sub-nets, drawn by the seed, and enough of them within the budget."""
    nets = supernet.sample_within(budget, count, seed) if budget else supernet.sample(count, seed)
    if budget and not any(map(budget.fits, nets)):
        form, least = ".3g" if budget.kind == "latency_ms" else ",.0f", min(map(budget.spends, nets))
        said = f"no sub-net fits in {budget.most:{form}} {UNITS[budget.kind]}; the smallest takes {least:{form}}"
        raise recipe_error(OPTIONS[budget.kind], "BUDGET_SMALL", said)
    whole_test = len(supernet.experiment.dataset.test)
    return SubnetSearch(supernet, tuple(nets), min(cap or whole_test, whole_test), budget)


def _row(net: Model, right: float, examples: int) -> Subnet:
    spent = cost(net)
    return Subnet(dict(net.settings), spent.parameters, spent.macs, percent(right, examples), examples)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=repr)


def _read(file: Path) -> Iterator[Subnet]:
    """Kept rows; a line that was cut off when the machine went down is measured again."""
    for record in read_json_lines(file):
        with suppress(TypeError):
            yield Subnet(**record)

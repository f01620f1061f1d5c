"""The subnets of a finished run: their accuracy, and the best one within a budget.

FedSup trains a single supernet that serves all budgets (Kim & Yun, 2022, section 3); the model of any width-sliced run
has slices of every size between its tiers, which were not trained as such. Subnets are evaluated like the run's models,
with their own batch-norm statistics; results are stored in the run's folder and not measured again.
"""

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..engines import WorkerPool
from ..evaluation.metrics import hypervolume, is_correct, pareto_front, percent
from ..exporting import describe_model
from ..files import read_json_lines, write_atomic
from ..fleet import Ask, Engine, Fleet, Tier, make_ask
from ..footprints import subnet_footprint
from ..methods._supernet import SpaceChoice, build_space
from ..models import SPACES, Model, SearchSpace, compute_cost
from ..models.cost import log_uncounted
from ..models.search_space import is_per_layer
from ..recipe.errors import recipe_error
from ..recipe.registries import Registries
from ..registry import suggest
from ..runs.build import build_worker_context
from ..runs.experiment import Experiment
from ..runs.folder import read_manifest
from ..runs.loop import single_thread
from ..runs.resume import open_finished_run
from ..seeds import SUBNET_EXAMPLES, SUBNET_SEARCH, SUBNET_SEARCH_IN_BUDGET, generator
from ..tensors import Tensors, to_safetensors
from .profiling import latency_ms
from .sizes_between import is_slice, space_between

RESULTS_FILE = "subnets.jsonl"
SPACE_NAMES = ("between", "tiers", *SPACES)
UNTRAINED = "not trained, a slice"
NETS_PER_WORKER = 4  # results are stored and reported after this many nets per worker
UNITS = {"macs": "MACs", "parameters": "parameters", "latency_ms": "ms on this machine"}
OPTIONS = {"macs": "--macs", "parameters": "--params", "latency_ms": "--latency-ms"}
MIN_FITTING_SHARE = 0.1  # if fewer of the sampled nets fit the budget, more are sampled
MAX_TRIES_PER_MISSING_NET = 4  # a draw may repeat a net already in the sample
MAX_TRIES = 20  # draws for every net of a sample: in a space between tiers, some may be no slices

BudgetKind = Literal["macs", "parameters", "latency_ms"]


@dataclass(frozen=True)
class Budget:
    kind: BudgetKind
    limit: float

    def cost_of(self, net: Model) -> float:
        return latency_ms(net) if self.kind == "latency_ms" else float(getattr(compute_cost(net), self.kind))

    def fits(self, net: Model) -> bool:
        return self.cost_of(net) <= self.limit


@dataclass(frozen=True)
class Supernet:
    """A finished run's global model and the search space of its subnets.

    `trained` is the space that the method trains, if it trains more than the tiers' models; `skips` tells whether nets
    of the search space that are no slices of the global model are left out. Otherwise they are an error.
    """

    folder: Path
    experiment: Experiment
    weights: Tensors
    global_model: Model
    tiers: tuple[Model, ...]
    space: SearchSpace
    trained: SearchSpace | None = None
    skips: bool = False

    def training_of(self, net: Model) -> str:
        """How a net was trained: as a tier, as a subnet that the method samples, or not at all."""
        names = [tier.name for tier in self.experiment.fleet.active_tiers]
        equal = next((name for name, size in zip(names, self.tiers, strict=True) if size.is_equivalent(net)), None)
        if equal is not None:
            return f"as tier {equal}"
        is_sampled = self.trained is not None and self.trained.contains(net, self.global_model)
        return "as a subnet" if is_sampled else UNTRAINED

    def check(self, net: Model) -> Model:
        """The same net; an error if it is not a subnet of the global model."""
        try:
            subnet_footprint(net, self.global_model)
        except Exception as error:  # a model family may raise any exception for a size it cannot build
            message = f"a subnet of this space cannot be cut out of the largest tier's model: {error}"
            raise recipe_error(self.folder, "SPACE_SHAPE", message, "choose another --space") from error
        return net

    def sample(self, count: int, seed: int) -> list[Model]:
        """The smallest, the largest, the tiers' and random nets: at least `count` nets if the space has that many.

        All are distinct. A larger sample extends a smaller one.
        """
        space, global_model, rng = self.space, self.global_model, generator(seed, SUBNET_SEARCH)
        nets = dict.fromkeys([space.smallest(global_model), space.largest(global_model), *self.tiers])
        if space.count() <= count:
            nets |= dict.fromkeys(self._build_net(picks) for picks in product(*self._choices))
            return self._select(nets)
        for _ in range(MAX_TRIES * count):
            if len(nets) >= count:
                break
            nets |= dict.fromkeys(self._select([space.sample(global_model, rng)]))
        return self._select(nets)

    def _select(self, nets: Iterable[Model]) -> list[Model]:
        """Those that can be cut out of the global model."""
        if self.skips:
            return [net for net in nets if is_slice(net, self.global_model)]
        return [self.check(net) for net in nets]

    def sample_within(self, budget: Budget, count: int, seed: int) -> list[Model]:
        """A sample in which at least MIN_FITTING_SHARE of the nets fit the budget, as far as possible."""
        nets = dict.fromkeys(self.sample(count, seed))
        missing = round(MIN_FITTING_SHARE * count) - sum(map(budget.fits, nets))
        if self.space.count() <= count or not budget.fits(self.space.smallest(self.global_model)):
            return list(nets)
        rng, limit = generator(seed, SUBNET_SEARCH_IN_BUDGET), len(nets) + max(0, missing)
        for _ in range(MAX_TRIES_PER_MISSING_NET * missing):
            if len(nets) < limit:
                nets |= dict.fromkeys(self._select([self._sample_within(budget, rng)]))
        return list(nets)

    def _sample_within(self, budget: Budget, rng: np.random.Generator) -> Model:
        """Draw a random net, then set choices to their minimum, one by one in random order, until it fits the budget.

        Rejection sampling would take thousands of draws for a small budget.
        """
        choices = self._choices
        picks = [values[int(rng.integers(len(values)))] for values in choices]
        order = [int(index) for index in rng.permutation(len(choices))]

        def shrunk(number: int) -> Model:
            small = set(order[:number])
            pairs = enumerate(zip(choices, picks, strict=True))
            return self._build_net([values[0] if i in small else pick for i, (values, pick) in pairs])

        return shrunk(bisect_left(range(len(choices)), True, key=lambda number: budget.fits(shrunk(number))))

    @cached_property
    def _choices(self) -> list[tuple[Any, ...]]:
        """One tuple of candidate values per searchable dimension; a per-layer setting contributes one per layer."""
        groups = [choices if is_per_layer(choices) else (choices,) for _, choices in self.space.choices]
        return [values for choices in groups for values in choices]

    def _build_net(self, picks: Sequence[Any]) -> Model:
        """The net with one value per choice."""
        values = iter(picks)
        sizes = {
            name: tuple(islice(values, len(choices))) if is_per_layer(choices) else next(values)
            for name, choices in self.space.choices
        }
        return self.global_model.with_settings(**sizes)


def open_supernet(folder: Path, registries: Registries, data: Path, space: str | None = None) -> Supernet:
    """Open a run as a supernet. Default space: what the method trains, otherwise all sizes between the tiers."""
    experiment = open_finished_run(folder, registries, data, from_result=True)  # final weights in `warm`
    assert experiment.warm is not None
    if experiment.evaluator.is_sequence_task:
        message = "subnets are compared by their accuracy on examples with one label; here every position has one"
        raise recipe_error(folder, "SUBNET_TASK", message)
    if space is not None and space not in SPACE_NAMES:
        raise recipe_error("--space", "SPACE_NAME", f"there is no space {space!r}", suggest(space, SPACE_NAMES))
    # with all settings explicit, equal nets compare equal
    sizes = tuple(tier.model.with_settings(**tier.model.full_settings()) for tier in experiment.fleet.active_tiers)
    global_model = sizes[experiment.fleet.active_tiers.index(experiment.fleet.largest)]
    trained = _trained_space(experiment, sizes)
    skips = space == "between" or (space is None and trained is None)
    if skips:
        searched = space_between(sizes, global_model)
    else:
        searched = trained if trained is not None and space is None else build_space(space or "tiers", sizes)
    return Supernet(folder, experiment, experiment.warm, global_model, sizes, searched, trained, skips)


def _trained_space(experiment: Experiment, sizes: Sequence[Model]) -> SearchSpace | None:
    """The subnets that the method trains besides the tiers' models: FedSup has a space, FjORD has widths."""
    choice: SpaceChoice | None = getattr(experiment.method, "space", None)
    widths: tuple[float, ...] = getattr(experiment.method, "widths", ())
    if choice is None and widths:
        choice = {"width": tuple(dict.fromkeys((*widths, *(size.full_settings()["width"] for size in sizes))))}
    return None if choice is None else build_space(choice, sizes)


@dataclass(frozen=True)
class Subnet:
    """A measured subnet; `settings` are all that its family needs to build it."""

    settings: dict[str, Any]
    parameters: int
    macs: int
    accuracy: float
    examples: int  # of the test or validation set

    @property
    def point(self) -> tuple[float, float]:
        return self.macs, self.accuracy


@dataclass(frozen=True)
class SubnetSearch:
    """Subnets of a supernet, to be evaluated on a number of test or validation examples."""

    supernet: Supernet
    nets: tuple[Model, ...]
    examples: int
    budget: Budget | None = None

    @property
    def file(self) -> Path:
        return self.supernet.folder / RESULTS_FILE

    def rows(self) -> dict[Model, Subnet]:
        """The nets that have been measured so far."""
        known = {_key(row.settings): row for row in _read(self.file) if row.examples == self.examples}
        keyed = {net: _key(dict(net.settings)) for net in self.nets}
        return {net: known[key] for net, key in keyed.items() if key in known}

    def measure(self, workers: int = 1) -> Iterator[list[Subnet]]:
        """Evaluate the nets that have not been measured; yields a few at a time, after storing them."""
        known = self.rows()
        tiers = [self._tier(number, net) for number, net in enumerate(self.nets) if net not in known]
        with single_thread(), closing(self._engine(tiers, workers)) as engine:
            for start in range(0, len(tiers), NETS_PER_WORKER * workers):
                rows = self._evaluate(tiers[start : start + NETS_PER_WORKER * workers], engine)
                with self.file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(row), default=repr) + "\n" for row in rows)
                yield rows

    def best(self) -> tuple[Model, Subnet]:
        """The most accurate net that fits the budget; among equals the cheapest."""
        rows = self.rows().items()
        fitting = [(net, row) for net, row in rows if self.budget is None or self.budget.fits(net)]
        return max(fitting, key=lambda item: (item[1].accuracy, -item[1].macs, -item[1].parameters))

    def front(self) -> list[Subnet]:
        """The Pareto front of MACs and accuracy, sorted by MACs."""
        rows = list(self.rows().values())
        points = set(pareto_front(row.point for row in rows))
        return sorted((row for row in rows if row.point in points), key=lambda row: row.macs)

    def hypervolume(self) -> float:
        """Hypervolume of the Pareto front (MACs x percent), reference point (largest MACs, 0)."""
        points = [row.point for row in self.rows().values()]
        return hypervolume(points, (max(macs for macs, _ in points), 0.0))

    def save(self, net: Model, path: Path) -> None:
        """Write a net's weights with frozen ones and its batch-norm statistics, and all that is needed to load it."""
        write_atomic(path, to_safetensors({**self.weights(net), **net.frozen_weights()}, self.describe(net)))

    def describe(self, net: Model) -> dict[str, Any]:
        """The metadata of a saved net: how to build it, what its accuracy is, and which run it is from."""
        experiment, manifest, cost = self.supernet.experiment, read_manifest(self.supernet.folder), compute_cost(net)
        recipe, row = experiment.loaded.recipe, self.rows().get(net)
        return describe_model(
            net, experiment.dataset,
            trained=self.supernet.training_of(net), parameters=cost.parameters, macs=cost.macs,
            accuracy=row and {"percent": row.accuracy, "examples": row.examples, "of": self.examples_kind},
            run={
                "name": self.supernet.folder.resolve().name, "sha256": manifest.get("sha256"),
                "method": recipe.method.name, "rounds": recipe.rounds, "seed": recipe.seed,
                "dataset": recipe.data.dataset, "data_sha256": manifest["data"], "fedloom": manifest.get("fedloom"),
            },
            with_files=[{key: file[key] for key in ("name", "sha256")} for file in manifest.get("with_files", ())],
        )  # fmt: skip

    @property
    def examples_kind(self) -> str:
        """What the nets are evaluated on: with `data.validation`, examples that were set aside before training."""
        return "validation" if self.supernet.experiment.loaded.recipe.data.validation else "test"

    def weights(self, net: Model) -> Tensors:
        """The net's weights with the batch-norm statistics it is evaluated with."""
        tier = self._tier(self.nets.index(net), net)
        with single_thread(), closing(self._engine([tier], 1)) as engine:
            return self._with_statistics([tier], self._ask(engine))[tier]

    def _tier(self, number: int, net: Model) -> Tier:
        return Tier(f"subnet-{number}", net, subnet_footprint(net, self.supernet.global_model))

    @cached_property
    def _test_rows(self) -> Tensor:
        """A fixed random subset of the test set: equal `examples` give equal rows, so stored results are comparable."""
        experiment = self.supernet.experiment
        rng = generator(experiment.loaded.recipe.seed, SUBNET_EXAMPLES)
        return torch.from_numpy(rng.permutation(len(experiment.dataset.test))[: self.examples]).sort().values

    def _engine(self, tiers: list[Tier], workers: int) -> Engine:
        """The run's engine; its workers know the subnets as tiers."""
        experiment = self.supernet.experiment
        engine, fleet = experiment.simulator, experiment.fleet
        if workers == 1:
            return engine
        subnet_fleet = Fleet(tuple(tiers), (), fleet.size, fleet.seed)
        pool = WorkerPool(workers)
        engine = replace(engine, executor=pool)
        pool.register(replace(build_worker_context(experiment), engine=engine, fleet=subnet_fleet))
        return engine

    def _ask(self, engine: Engine) -> Ask:
        """Requests carry the last round's number, so batch-norm statistics use the same random batches as the run."""
        return make_ask(engine, self.supernet.experiment.loaded.recipe.rounds)

    def _with_statistics(self, tiers: list[Tier], ask: Ask) -> dict[Tier, Tensors]:
        experiment = self.supernet.experiment
        weights = {tier: tier.footprint.read(self.supernet.weights) for tier in tiers}
        fill, rounds = experiment.evaluator.statistics.fill, experiment.loaded.recipe.rounds
        return dict(fill(weights, experiment.fleet, ask, rounds))

    def _evaluate(self, tiers: list[Tier], engine: Engine) -> list[Subnet]:
        """Use the run's evaluator: a tier of the run gets its accuracy in the run if all test examples are used."""
        experiment, ask = self.supernet.experiment, self._ask(engine)
        labels = experiment.dataset.test.y[self._test_rows]
        logits = experiment.evaluator.logits(self._with_statistics(tiers, ask), experiment.fleet, ask, self._test_rows)
        return [_row(tier.model, float(is_correct(logits[tier], labels).sum()), self.examples) for tier in tiers]


def start_search(
    supernet: Supernet, count: int, seed: int, budget: Budget | None = None, max_examples: int | None = None
) -> SubnetSearch:
    """Sample `count` subnets to evaluate, with enough of them within the budget."""
    task = supernet.experiment.dataset.task
    if not task.has_class_labels:
        message = f"subnets are compared by accuracy on class labels, and {task.kind} has none"
        raise recipe_error(supernet.folder, "SUBNET_TASK", message, "export the model of a tier instead")
    log_uncounted([supernet.global_model], "the MACs of subnets")
    nets = supernet.sample_within(budget, count, seed) if budget else supernet.sample(count, seed)
    if budget and not any(map(budget.fits, nets)):
        form, least = ".3g" if budget.kind == "latency_ms" else ",.0f", min(map(budget.cost_of, nets))
        message = f"no subnet fits in {budget.limit:{form}} {UNITS[budget.kind]}; the smallest takes {least:{form}}"
        raise recipe_error(OPTIONS[budget.kind], "BUDGET_SMALL", message)
    test_size = len(supernet.experiment.dataset.test)
    return SubnetSearch(supernet, tuple(nets), min(max_examples or test_size, test_size), budget)


def _row(net: Model, correct: float, examples: int) -> Subnet:
    cost = compute_cost(net)
    return Subnet(dict(net.settings), cost.parameters, cost.macs, percent(correct, examples), examples)


def _key(settings: dict[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=repr)


def _read(file: Path) -> Iterator[Subnet]:
    """Stored results, without lines that were cut off by a crash."""
    for line in read_json_lines(file):
        with suppress(TypeError):
            yield Subnet(**line)

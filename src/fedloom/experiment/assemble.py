"""From a recipe to the things it names. What cannot work is refused here, before anything is written."""

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..data import DATASETS, FACTS, PARTITIONS, PREPARATIONS, Dataset, Labels, Partition, at_most, tie_to_labels
from ..engines import InProcess, Member, Memory, ProcessPool, Refusal, shelf
from ..evaluation import FineTune, Judge, StaticBatchNorm
from ..fleet import BadTier, DeviceModel, Engine, Fleet, draw_cohort, nested
from ..methods import Method
from ..models import Model, model
from ..seeds import generator
from ..tensors import Tensors
from ..training import OPTIMISERS, RATES, Schedule, Task
from .load import Loaded
from .problems import Problem, RecipeError
from .tables import Tables


@dataclass(frozen=True)
class Experiment:
    """All that a run needs."""

    loaded: Loaded
    dataset: Dataset
    partition: Partition
    fleet: Fleet
    method: Method
    engine: Engine
    judge: Judge
    refusals: list[tuple[int, Refusal]]
    warm: Tensors | None


def read_data(loaded: Loaded, tables: Tables, folder: Path) -> Dataset:
    data = loaded.recipe.data
    reader = tables.datasets[data.dataset]
    place = {"folder": folder} if "folder" in inspect.signature(reader).parameters else {}
    dataset = reader(**place, **data.settings)
    if data.test_examples is not None:
        test = dataset.test
        dataset = replace(dataset, test=replace(test, x=test.x[: data.test_examples], y=test.y[: data.test_examples]))
    return replace(dataset, preparation=PREPARATIONS[data.preparation]) if data.preparation else dataset


@dataclass(frozen=True)
class Outline:
    """A recipe's data as far as models and partitions can tell."""

    input_shape: tuple[int, ...]
    labels: Labels


def outline(loaded: Loaded, tables: Tables, folder: Path) -> Outline:
    """From what is known of the data set, with made-up balanced labels; of an unknown set from its files."""
    data = loaded.recipe.data
    if data.dataset not in FACTS or tables.datasets[data.dataset] is not DATASETS[data.dataset]:
        return outline_of(read_data(loaded, tables, folder))
    facts = FACTS[data.dataset]
    prepare = PREPARATIONS[data.preparation or facts.preparation]
    made_up = prepare(torch.zeros(1, *facts.shape, dtype=torch.uint8))
    classes = 20 if data.settings.get("labels") == "coarse" else facts.classes
    tests = min(facts.test, data.test_examples or facts.test)
    labels = Labels(np.arange(facts.train) % classes, np.arange(tests) % classes, classes)
    return Outline(tuple(made_up.shape[1:]), labels)


def outline_of(dataset: Dataset) -> Outline:
    labels = Labels(dataset.train.y.numpy(), dataset.test.y.numpy(), dataset.classes)
    return Outline(dataset.input_shape, labels)


def build_fleet(loaded: Loaded, tables: Tables, seen: Outline) -> Fleet:
    recipe = loaded.recipe
    family, build = recipe.model.family, tables.models[recipe.model.family]
    sizes = [{**recipe.model.settings, **tier.settings} for tier in recipe.tiers]
    named = inspect.signature(build).parameters
    if "widest" in named and "width" in named:
        widest = max(size.get("width", named["width"].default) for size in sizes)
        sizes = [{**size, "widest": widest} for size in sizes]
    models: list[tuple[str, Model]] = []
    for number, (tier, size) in enumerate(zip(recipe.tiers, sizes, strict=True)):
        try:
            made = model(family, build, size, seen.input_shape, seen.labels.classes)
            made.fits_the_data()
        except Exception as error:
            said = f"{family} cannot be built for tier {tier.name!r}: {type(error).__name__}: {error}"
            raise loaded.error(Problem(("tiers", number), "MODEL_BUILD", said)) from error
        models.append((tier.name, made))
    try:
        tiers = nested(models)
    except BadTier as error:
        raise loaded.error(Problem(("tiers",), "TIER_SHAPE", str(error))) from error
    total, part = math.fsum(tier.share for tier in recipe.tiers), recipe.fleet
    shares = tuple(tier.share / total for tier in recipe.tiers)  # they sum to 1 but for rounding
    fleet = Fleet(tiers, shares, recipe.data.devices, recipe.seed, part.assignment, part.eligible)
    if part.assignment == "fixed" and part.eligible and not draw_cohort(fleet, 1.0, 1):
        said = "no device belongs to these tiers, so nobody would train"
        raise loaded.error(Problem(("fleet", "eligible"), "RECIPE_VALUE", said))
    return fleet


def build_method(loaded: Loaded, tables: Tables, fleet: Fleet) -> Method:
    part = loaded.recipe.method
    missing = getattr(tables.methods[part.name], "__abstractmethods__", ())
    if missing:
        said = f"{part.name} lacks {', '.join(sorted(missing))}, which every method has"
        raise loaded.error(Problem(("method", "name"), "METHOD_INCOMPLETE", said, value=part.name))
    made: Method = picked(tables.methods, {"name": part.name, **part.settings}, key="name")()
    refusal = made.refuses(fleet)
    if refusal:
        raise loaded.error(Problem(("method", "name"), "METHOD_REFUSES", refusal, value=part.name))
    return made


def build(loaded: Loaded, tables: Tables, seen: Outline) -> tuple[Fleet, Method]:
    """Who learns and how: all of a recipe that can be refused without its data."""
    fleet = build_fleet(loaded, tables, seen)
    return fleet, build_method(loaded, tables, fleet)


def build_partition(loaded: Loaded, labels: Labels) -> Partition:
    data, seed = loaded.recipe.data, loaded.recipe.seed
    if data.devices > len(labels.train):
        said = f"there are only {len(labels.train)} training examples for {data.devices} devices"
        raise loaded.error(Problem(("data", "devices"), "RECIPE_VALUE", said, value=data.devices))
    cut = picked(PARTITIONS, data.partition)
    try:
        made: Partition = cut(labels, data.devices, generator(seed, "partition"))
    except ValueError as error:
        raise loaded.error(Problem(("data", "partition"), "RECIPE_VALUE", str(error))) from error
    if len(made.train) != data.devices:
        said = f"the partition is for {len(made.train)} devices, the recipe has {data.devices}"
        raise loaded.error(Problem(("data", "devices"), "RECIPE_VALUE", said, value=data.devices))
    made = at_most(made, data.most_examples, generator(seed, "most examples"))
    return tie_to_labels(made, labels, data.tier_label_tie, generator(seed, "tier label tie"))


def warm_start(loaded: Loaded, fleet: Fleet) -> Tensors | None:
    """The weights of an earlier model, where the recipe names one."""
    source = loaded.recipe.start.source
    if source is None:
        return None
    path = Path(source) / "models" / f"{fleet.largest.name}.safetensors" if Path(source).is_dir() else Path(source)

    def wrong(code: str, said: str) -> RecipeError:
        return loaded.error(Problem(("start", "from"), code, said))

    if not path.is_file():
        raise wrong("FILE_MISSING", f"there is no file {path}")
    try:
        held = load_file(path)
    except SafetensorError as error:
        raise wrong("START_FORMAT", f"{path} is not a safetensors file: {error}") from error
    for name, shape in fleet.whole.shapes().items():
        if name not in held or held[name].shape != shape:
            raise wrong(
                "START_SHAPE", f"{path} does not hold this recipe's global model: {name} is missing or different"
            )
    return {name: held[name].to(torch.get_default_dtype()) for name in fleet.whole.shapes()}


def finder(method: Method, judge: Judge) -> Callable[[tuple[str, ...]], Task]:
    """How a worker finds the task it is asked for: by name, so that no code has to travel."""

    def find(address: tuple[str, ...]) -> Task:
        match address:
            case ("statistics", name):
                task: Task = getattr(judge.statistics, name)
            case ("exam", name):
                task = getattr(judge.exam, name)
            case ("fine_tune", name):
                task = getattr(judge.fine_tune, name)
            case ("personal", function, fill):
                own = DeviceModel(getattr(method, function), unseen_logit=json.loads(fill))
                task = judge.personal(own).measure
            case _:
                task = getattr(method, address[0])
        return task

    return find


def assemble(
    loaded: Loaded, tables: Tables, folder: Path, dataset: Dataset | None = None, workers: int = 1
) -> Experiment:
    """`dataset` is the recipe's data where it has been read before: arms of a comparison share it. The number of
    workers changes nothing but the time."""
    recipe = loaded.recipe
    dataset = dataset or read_data(loaded, tables, folder)
    seen = outline_of(dataset)
    partition = build_partition(loaded, seen.labels)
    fleet, method = build(loaded, tables, seen)
    held = shelf(dataset, partition, fleet)
    refusals: list[tuple[int, Refusal]] = []
    alone = InProcess(
        shelf=held,
        memory=Memory(lambda device: method.prepare(device, recipe.seed)),
        schedule=Schedule(recipe.training.batch_size, recipe.training.epochs, recipe.training.last_batch),
        optimiser=picked(OPTIMISERS, recipe.training.optimiser)(),
        rates=picked(RATES, recipe.training.rates)(),
        seed=recipe.seed,
        label_smoothing=recipe.training.label_smoothing,
        block=recipe.engine.block,
        blocks=recipe.engine.blocks,
        on_refusal=lambda round_number, refusal: refusals.append((round_number, refusal)),
    )
    judge = Judge(
        dataset=dataset,
        own_tests=[torch.from_numpy(rows) for rows in partition.test],
        seen_labels=torch.stack([held.seen_labels(device) for device in fleet.devices(1)]),
        statistics=StaticBatchNorm(**recipe.evaluation.statistics),
        batch_size=recipe.evaluation.batch_size,
        tests=recipe.evaluation.tests,
        candidates=recipe.evaluation.candidates,
        fine_tune=None if recipe.evaluation.fine_tune is None else FineTune(**recipe.evaluation.fine_tune),
    )
    engine = ProcessPool(alone, fleet, finder(method, judge), workers) if workers > 1 else alone
    warm = warm_start(loaded, fleet)
    return Experiment(loaded, dataset, partition, fleet, method, engine, judge, refusals, warm)


def simulation(experiment: Experiment) -> InProcess:
    """The engine that knows the experiment's devices, be there workers or not."""
    engine = experiment.engine
    return engine.inner if isinstance(engine, ProcessPool) else cast(InProcess, engine)


def member(experiment: Experiment) -> Member:
    """What a worker must know of an experiment."""
    return Member(simulation(experiment), experiment.fleet, finder(experiment.method, experiment.judge))


def picked(
    table: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any], key: str = "kind"
) -> Callable[..., Any]:
    """An entry of a table with its settings filled in; they were checked when the recipe was read."""
    rest = {name: value for name, value in settings.items() if name != key}
    return partial(table[settings[key]], **rest)

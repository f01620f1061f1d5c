"""From a recipe to the things it names. What cannot work is refused here, before anything is written.

Which aggregate a round has: the one place where a recipe's choice becomes one.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..client import LR_SCHEDULES, OPTIMIZERS, Schedule, Task
from ..data import Dataset, Partition
from ..engines import (
    Attacked,
    ClientData,
    ClientStateStore,
    InProcess,
    Norms,
    PoolClient,
    ProcessPool,
    Refusal,
    build_client_data,
)
from ..engines.client_state import ClientStates
from ..engines.faults import Remote
from ..evaluation import Evaluator, FineTune, StaticBatchNorm
from ..evaluation.evaluator import SERVER_MODEL_REF, load_server_model
from ..fleet import DeviceModel, Engine, Fleet, draw_cohort, expected_participants, find_nesting_problem, make_tiers
from ..footprints import RULES, Aggregate, DPAggregator, RobustAggregator, coverage_mean
from ..methods import Method, fleet_problem
from ..models import Model, model
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.schema import AggregationConfig, EvaluationConfig
from ..recipe.validation import instantiate
from ..seeds import HOLDOUT_DEVICES, generator
from ..tensors import Tensors
from .clock import build_clock
from .compression import refuse_uncodable
from .data import Outline, build_partition, holds_its_own, outline_of, public_examples, read_data
from .faults import Faults, build_faults
from .privacy import refuse_known_noise, refuse_uncovered
from .state import RunState


@dataclass(frozen=True)
class Experiment:
    """All that a run needs."""

    loaded: LoadedRecipe
    dataset: Dataset
    partition: Partition
    fleet: Fleet
    method: Method
    engine: Engine
    evaluator: Evaluator
    refusals: list[tuple[int, Refusal]]
    warm: Tensors | None
    public: Tensor | None  # what the server has
    aggregate: Aggregate
    faults: Faults
    standing: RunState = field(default_factory=RunState)  # changes as the run goes
    deployed: bool = False  # real devices, with data of their own

    @property
    def memory(self) -> ClientStates:
        """What the devices remember, or where they do."""
        return cast(Remote, self.engine).memory  # so has every engine of a run


def build_fleet(loaded: LoadedRecipe, registry: Registry, seen: Outline) -> Fleet:
    recipe, part = loaded.recipe, loaded.recipe.fleet
    _refuse_given_amiss(loaded)
    total = math.fsum(tier.share for tier in recipe.tiers)
    shares = tuple(tier.share / total for tier in recipe.tiers)  # they sum to 1 but for rounding
    models, strangers = build_models(loaded, registry, seen), round(part.holdout_fraction * recipe.data.devices)
    unseen = generator(recipe.seed, HOLDOUT_DEVICES).permutation(recipe.data.devices)[:strangers]
    fleet = Fleet(
        make_tiers(models), shares, recipe.data.devices, recipe.seed, part.assignment,
        holdout_devices=frozenset(unseen.tolist()), device_tiers=part.device_tiers,
    )  # fmt: skip
    if part.eligible:
        fleet = fleet.restrict_tiers(part.eligible)
    if part.assignment == "fixed" and not draw_cohort(fleet, 1.0, 1):
        said = "no device belongs to these tiers, so nobody would train"
        place = ("fleet", "eligible" if part.eligible else "holdout_fraction")
        raise loaded.error(RecipeIssue(place, "RECIPE_VALUE", said))
    return fleet


def _refuse_given_amiss(loaded: LoadedRecipe) -> None:
    part, devices = loaded.recipe.fleet, loaded.recipe.data.devices
    if part.device_tiers and part.assignment == "redrawn":
        said = "tiers cannot be given and redrawn"
        raise loaded.error(RecipeIssue(("fleet", "device_tiers"), "RECIPE_VALUE", said, "leave fleet.assignment out"))
    if part.device_tiers and len(part.device_tiers) != devices:
        said = f"{len(part.device_tiers)} devices are given a tier, the recipe has {devices}"
        raise loaded.error(RecipeIssue(("fleet", "device_tiers"), "RECIPE_VALUE", said))


def build_models(loaded: LoadedRecipe, registry: Registry, seen: Outline) -> list[tuple[str, Model]]:
    """Every tier's model, under the tier's name."""
    recipe = loaded.recipe
    found: list[tuple[str, Model]] = []
    for number, tier in enumerate(recipe.tiers):
        family = tier.family or recipe.model.family
        try:
            size = _size(loaded, registry, number)
            made = model(family, registry.models[family], size, seen.input_shape, seen.labels.classes, seen.tokens)
            made.check_output_size()
        except Exception as error:
            said = f"{family} cannot be built for tier {tier.name!r}: {type(error).__name__}: {error}"
            raise loaded.error(RecipeIssue(("tiers", number), "MODEL_BUILD", said)) from error
        found.append((tier.name, made))
    return found


def _size(loaded: LoadedRecipe, registry: Registry, number: int) -> dict[str, Any]:
    """A tier's settings, and the widest of its family where a family asks for it."""
    recipe = loaded.recipe
    common, own = recipe.model.settings, recipe.tiers[number]
    alike = [tier for tier in recipe.tiers if tier.family == own.family]
    sizes = [{**({} if tier.family else common), **tier.settings} for tier in alike]
    named = inspect.signature(registry.models[own.family or recipe.model.family]).parameters
    if "widest" in named and "width" in named:
        widest = max(size.get("width", named["width"].default) for size in sizes)
        sizes = [{**size, "widest": widest} for size in sizes]
    return sizes[alike.index(own)]


def build_method(loaded: LoadedRecipe, registry: Registry, fleet: Fleet) -> Method:
    part = loaded.recipe.method
    kind = registry.methods[part.name]
    missing = getattr(kind, "__abstractmethods__", ())
    if missing:
        said = f"{part.name} lacks {', '.join(sorted(missing))}, which every method has"
        raise loaded.error(RecipeIssue(("method", "name"), "METHOD_INCOMPLETE", said, value=part.name))
    made = kind.from_settings(part.settings, registry.methods)
    outside = find_nesting_problem(fleet) if made.info.heterogeneity == "nested" else None
    if outside:
        raise loaded.error(RecipeIssue(("tiers",), "TIER_SHAPE", outside))
    refusal = fleet_problem(made, fleet)
    if refusal:
        raise loaded.error(RecipeIssue(("method", "name"), "METHOD_REFUSES", refusal, value=part.name))
    if made.needs_public_data and loaded.recipe.data.public is None:
        said = f"{part.name} needs examples without labels at the server"
        raise loaded.error(
            RecipeIssue(("data", "public"), "PUBLIC_MISSING", said, "set data.public = { examples = 256 }")
        )
    return made


def build_aggregate(aggregation: AggregationConfig) -> Aggregate:
    """How replies become weights: the papers' mean, or a rule that a few bad ones cannot bend."""
    rule = instantiate(RULES, {"rule": aggregation.rule, **aggregation.settings}, "rule")()
    return RobustAggregator(rule, aggregation.low_coverage, aggregation.min_contributors) if rule else coverage_mean


def refuse_deployment(loaded: LoadedRecipe, method: Method) -> None:
    """Raise unless real devices may be asked for what this method takes from them."""
    refuse_known_noise(loaded)
    if method.info.simulation_only:
        said = f"{loaded.recipe.method.name} uploads {method.info.uploads}"
        raise loaded.error(RecipeIssue(("method", "name"), "SIMULATION_ONLY", said))
    if method.shares_features and not loaded.recipe.privacy.acknowledge_feature_sharing:
        said = (
            f"{loaded.recipe.method.name} uploads features of the {method.shares_features}: inputs can be rebuilt from them"
        )
        hint = "fedloom audit RUN measures how well; if that is acceptable, set it to true"
        raise loaded.error(RecipeIssue(("privacy", "acknowledge_feature_sharing"), "FEATURES_LEAVE", said, hint))


def refuse_unjudged(loaded: LoadedRecipe, seen: Outline) -> None:
    """Raise where the recipe wants a evaluation that its data has none of."""
    if loaded.recipe.evaluation.fine_tune is not None and seen.labels.train.ndim > 1:
        said = "where every position is a question, nothing is judged before and after tuning"
        raise loaded.error(RecipeIssue(("evaluation", "fine_tune"), "RECIPE_VALUE", said, "leave it out"))


def build(loaded: LoadedRecipe, registry: Registry, seen: Outline) -> tuple[Fleet, Method]:
    """Who learns and how: all of a recipe that can be refused without its data."""
    fleet = build_fleet(loaded, registry, seen)
    method = build_method(loaded, registry, fleet)
    refuse_uncovered(loaded, fleet, method)
    refuse_uncodable(loaded, fleet, method)
    refuse_unjudged(loaded, seen)
    return fleet, method


def warm_start(loaded: LoadedRecipe, fleet: Fleet) -> Tensors | None:
    """The weights of an earlier model, where the recipe names one."""
    source = loaded.recipe.start.source
    if source is None:
        return None
    path = Path(source) / "models" / f"{fleet.largest.name}.safetensors" if Path(source).is_dir() else Path(source)

    def wrong(code: str, said: str) -> RecipeError:
        return loaded.error(RecipeIssue(("start", "from"), code, said))

    if not path.is_file():
        raise wrong("FILE_MISSING", f"there is no file {path}")
    try:
        held = load_file(path)
    except SafetensorError as error:
        raise wrong("START_FORMAT", f"{path} is not a safetensors file: {error}") from error
    for name, shape in fleet.global_model.shapes().items():
        if name not in held or held[name].shape != shape:
            raise wrong(
                "START_SHAPE", f"{path} does not hold this recipe's global model: {name} is missing or different"
            )
    return {name: held[name].to(torch.get_default_dtype()) for name in fleet.global_model.shapes()}


def finder(method: Method, evaluator: Evaluator) -> Callable[[tuple[str, ...]], Task]:
    """How a worker finds the task it is asked for: by name, so that no code has to travel."""

    def find(address: tuple[str, ...]) -> Task:
        match address:
            case ("statistics", name):
                task: Task = getattr(evaluator.statistics, name)
            case ("test_set", name):
                task = getattr(evaluator.test_set, name)
            case ("fine_tune", name):
                task = getattr(evaluator.fine_tune, name)
            case ("personal", fill, *rest):
                carried = load_server_model if tuple(rest) == SERVER_MODEL_REF else method.find(*rest)
                task = evaluator.local_evaluation(DeviceModel(carried, unseen_logit=json.loads(fill))).evaluate
            case _:
                task = method.find(*address)
        return task

    return find


def build_simulation(
    loaded: LoadedRecipe, method: Method, held: ClientData, warm: Tensors | None, notes: RunState
) -> InProcess:
    """The engine that knows the devices; whoever wants to hear of refusals says so later."""
    recipe, training, admission = loaded.recipe, loaded.recipe.training, loaded.recipe.admission
    return InProcess(
        client_data=held,
        memory=ClientStateStore(lambda device: method.init_client(device, recipe.seed, warm)),
        schedule=Schedule(training.batch_size, training.epochs, training.last_batch),
        optimizer=instantiate(OPTIMIZERS, training.optimizer)(),
        lr_schedule=instantiate(LR_SCHEDULES, training.lr_schedule)(),
        seed=recipe.seed,
        label_smoothing=training.label_smoothing,
        devices_per_block=recipe.engine.devices_per_block,
        max_examples=admission.max_examples,
        norms=Norms(admission.norm, lambda: notes.others.setdefault("norms", {})) if admission.norm else None,
    )


def build_judge(said: EvaluationConfig, dataset: Dataset, partition: Partition, held: ClientData, fleet: Fleet) -> Evaluator:
    return Evaluator(
        dataset=dataset,
        local_tests=[torch.from_numpy(rows) for rows in partition.test],
        seen_labels=torch.stack([held.seen_labels(device) for device in fleet.devices(1)]),
        statistics=StaticBatchNorm(**said.statistics),
        batch_size=said.batch_size,
        tests=said.tests,
        candidates=said.candidates,
        fine_tune=None if said.fine_tune is None else FineTune(**said.fine_tune),
    )


def assemble(
    loaded: LoadedRecipe, registry: Registry, folder: Path, dataset: Dataset | None = None, workers: int = 1
) -> Experiment:
    """`dataset` is the recipe's data where it has been read before: arms of a comparison share it. The number of
    workers changes nothing but the time."""
    dataset = dataset or read_data(loaded, registry, folder)
    seen = outline_of(dataset)
    partition = build_partition(loaded, seen.labels)
    fleet, method = build(loaded, registry, seen)
    warm, held = warm_start(loaded, fleet), build_client_data(dataset, partition, fleet)
    refusals: list[tuple[int, Refusal]] = []
    standing = RunState()

    def tell(round_number: int, refusal: Refusal) -> None:
        refusals.append((round_number, refusal))

    alone = build_simulation(loaded, method, held, warm, standing)
    alone.on_refusal = tell
    evaluator = build_judge(loaded.recipe.evaluation, dataset, partition, held, fleet)
    evaluator = replace(evaluator, tests_on_devices=holds_its_own(loaded))
    engine = ProcessPool(alone, fleet, finder(method, evaluator), workers) if workers > 1 else alone
    return Experiment(
        loaded, dataset, partition, fleet, method, engine, evaluator, refusals, warm,
        public_examples(loaded, registry, folder, dataset), build_aggregate(loaded.recipe.aggregation),
        build_faults(loaded, fleet, alone, build_clock(loaded, method, fleet), tell), standing,
    )  # fmt: skip


def simulation(experiment: Experiment) -> InProcess:
    """The engine that knows what the experiment's devices hold, whoever carries it out."""
    engine = experiment.engine
    return engine if isinstance(engine, InProcess) else cast(ProcessPool | Attacked, engine).inner


def member(experiment: Experiment) -> PoolClient:
    """What a worker must know of an experiment."""
    return PoolClient(simulation(experiment), experiment.fleet, finder(experiment.method, experiment.evaluator))


def merge_for(experiment: Experiment, round_number: int) -> Aggregate:
    """The experiment's own, as a defence may have chosen it; or one that hides devices, whose noise is the round's."""
    said, fleet = experiment.loaded.recipe.privacy, experiment.fleet
    if said.clip is None or said.noise is None:
        return experiment.aggregate
    expected = expected_participants(fleet, experiment.loaded.recipe.fleet.participation)
    electorate = [
        (experiment.method.aggregation_footprint(tier, fleet, round_number), expected[tier.name])
        for tier in fleet.active_tiers
        if expected[tier.name] > 0
    ]
    return DPAggregator(said.clip, said.noise, electorate, fleet.seed, round_number)

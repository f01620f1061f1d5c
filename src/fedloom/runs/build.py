"""From a recipe to the things it names. What cannot work is refused here, before anything is written."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..client import LR_SCHEDULES, OPTIMIZERS, Schedule, Task
from ..data import Dataset, Partition
from ..engines import (
    ClientData,
    ClientStateStore,
    Executor,
    Gate,
    InlineExecutor,
    InProcess,
    NormScreening,
    Refusal,
    Simulation,
    TaskRegistry,
    WorkerPool,
    build_client_data,
)
from ..engines.gate import Report
from ..evaluation import Evaluator, FineTune, StaticBatchNorm
from ..evaluation.evaluator import SERVER_MODEL_REF, load_server_model
from ..fleet import DeviceModel, Fleet, draw_cohort, find_nesting_problem, make_tiers
from ..footprints import RULES, Aggregate, RobustAggregator, coverage_mean
from ..methods import Method, fleet_problem
from ..models import Model, build_model
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.schema import AggregationConfig, EvaluationConfig
from ..recipe.validation import instantiate
from ..seeds import HOLDOUT_DEVICES, generator
from ..tensors import Tensors
from .clock import build_clock
from .compression import build_compression, check_compression
from .data import DataSpec, build_partition, devices_own_data, data_spec_of, read_public_examples, read_data
from .experiment import Experiment
from .faults import build_faults
from .privacy import check_noise_is_secret, check_privacy
from .state import RunState


def build_fleet(loaded: LoadedRecipe, registry: Registry, data_spec: DataSpec) -> Fleet:
    recipe, part = loaded.recipe, loaded.recipe.fleet
    _refuse_given_amiss(loaded)
    total = math.fsum(tier.share for tier in recipe.tiers)
    shares = tuple(tier.share / total for tier in recipe.tiers)  # they sum to 1 but for rounding
    models, strangers = build_models(loaded, registry, data_spec), round(part.holdout_fraction * recipe.data.devices)
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


def build_models(loaded: LoadedRecipe, registry: Registry, data_spec: DataSpec) -> list[tuple[str, Model]]:
    """Every tier's model, under the tier's name."""
    recipe = loaded.recipe
    found: list[tuple[str, Model]] = []
    for number, tier in enumerate(recipe.tiers):
        family = tier.family or recipe.model.family
        try:
            size = _size(loaded, registry, number)
            made = build_model(
                family, registry.models[family], size, data_spec.input_shape, data_spec.labels.classes, data_spec.tokens
            )
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


def check_deployment(loaded: LoadedRecipe, method: Method) -> None:
    """Raise unless real devices may be asked for what this method takes from them."""
    check_noise_is_secret(loaded)
    if method.info.simulation_only:
        said = f"{loaded.recipe.method.name} uploads {method.info.uploads}"
        raise loaded.error(RecipeIssue(("method", "name"), "SIMULATION_ONLY", said))
    if method.shares_features and not loaded.recipe.privacy.acknowledge_feature_sharing:
        said = f"{loaded.recipe.method.name} uploads features of the {method.shares_features}: inputs can be rebuilt from them"
        hint = "fedloom audit RUN measures how well; if that is acceptable, set it to true"
        raise loaded.error(RecipeIssue(("privacy", "acknowledge_feature_sharing"), "FEATURES_LEAVE", said, hint))


def check_fine_tuning(loaded: LoadedRecipe, data_spec: DataSpec) -> None:
    """Raise where the recipe wants a evaluation that its data has none of."""
    if loaded.recipe.evaluation.fine_tune is not None and data_spec.labels.train.ndim > 1:
        said = "where every position is a question, nothing is judged before and after tuning"
        raise loaded.error(RecipeIssue(("evaluation", "fine_tune"), "RECIPE_VALUE", said, "leave it out"))


def build(loaded: LoadedRecipe, registry: Registry, data_spec: DataSpec) -> tuple[Fleet, Method]:
    """Who learns and how: all of a recipe that can be refused without its data."""
    fleet = build_fleet(loaded, registry, data_spec)
    method = build_method(loaded, registry, fleet)
    check_privacy(loaded, fleet, method)
    check_compression(loaded, fleet, method)
    check_fine_tuning(loaded, data_spec)
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


def build_task_registry(method: Method, evaluator: Evaluator) -> TaskRegistry:
    """How other processes find the tasks of a run."""

    def find_local(fill: str, *ref: str) -> Task:
        load = load_server_model if ref == SERVER_MODEL_REF else method.find(*ref)
        return evaluator.local_evaluation(DeviceModel(load, unseen_logit=json.loads(fill))).evaluate

    groups: dict[str, Callable[..., Task]] = {
        "statistics": lambda name: getattr(evaluator.statistics, name),
        "test_set": lambda name: getattr(evaluator.test_set, name),
        "fine_tune": lambda name: getattr(evaluator.fine_tune, name),
        "personal": find_local,
    }
    return TaskRegistry(method.find, groups)


def build_simulator(
    loaded: LoadedRecipe,
    method: Method,
    client_data: ClientData,
    warm: Tensors | None,
    report: Report,
    executor: Executor,
) -> InProcess:
    """The engine that holds the simulated devices."""
    recipe, training = loaded.recipe, loaded.recipe.training
    return InProcess(
        client_data=client_data,
        client_states=ClientStateStore(lambda device: method.init_client(device, recipe.seed, warm)),
        schedule=Schedule(training.batch_size, training.epochs, training.last_batch),
        optimizer=instantiate(OPTIMIZERS, training.optimizer)(),
        lr_schedule=instantiate(LR_SCHEDULES, training.lr_schedule)(),
        seed=recipe.seed,
        label_smoothing=training.label_smoothing,
        devices_per_block=recipe.engine.devices_per_block,
        gate=Gate(report, recipe.admission.max_examples),
        executor=executor,
    )


def build_evaluator(
    config: EvaluationConfig,
    dataset: Dataset,
    partition: Partition,
    client_data: ClientData,
    fleet: Fleet,
    tests_on_devices: bool,
) -> Evaluator:
    return Evaluator(
        dataset=dataset,
        local_tests=[torch.from_numpy(rows) for rows in partition.test],
        seen_labels=torch.stack([client_data.seen_labels(device) for device in fleet.devices(1)]),
        statistics=StaticBatchNorm(**config.statistics),
        batch_size=config.batch_size,
        tests=config.tests,
        candidates=config.candidates,
        tests_on_devices=tests_on_devices,
        fine_tune=None if config.fine_tune is None else FineTune(**config.fine_tune),
    )


def assemble(
    loaded: LoadedRecipe,
    registry: Registry,
    folder: Path,
    dataset: Dataset | None = None,
    workers: int = 1,
    executor: Executor | None = None,
) -> Experiment:
    """Build everything that a recipe names.

    `dataset`: the recipe's data where it has been read before; arms of a comparison share it. `executor`: runs blocks;
    by default one with so many `workers`, whose number changes nothing but the time.
    """
    dataset = dataset or read_data(loaded, registry, folder)
    data_spec = data_spec_of(dataset)
    partition = build_partition(loaded, data_spec.labels)
    fleet, method = build(loaded, registry, data_spec)
    warm, client_data = warm_start(loaded, fleet), build_client_data(dataset, partition, fleet)
    refusals: list[tuple[int, Refusal]] = []
    state = RunState()

    def report(round_number: int, refusal: Refusal) -> None:
        refusals.append((round_number, refusal))

    executor = executor or (WorkerPool(workers) if workers > 1 else InlineExecutor())
    simulator = build_simulator(loaded, method, client_data, warm, report, executor)
    evaluator = build_evaluator(loaded.recipe.evaluation, dataset, partition, client_data, fleet, devices_own_data(loaded))
    limit = loaded.recipe.admission.norm
    experiment = Experiment(
        loaded=loaded,
        dataset=dataset,
        partition=partition,
        fleet=fleet,
        method=method,
        engine=simulator,
        simulator=simulator,
        client_states=simulator.client_states,
        evaluator=evaluator,
        aggregate=build_aggregate(loaded.recipe.aggregation),
        faults=build_faults(loaded, fleet, build_clock(loaded, method, fleet), client_data.count, report),
        refusals=refusals,
        state=state,
        warm=warm,
        public=read_public_examples(loaded, registry, folder, dataset),
        compression=build_compression(loaded.recipe),
        screening=NormScreening(limit, lambda: state.norm_history, report) if limit else None,
    )
    executor.register(build_simulation(experiment))
    return experiment


def build_simulation(experiment: Experiment) -> Simulation:
    """What another process needs to run the experiment's blocks."""
    find_task = build_task_registry(experiment.method, experiment.evaluator)
    return Simulation(experiment.simulator, experiment.fleet, find_task)

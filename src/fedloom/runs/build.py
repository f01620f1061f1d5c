"""Build everything that a recipe names. What cannot work is refused here, before anything is written."""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..client import Like, Schedule, Task, build_loss, fits_task, tasks_of
from ..data import Dataset, LearningTask, Partition
from ..engines import (
    ClientData,
    ClientStateStore,
    Compression,
    Executor,
    Gate,
    InlineExecutor,
    InProcess,
    NormScreening,
    Refusal,
    TaskRegistry,
    WorkerContext,
    WorkerPool,
    build_client_data,
)
from ..engines.gate import Report
from ..evaluation import BatchNormStatistics, Evaluator, FineTune
from ..evaluation.evaluator import SERVER_MODEL_REF, load_server_model
from ..evaluation.metrics import Metric
from ..files import is_file, is_folder
from ..fleet import DeviceModel, Fleet, draw_cohort, find_nesting_problem, make_tiers
from ..footprints import Aggregate, Footprint, RobustAggregator, ServerOptimizer, coverage_mean
from ..methods import Method, fleet_problem, headline_test
from ..models import MODELS, Family, KernelSetting, Model, build_model, choose_kernels, lanes
from ..placement import Compute, resolve_device
from ..recipe.errors import KeyPath, RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.schema import AggregationConfig, EvaluationConfig, Recipe
from ..recipe.validation import instantiate
from ..registry import suggest
from ..seeds import HOLDOUT_DEVICES, generator
from ..tensors import Tensors
from ..wording import pluralize
from .clock import build_clock
from .data import (
    DataSpec,
    build_partition,
    check_number_of_devices,
    check_public_data,
    data_spec_of,
    devices_own_data,
    read_data,
    read_public_examples,
)
from .effects import check_effects
from .experiment import Experiment
from .faults import build_faults
from .metrics import build_metrics, check_metrics
from .privacy import check_noise_is_secret, check_privacy
from .state import RunState

ENTRYWISE_RULES = ("median", "trimmed_mean")


def build_fleet(loaded: LoadedRecipe, registries: Registries, data_spec: DataSpec) -> Fleet:
    recipe, config = loaded.recipe, loaded.recipe.fleet
    check_number_of_devices(loaded, data_spec.labels)
    _check_device_tiers(loaded)
    total = math.fsum(tier.share for tier in recipe.tiers)
    shares = tuple(tier.share / total for tier in recipe.tiers)  # they sum to 1 but for rounding
    models, held_out = build_models(loaded, registries, data_spec), round(config.holdout_fraction * recipe.data.devices)
    holdout_devices = generator(recipe.seed, HOLDOUT_DEVICES).permutation(recipe.data.devices)[:held_out]
    fleet = Fleet(
        make_tiers(models), shares, recipe.data.devices, recipe.seed, config.assignment,
        holdout_devices=frozenset(holdout_devices.tolist()), device_tiers=config.device_tiers,
    )  # fmt: skip
    if config.eligible:
        fleet = fleet.restrict_tiers(config.eligible)
    all_held_out = len(fleet.holdout_devices) == fleet.size
    if all_held_out or (config.assignment == "fixed" and not draw_cohort(fleet, 1.0, 1)):
        key = ("fleet", "eligible" if config.eligible and not all_held_out else "holdout_fraction")
        raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", "no device would train: none belongs to these tiers"))
    return fleet


def _check_device_tiers(loaded: LoadedRecipe) -> None:
    config, devices, key = loaded.recipe.fleet, loaded.recipe.data.devices, ("fleet", "device_tiers")
    if config.device_tiers and config.assignment == "redrawn":
        message = "tiers cannot be given and redrawn"
        raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", message, "leave fleet.assignment out"))
    if config.device_tiers and len(config.device_tiers) != devices:
        entries = pluralize(len(config.device_tiers), "entry")
        message = f"fleet.device_tiers has {entries}, the recipe {pluralize(devices, 'device')}"
        raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", message))


def build_models(loaded: LoadedRecipe, registries: Registries, data_spec: DataSpec) -> list[tuple[str, Model]]:
    """Every tier's model, under the tier's name."""
    recipe, kernels = loaded.recipe, _kernel_setting(loaded)
    models: list[tuple[str, Model]] = []
    for number, tier in enumerate(recipe.tiers):
        family = tier.family or recipe.model.family
        try:
            size = _model_settings(loaded, registries, number)
            model = build_model(
                family,
                registries.models[family],
                size,
                data_spec.input_shape,
                data_spec.labels.classes,
                data_spec.tokens,
                data_spec.target_shape,
                data_spec.task.class_axis,
            )
            model.check_output_size()
            model.check_buffers()
            model = replace(model, kernels=choose_kernels(kernels, model))
            if data_spec.task.causal:
                model.check_causal()
        except Exception as error:
            message = f"{family} cannot be built for tier {tier.name!r}: {type(error).__name__}: {error}"
            hint = _suggest_families(registries.models[family], data_spec)
            raise loaded.error(RecipeIssue(("tiers", number), "MODEL_BUILD", message, hint)) from error
        models.append((tier.name, model))
    return models


def _kernel_setting(loaded: LoadedRecipe) -> KernelSetting:
    """The recipe's kernels. Those for lanes compute in full precision on the CPU, so elsewhere torch computes."""
    engine = loaded.recipe.engine
    device = resolve_device("auto") if engine.device == "auto" else engine.device
    is_plain_cpu = device == "cpu" and not engine.devices and engine.precision == "float32" and not engine.compile
    if engine.kernels == "lanes" and not (lanes.is_available() and is_plain_cpu):
        code, message = "KERNELS_MISSING", 'engine.kernels = "lanes" needs Numba'
        hint = 'pip install "fedloom[fast]", or engine.kernels = "torch"'
        if lanes.is_available():
            code, message = "KERNELS_DEVICE", 'engine.kernels = "lanes" computes in float32 on the CPU, not compiled'
            hint = 'engine.kernels = "torch", or "auto"'
        raise loaded.error(RecipeIssue(("engine", "kernels"), code, message, hint, value="lanes"))
    return engine.kernels if is_plain_cpu else "torch"


_SUITED = {
    1: (("mlp",), "mlp takes rows of features"),
    2: (("convnet1d", "mlp"), "convnet1d and mlp take time series [channels, length]"),
}


def _suggest_families(family: Family, data_spec: DataSpec) -> str:
    """Families for examples with this many axes, if the one that failed is a built-in family for others."""
    suited, hint = _SUITED.get(len(data_spec.input_shape), ((), ""))
    is_ours = any(family is build for name, build in MODELS.items() if name not in suited)
    return hint if is_ours and data_spec.tokens is None else ""


def _model_settings(loaded: LoadedRecipe, registries: Registries, number: int) -> dict[str, Any]:
    """Settings of a tier's model; with the largest width of its family if the family takes `widest`."""
    recipe = loaded.recipe
    common, config = recipe.model.settings, recipe.tiers[number]
    family = [tier for tier in recipe.tiers if tier.family == config.family]
    settings = [{**({} if tier.family else common), **tier.settings} for tier in family]
    parameters = inspect.signature(registries.models[config.family or recipe.model.family]).parameters
    if "widest" in parameters and "width" in parameters:
        widest = max(one.get("width", parameters["width"].default) for one in settings)
        settings = [{**one, "widest": widest} for one in settings]
    return settings[family.index(config)]


def build_method(loaded: LoadedRecipe, registries: Registries, fleet: Fleet, task: LearningTask) -> Method:
    config = loaded.recipe.method
    kind = registries.methods[config.name]
    missing = getattr(kind, "__abstractmethods__", ())
    if missing:
        message = f"{config.name} lacks {', '.join(sorted(missing))}, which every method must define"
        raise loaded.error(RecipeIssue(("method", "name"), "METHOD_INCOMPLETE", message, value=config.name))
    method = kind.from_settings(config.settings, registries.methods)
    outside = find_nesting_problem(fleet) if method.info.heterogeneity == "nested" else None
    if outside:
        raise loaded.error(RecipeIssue(("tiers",), "TIER_SHAPE", outside))
    problem = method.check_task(task, config.settings) or fleet_problem(method, fleet)
    if problem:
        raise loaded.error(RecipeIssue(("method", "name"), "METHOD_REFUSES", problem, value=config.name))
    if method.needs_public_data and loaded.recipe.data.public is None:
        message, hint = f"{config.name} needs unlabeled examples at the server", "set data.public = { examples = 256 }"
        raise loaded.error(RecipeIssue(("data", "public"), "PUBLIC_MISSING", message, hint))
    return method


def build_aggregate(aggregation: AggregationConfig, registries: Registries) -> Aggregate:
    """How updates become weights: the papers' weighted mean, or a rule that is robust to a few bad updates."""
    rule = instantiate(registries.aggregation, {"rule": aggregation.rule, **aggregation.settings}, "rule")()
    return RobustAggregator(rule, aggregation.low_coverage, aggregation.min_contributors) if rule else coverage_mean


def build_server_optimizer(aggregation: AggregationConfig, registries: Registries) -> ServerOptimizer | None:
    """None if the server takes the average as it is."""
    chosen = aggregation.server_optimizer
    return None if chosen is None else instantiate(registries.server_optimizers, chosen)()


def build_compression(recipe: Recipe, registries: Registries) -> Compression | None:
    """None if messages are not compressed."""
    uplink, downlink = recipe.compression.uplink, recipe.compression.downlink
    if uplink is None and downlink is None:
        return None
    return Compression(
        instantiate(registries.compressors, uplink)() if uplink else None,
        instantiate(registries.compressors, downlink)() if downlink else None,
    )


def check_compression(loaded: LoadedRecipe, registries: Registries, fleet: Fleet, method: Method) -> None:
    """Raise if compression does not work together with the rest of the recipe."""
    issues = list(_find_compression_issues(loaded.recipe, registries, fleet, method))
    if issues:
        raise loaded.error(*issues)


def _find_compression_issues(
    recipe: Recipe, registries: Registries, fleet: Fleet, method: Method
) -> Iterator[RecipeIssue]:
    compression, key = build_compression(recipe, registries), ("compression", "uplink")
    if compression is None or compression.uplink is None or not compression.uplink.of_updates:
        return
    if recipe.aggregation.rule in ENTRYWISE_RULES:
        message = f"{recipe.aggregation.rule} compares devices entry by entry, and each would leave out other parts"
        yield RecipeIssue(
            key, "COMPRESSION_AGGREGATION", message, 'use another compression, or aggregation.rule = "default"'
        )
    if not compression.uplink.error_feedback:
        return
    hint = "leave it out, or set error_feedback = false"
    if recipe.privacy.clip is not None:
        message = "error feedback uploads parts of earlier updates, which epsilon does not account for"
        yield RecipeIssue(key, "PRIVACY_COMPRESSION", message, hint)
    methods = [part.method for part in getattr(method, "parts", ())] or [method]
    if any(_has_moving_footprints(one, fleet) for one in methods):
        message = f"{recipe.method.name} gives a device other weights every round: its residual would not fit them"
        yield RecipeIssue(key, "COMPRESSION_METHOD", message, hint)


def _has_moving_footprints(method: Method, fleet: Fleet) -> bool:
    """Whether a tier covers other entries of the global model in the next round, by footprint or by declaration."""
    specs = (spec for task in tasks_of(method) for spec in task.sends.values())
    return any(isinstance(spec, Like) and not spec.same_entries for spec in specs) or any(
        _plain_blocks(method.aggregation_footprint(tier, fleet, 1))
        != _plain_blocks(method.aggregation_footprint(tier, fleet, 2))
        for tier in fleet.active_tiers
    )


def _plain_blocks(footprint: Footprint) -> dict[str, list[object]]:
    return {
        name: [indices.tolist() if isinstance(indices, Tensor) else indices for indices in block]
        for name, block in footprint.blocks.items()
    }


def check_deployment(loaded: LoadedRecipe, method: Method) -> None:
    """Raise if a method may not be used with real devices."""
    check_noise_is_secret(loaded)
    if method.info.simulation_only:
        message = f"{loaded.recipe.method.name} uploads {method.info.uploads}"
        raise loaded.error(RecipeIssue(("method", "name"), "SIMULATION_ONLY", message))
    if method.shares_features and not loaded.recipe.privacy.acknowledge_feature_sharing:
        name, features = loaded.recipe.method.name, method.shares_features
        message = f"{name} uploads features of the {features}: inputs can be reconstructed from them"
        hint = "fedloom audit RUN measures how well; if that is acceptable, set it to true"
        raise loaded.error(RecipeIssue(("privacy", "acknowledge_feature_sharing"), "FEATURES_LEAVE", message, hint))


def check_fine_tuning(loaded: LoadedRecipe, data_spec: DataSpec) -> None:
    """Raise if fine-tuning is to be evaluated on data that has no such evaluation."""
    if loaded.recipe.evaluation.fine_tune is not None and data_spec.task.is_sequence:
        message = "fine-tuning is not evaluated on data with a label for every position"
        raise loaded.error(RecipeIssue(("evaluation", "fine_tune"), "RECIPE_VALUE", message, "leave it out"))


def check_loss(loaded: LoadedRecipe, registries: Registries, task: LearningTask) -> None:
    """Raise if the recipe's loss is for other targets than those of the task."""
    chosen = loaded.recipe.training.loss
    if chosen is None or fits_task(registries.losses[chosen["kind"]], task):
        return
    fitting = [name for name, entry in registries.losses.items() if fits_task(entry, task)]
    message = f"{chosen['kind']} is not a loss for {task.kind}"
    hint = f"known for it: {', '.join(fitting)}; without training.loss it is {task.loss}"
    raise loaded.error(RecipeIssue(("training", "loss", "kind"), "LOSS_TASK", message, hint, chosen["kind"]))


def check_inputs_keep_targets(loaded: LoadedRecipe, data_spec: DataSpec) -> None:
    """Raise if the preparation moves pixels, whose labels would stay where they are."""
    preparation = data_spec.preparation
    moved = (preparation.size, preparation.crop_padding, preparation.flip)
    if data_spec.task.positions == "pixels" and any(moved):
        message = "this preparation resizes, crops or flips images, and the labels of their pixels would not follow"
        hint = 'data.preparation = "plain", or one that only normalizes'
        raise loaded.error(RecipeIssue(("data", "preparation"), "TASK_PREPARATION", message, hint))


def build(loaded: LoadedRecipe, registries: Registries, data_spec: DataSpec) -> tuple[Fleet, Method]:
    """Fleet and method, with every check that does not need the data itself."""
    fleet = build_fleet(loaded, registries, data_spec)
    check_loss(loaded, registries, data_spec.task)
    check_inputs_keep_targets(loaded, data_spec)
    method = build_method(loaded, registries, fleet, data_spec.task)
    check_privacy(loaded, fleet, method)
    check_compression(loaded, registries, fleet, method)
    check_effects(loaded, fleet, method, data_spec)
    check_fine_tuning(loaded, data_spec)
    check_metrics(loaded, registries, data_spec)
    return fleet, method


def check(loaded: LoadedRecipe, registries: Registries, folder: Path, data_spec: DataSpec) -> tuple[Fleet, Method]:
    """Build everything that `assemble` builds, as far as that is possible without the data, and raise what it would."""
    check_public_data(loaded, registries, folder, data_spec)
    build_partition(loaded, registries, data_spec.labels)
    fleet, method = build(loaded, registries, data_spec)
    check_candidates(loaded, fleet, method, warm_start(loaded, fleet))
    build_training(loaded, registries, data_spec.task)
    build_compute(loaded)
    build_aggregate(loaded.recipe.aggregation, registries)
    build_server_optimizer(loaded.recipe.aggregation, registries)
    clock = build_clock(loaded, registries, method, fleet)
    build_faults(loaded, fleet, clock, lambda device: 0, lambda number, refusal: None)
    return fleet, method


def check_candidates(loaded: LoadedRecipe, fleet: Fleet, method: Method, warm: Tensors | None) -> None:
    """Raise if the recipe evaluates or compares a model that its method does not have."""
    evaluation, compared = loaded.recipe.evaluation.candidates, loaded.recipe.compare.candidate
    wanted: list[tuple[KeyPath, str]] = [(("evaluation", "candidates"), name) for name in evaluation]
    wanted += [] if compared is None else [(("compare", "candidate"), compared)]
    if not wanted:
        return
    known = method.eval_targets(method.start(fleet, fleet.seed, warm))
    message = f"{loaded.recipe.method.name} has no candidate of that name"
    issues = [
        RecipeIssue(key_path, "RECIPE_NAME", message, suggest(name, known), name)
        for key_path, name in wanted
        if name not in known
    ]
    if issues:
        raise loaded.error(*issues)


def warm_start(loaded: LoadedRecipe, fleet: Fleet) -> Tensors | None:
    """The weights of an earlier model, if the recipe names one."""
    source = loaded.recipe.start.source
    if source is None:
        return None
    path = Path(source) / "models" / f"{fleet.largest.name}.safetensors" if is_folder(Path(source)) else Path(source)

    def start_error(code: str, message: str, hint: str = "") -> RecipeError:
        return loaded.error(RecipeIssue(("start", "from"), code, message, hint))

    if not is_file(path):
        is_unfinished = is_file(Path(source) / "rows.jsonl") and not is_folder(path.parent)
        hint = f"it is written when a run ends; fedloom finish {source} ends one that was interrupted"
        raise start_error("FILE_MISSING", f"there is no file {path}", hint if is_unfinished else "")
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise start_error("START_FORMAT", f"{path} is not a safetensors file: {error}") from error
    for name, shape in fleet.global_model.shapes().items():
        if name not in weights or weights[name].shape != shape:
            raise start_error(
                "START_SHAPE", f"{path} does not hold this recipe's global model: {name} is missing or different"
            )
    for name, weight in fleet.global_model.frozen_weights().items():
        if name in weights and not torch.equal(weights[name].to(weight.dtype), weight):
            raise start_error(
                "START_BASE", f"{path} was trained on other frozen weights: its {name} differs from this recipe's"
            )
    return {name: weights[name].to(torch.get_default_dtype()) for name in fleet.global_model.shapes()}


def build_task_registry(method: Method, evaluator: Evaluator) -> TaskRegistry:
    """Find the tasks of a run by name, as other processes must."""

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


def build_training(loaded: LoadedRecipe, registries: Registries, task: LearningTask) -> dict[str, Any]:
    """How the recipe's devices train, as arguments of an engine."""
    training = loaded.recipe.training
    chosen = training.loss or {"kind": task.loss}
    kind, loss = chosen["kind"], {key: value for key, value in chosen.items() if key != "kind"}
    return {
        "schedule": Schedule(training.batch_size, training.epochs, training.last_batch, training.shuffle),
        "optimizer": instantiate(registries.optimizers, training.optimizer)(),
        "lr_schedule": instantiate(registries.lr_schedules, training.lr_schedule)(),
        "loss": build_loss(registries.losses[kind], loss),
    }


def build_compute(loaded: LoadedRecipe) -> Compute:
    """Where and how the recipe's blocks are computed; raises if this machine has no such device."""
    engine = loaded.recipe.engine
    wanted: list[tuple[KeyPath, str]] = [(("engine", "device"), engine.device)]
    wanted += [(("engine", "devices", number), name) for number, name in enumerate(engine.devices)]
    found = []
    for key, name in wanted:
        try:
            found.append(resolve_device(name))
        except ValueError as error:
            hint = 'fedloom doctor shows what there is; "auto" takes the first accelerator, or else the CPU'
            raise loaded.error(RecipeIssue(key, "DEVICE_MISSING", str(error), hint, name)) from None
    device, *devices = found
    return Compute(
        devices[0] if devices else device,
        engine.precision,
        engine.compile,
        engine.tf32,
        engine.deterministic,
        tuple(devices),
    )


def build_simulator(
    loaded: LoadedRecipe,
    registries: Registries,
    method: Method,
    client_data: ClientData,
    warm: Tensors | None,
    report: Report,
    executor: Executor,
) -> InProcess:
    """The engine that holds the simulated devices."""
    recipe = loaded.recipe
    return InProcess(
        client_data=client_data,
        client_states=ClientStateStore(partial(method.init_client, seed=recipe.seed, warm_start=warm)),
        seed=recipe.seed,
        **build_training(loaded, registries, client_data.dataset.task),
        devices_per_block=recipe.engine.devices_per_block,
        gate=Gate(report, recipe.admission.max_examples),
        executor=executor,
        compute=build_compute(loaded),
    )


def build_evaluator(
    config: EvaluationConfig,
    dataset: Dataset,
    partition: Partition,
    client_data: ClientData,
    fleet: Fleet,
    tests_on_devices: bool,
    metrics: tuple[Metric, ...] | None = None,
    devices_compute: bool = False,
) -> Evaluator:
    return Evaluator(
        dataset=dataset,
        local_tests=[torch.from_numpy(rows) for rows in partition.test],
        seen_labels=torch.stack([client_data.seen_labels(device) for device in fleet.devices(1)]),
        statistics=BatchNormStatistics(**config.statistics),
        batch_size=config.batch_size,
        tests=config.tests,
        candidates=config.candidates,
        tests_on_devices=tests_on_devices,
        metrics=metrics,
        devices_compute=devices_compute,
        seed=fleet.seed,
        fine_tune=None if config.fine_tune is None else FineTune(**config.fine_tune, task=dataset.task),
    )


def assemble(
    loaded: LoadedRecipe,
    registries: Registries,
    folder: Path,
    dataset: Dataset | None = None,
    workers: int = 1,
    executor: Executor | None = None,
) -> Experiment:
    """Build everything that a recipe names.

    `dataset`: the recipe's data if it has been read before; arms of a comparison share it. `executor`: runs blocks, by
    default with this many `workers`; their number changes only the time.
    """
    dataset = dataset or read_data(loaded, registries, folder)
    data_spec = data_spec_of(dataset)
    partition = build_partition(loaded, registries, data_spec.labels)
    fleet, method = build(loaded, registries, data_spec)
    warm, client_data = warm_start(loaded, fleet), build_client_data(dataset, partition, fleet)
    refusals: list[tuple[int, Refusal]] = []
    state = RunState()

    def report(round_number: int, refusal: Refusal) -> None:
        refusals.append((round_number, refusal))

    executor = executor or (WorkerPool(workers) if workers > 1 else InlineExecutor())
    simulator = build_simulator(loaded, registries, method, client_data, warm, report, executor)
    evaluator = build_evaluator(
        loaded.recipe.evaluation,
        dataset,
        partition,
        client_data,
        fleet,
        devices_own_data(loaded),
        build_metrics(loaded, registries),
        devices_compute=loaded.recipe.engine.kind == "flower",
    )
    limit = loaded.recipe.admission.norm
    experiment = Experiment(
        loaded=loaded,
        registries=registries,
        dataset=dataset,
        partition=partition,
        fleet=fleet,
        method=method,
        engine=simulator,
        simulator=simulator,
        client_states=simulator.client_states,
        evaluator=evaluator,
        aggregate=build_aggregate(loaded.recipe.aggregation, registries),
        faults=build_faults(loaded, fleet, build_clock(loaded, registries, method, fleet), client_data.count, report),
        refusals=refusals,
        state=state,
        warm=warm,
        public=read_public_examples(loaded, registries, folder, dataset),
        compression=build_compression(loaded.recipe, registries),
        screening=NormScreening(limit, lambda: state.norm_history, report) if limit else None,
        headline_test=headline_test(method.produces, loaded.recipe.evaluation.tests),
        server_optimizer=build_server_optimizer(loaded.recipe.aggregation, registries),
    )
    executor.register(build_worker_context(experiment))
    return experiment


def build_worker_context(experiment: Experiment) -> WorkerContext:
    """What another process needs to run the experiment's blocks."""
    find_task = build_task_registry(experiment.method, experiment.evaluator)
    return WorkerContext(experiment.simulator, experiment.fleet, find_task)

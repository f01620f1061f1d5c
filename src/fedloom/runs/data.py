"""A recipe's data: reading it, its shape without reading it, and the partition among devices."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import (
    CLASSIFICATION,
    DATASET_INFO,
    DATASETS,
    PREPARATIONS,
    TASKS,
    DataBroken,
    DataError,
    DataMissing,
    Dataset,
    Labels,
    LearningTask,
    Partition,
    Preparation,
    as_dataset,
    check_values,
    correlate_tiers_with_labels,
    describe_deviation,
    extract_labels,
    hold_out,
    limit_examples,
    lookup_dataset_info,
    subsample,
    synthetic_labels,
)
from ..data.catalog import LABEL_NAMES
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.validation import instantiate
from ..seeds import MAX_EXAMPLES, PARTITION, PUBLIC, SUBSAMPLE, TIER_LABEL_CORRELATION, VALIDATION, generator
from ..wording import pluralize


def read_data(loaded: LoadedRecipe, registries: Registries, folder: Path) -> Dataset:
    """The recipe's data set; data that is not built in is looked through, and what is suspicious is logged."""
    data = loaded.recipe.data
    reader = registries.datasets[data.dataset]
    kind = loaded.recipe.task.kind
    task = None if kind is None else registries.tasks[kind]
    passed = {"folder": folder, "task": task}
    known = inspect.signature(reader).parameters
    where = {name: value for name, value in passed.items() if name in known and name not in data.settings}
    if _is_known(data.dataset, registries):
        dataset = _add_known(reader(**where, **data.settings), loaded)
    else:
        found = reader(**where, **data.settings)
        dataset = found if isinstance(found, Dataset) else as_dataset(found, name=data.dataset, task=task)
        check_values(dataset)
    if data.validation is not None:
        dataset = dataset.with_validation_split(torch.from_numpy(draw_validation_rows(loaded, len(dataset.train))))
    if data.test_examples is not None:
        dataset = dataset.limit_test_examples(data.test_examples)
    if data.preparation is not None:
        dataset = replace(dataset, preparation=_choose_preparation(loaded, registries, dataset))
    return _with_task(loaded, registries, dataset)


def _with_task(loaded: LoadedRecipe, registries: Registries, dataset: Dataset) -> Dataset:
    """The data set with the recipe's task, if its targets are such as the task needs."""
    kind = loaded.recipe.task.kind
    if kind is None:
        return dataset
    try:
        return replace(dataset, task=registries.tasks[kind])
    except DataBroken as error:
        raise task_error(loaded, str(error.message), dataset.task) from error


def task_error(loaded: LoadedRecipe, message: str, own: LearningTask) -> RecipeError:
    """A recipe's task contradicts its data set, whose own task is another."""
    kind = loaded.recipe.task.kind
    hint = f'leave [task] out, or set task.kind = "{own.kind}": that is what the data set is for'
    return loaded.error(RecipeIssue(("task", "kind"), "TASK_DATA", f"{message}, which is not for {kind}", hint, kind))


def _choose_preparation(loaded: LoadedRecipe, registries: Registries, dataset: Dataset) -> Preparation:
    name = loaded.recipe.data.preparation
    assert name is not None
    return _fit_preparation(
        loaded, registries.preparations[name], tuple(dataset.train.x.shape[1:]), dataset.tokens is not None
    )


def _fit_preparation(
    loaded: LoadedRecipe, preparation: Preparation, shape: tuple[int, ...], is_text: bool
) -> Preparation:
    """A preparation for examples of this shape; raises if the recipe's has steps that do not apply to them."""
    try:
        return preparation.for_shape(shape, is_text)
    except ValueError as error:
        hint = 'choose another one, such as "plain"; fedloom list preparations'
        issue = RecipeIssue(("data", "preparation"), "RECIPE_VALUE", str(error), hint, loaded.recipe.data.preparation)
        raise loaded.error(issue) from error


def _is_known(name: str, registries: Registries) -> bool:
    """True for built-in data sets whose content is known; files and folders of the user may hold anything."""
    return registries.datasets[name] is DATASETS.get(name) and name in DATASET_INFO


def _add_known(dataset: Dataset, loaded: LoadedRecipe) -> Dataset:
    """A built-in data set with the names of its classes; one whose files are cut or changed says so."""
    data = loaded.recipe.data
    counts = len(dataset.train), len(dataset.test), dataset.classes
    names = dataset.class_names or LABEL_NAMES.get(data.dataset, ())
    return replace(
        dataset,
        deviation=describe_deviation(data.dataset, data.settings, *counts, dataset.fingerprint),
        class_names=names if len(names) == dataset.classes else (),
    )


def draw_validation_rows(loaded: LoadedRecipe, examples: int) -> np.ndarray:
    """Indices of the validation examples, the same for every seed: settings are tuned for all seeds together."""
    count = loaded.recipe.data.validation or 0
    if count >= examples:
        message = f"there are only {examples} training examples in all"
        raise loaded.error(RecipeIssue(("data", "validation"), "RECIPE_VALUE", message, value=count))
    return hold_out(examples, count, generator(0, VALIDATION))


@dataclass(frozen=True)
class DataSpec:
    """What models and partitions need to know of the data."""

    input_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    labels: Labels
    tokens: int | None = None
    preparation: Preparation = PREPARATIONS["plain"]
    stored_dtype: torch.dtype = torch.uint8
    task: LearningTask = CLASSIFICATION
    target_shape: tuple[int, ...] = ()


def read_data_spec(loaded: LoadedRecipe, registries: Registries, folder: Path) -> DataSpec:
    """From what is known of a built-in data set, with synthetic balanced labels; any other is read."""
    data = loaded.recipe.data
    built_in = registries.datasets[data.dataset] is DATASETS.get(data.dataset)
    info = lookup_dataset_info(data.dataset, data.settings) if built_in else None
    if info is None:
        return data_spec_of(read_data(loaded, registries, folder))
    prepare = registries.preparations[data.preparation or info.preparation]
    prepare = _fit_preparation(loaded, prepare, info.shape, info.tokens is not None)
    dtype = torch.int64 if info.tokens is not None else getattr(torch, info.dtype)
    prepared = prepare(torch.zeros(1, *info.shape, dtype=dtype))
    held_out = len(draw_validation_rows(loaded, info.train))
    info = replace(info, train=info.train - held_out, test=held_out) if held_out else info
    labels = synthetic_labels(info, data.test_examples)
    own = TASKS["masked_language_modeling"] if info.label_per_token else CLASSIFICATION
    task = registries.tasks[loaded.recipe.task.kind] if loaded.recipe.task.kind else own
    if not task.is_compatible(own):
        targets = "a label for every token" if info.label_per_token else "one label for every example"
        raise task_error(loaded, f"{data.dataset} has {targets}", own)
    target_shape, shape = info.shape if info.label_per_token else (), tuple(prepared.shape[1:])
    return DataSpec(shape, info.shape, labels, info.tokens, prepare, dtype, task, target_shape)


def data_spec_of(dataset: Dataset) -> DataSpec:
    stored = tuple(dataset.train.x.shape[1:])
    labels, preparation = extract_labels(dataset), dataset.preparation
    return DataSpec(
        dataset.input_shape, stored, labels, dataset.tokens, preparation, dataset.train.x.dtype, dataset.task,
        dataset.target_shape,
    )  # fmt: skip


def read_public_examples(loaded: LoadedRecipe, registries: Registries, folder: Path, dataset: Dataset) -> Tensor | None:
    """The server's unlabeled examples as they are stored; None if the recipe gives it none."""
    part = loaded.recipe.data.public
    if part is None:
        return None
    match part.source:
        case "holdout":
            return dataset.train.x[torch.from_numpy(draw_server_rows(loaded, len(dataset.train)))]
        case "train_pool":
            return dataset.train.x
        case "dataset":
            public = read_data(_with_public_dataset(loaded), registries, folder)
            _check_same_form(loaded, data_spec_of(public), data_spec_of(dataset))
            return public.train.x[: part.examples]


def check_public_data(loaded: LoadedRecipe, registries: Registries, folder: Path, data_spec: DataSpec) -> None:
    """Raise if the server's examples come from a data set whose examples are not like those of the devices."""
    part = loaded.recipe.data.public
    if part is None or part.source != "dataset":
        return
    try:
        public = read_data_spec(_with_public_dataset(loaded), registries, folder)
    except DataError as error:
        code = "DATA_MISSING" if isinstance(error, DataMissing) else "DATA_BROKEN"
        issue = RecipeIssue(("data", "public", "dataset"), code, error.message, error.hint)
        raise loaded.error(issue) from error
    _check_same_form(loaded, public, data_spec)


def _with_public_dataset(loaded: LoadedRecipe) -> LoadedRecipe:
    """The same recipe with the public data set as its own."""
    part = loaded.recipe.data.public
    assert part is not None
    return loaded.with_document({**loaded.recipe.document(), "data": {"dataset": part.dataset}})


def _check_same_form(loaded: LoadedRecipe, public: DataSpec, local: DataSpec) -> None:
    forms = [
        f"shape {spec.stored_shape} and type {str(spec.stored_dtype).removeprefix('torch.')}"
        for spec in (public, local)
    ]
    if forms[0] != forms[1]:
        message = f"its examples have {forms[0]}, the devices' have {forms[1]}"
        raise loaded.error(RecipeIssue(("data", "public", "dataset"), "RECIPE_VALUE", message))


def draw_server_rows(loaded: LoadedRecipe, examples: int) -> np.ndarray:
    """Indices of the training examples that the server holds and no device gets."""
    part = loaded.recipe.data.public
    count = part.examples if part is not None and part.source == "holdout" else 0
    if count >= examples:
        message = f"there are only {examples} training examples in all"
        raise loaded.error(RecipeIssue(("data", "public", "examples"), "RECIPE_VALUE", message, value=count))
    return hold_out(examples, count, generator(loaded.recipe.seed, PUBLIC))


def devices_own_data(loaded: LoadedRecipe) -> bool:
    """Whether devices bring their own data, unknown to the server."""
    return bool(loaded.recipe.data.partition["kind"] == "own")


def check_number_of_devices(loaded: LoadedRecipe, labels: Labels) -> None:
    """Raise if there are more devices than training examples to split between them."""
    devices = loaded.recipe.data.devices
    if not devices_own_data(loaded) and devices > len(labels.train):
        message = f"there are only {len(labels.train)} training examples for {pluralize(devices, 'device')}"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", message, value=devices))


def build_partition(loaded: LoadedRecipe, registries: Registries, labels: Labels) -> Partition:
    data, seed = loaded.recipe.data, loaded.recipe.seed
    if devices_own_data(loaded) and loaded.recipe.engine.kind != "flower":
        message, hint = "only real devices have data of their own", 'engine.kind = "flower", or another partition'
        raise loaded.error(RecipeIssue(("data", "partition"), "DEPLOYMENT", message, hint))
    check_number_of_devices(loaded, labels)
    if data.tier_label_correlation and labels.train.ndim > 1:
        message = "it sorts devices by label, and the examples of this data set have several labels each"
        raise loaded.error(RecipeIssue(("data", "tier_label_correlation"), "RECIPE_VALUE", message, "leave it out"))
    try:
        partition = _draw_partition(loaded, registries, labels)
    except ValueError as error:
        raise loaded.error(RecipeIssue(("data", "partition"), "RECIPE_VALUE", str(error))) from error
    except DataError as error:
        code = "FILE_MISSING" if isinstance(error, DataMissing) else "DATA_BROKEN"
        raise loaded.error(RecipeIssue(("data", "partition"), code, error.message, error.hint)) from error
    if len(partition.train) != data.devices:
        message = f"the partition is for {pluralize(len(partition.train), 'device')}, the recipe has {data.devices}"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", message, value=data.devices))
    partition = limit_examples(partition, data.max_examples, generator(seed, MAX_EXAMPLES))
    if data.subsample:
        partition = subsample(partition, data.subsample.devices, data.subsample.keep, generator(seed, SUBSAMPLE))
    draw = generator(seed, TIER_LABEL_CORRELATION)
    try:
        return correlate_tiers_with_labels(partition, labels, data.tier_label_correlation, draw)
    except ValueError as error:
        key = ("data", "tier_label_correlation")
        raise loaded.error(RecipeIssue(key, "RECIPE_VALUE", str(error), value=data.tier_label_correlation)) from error


def _draw_partition(loaded: LoadedRecipe, registries: Registries, labels: Labels) -> Partition:
    """Partition the examples that the server does not hold; a partition from a file must leave those out itself."""
    data, draw = loaded.recipe.data, generator(loaded.recipe.seed, PARTITION)
    split, reserved = instantiate(registries.partitions, data.partition), draw_server_rows(loaded, len(labels.train))
    if not len(reserved):
        partition: Partition = split(labels, data.devices, draw)
        return partition
    if data.partition["kind"] == "file":
        partition = split(labels, data.devices, draw)
        if any(np.isin(rows, reserved).any() for rows in partition.train):
            raise ValueError("the partition gives devices examples that data.public holds out for the server")
        return partition
    left = np.delete(np.arange(len(labels.train)), reserved)
    partition = split(labels.select_train(left), data.devices, draw)
    return Partition(tuple(left[rows] for rows in partition.train), partition.test)

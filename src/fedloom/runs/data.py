"""A recipe's data: reading it, its shape without reading it, and the partition among devices."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import (
    CLASSIFICATION,
    DATASETS,
    PREPARATIONS,
    TASKS,
    DataBroken,
    Dataset,
    Labels,
    LearningTask,
    Partition,
    Preparation,
    correlate_tiers_with_labels,
    describe_deviation,
    extract_labels,
    hold_out,
    limit_examples,
    lookup_dataset_info,
    subsample,
    synthetic_labels,
)
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.validation import instantiate
from ..seeds import MAX_EXAMPLES, PARTITION, PUBLIC, SUBSAMPLE, TIER_LABEL_CORRELATION, VALIDATION, generator


def read_data(loaded: LoadedRecipe, registries: Registries, folder: Path) -> Dataset:
    data = loaded.recipe.data
    reader = registries.datasets[data.dataset]
    where = {"folder": folder} if "folder" in inspect.signature(reader).parameters else {}
    dataset = _note_deviation(reader(**where, **data.settings), loaded, registries)
    if data.validation is not None:
        dataset = dataset.with_validation_split(torch.from_numpy(draw_validation_rows(loaded, len(dataset.train))))
    if data.test_examples is not None:
        dataset = dataset.limit_test_examples(data.test_examples)
    if data.preparation:
        dataset = replace(dataset, preparation=registries.preparations[data.preparation])
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


def _note_deviation(dataset: Dataset, loaded: LoadedRecipe, registries: Registries) -> Dataset:
    """A built-in data set whose files are cut or changed says so."""
    data = loaded.recipe.data
    if registries.datasets[data.dataset] is not DATASETS.get(data.dataset):
        return dataset
    counts = len(dataset.train), len(dataset.test), dataset.classes
    return replace(dataset, deviation=describe_deviation(data.dataset, data.settings, *counts))


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
    prepared = prepare(torch.zeros(1, *info.shape, dtype=torch.uint8 if info.tokens is None else torch.int64))
    held_out = len(draw_validation_rows(loaded, info.train))
    info = replace(info, train=info.train - held_out, test=held_out) if held_out else info
    labels = synthetic_labels(info, data.test_examples)
    own = TASKS["masked_language_modeling"] if info.label_per_token else CLASSIFICATION
    task = registries.tasks[loaded.recipe.task.kind] if loaded.recipe.task.kind else own
    if not task.is_compatible(own):
        targets = "a label for every token" if info.label_per_token else "one label for every example"
        raise task_error(loaded, f"{data.dataset} has {targets}", own)
    target_shape = info.shape if info.label_per_token else ()
    return DataSpec(tuple(prepared.shape[1:]), info.shape, labels, info.tokens, prepare, task, target_shape)


def data_spec_of(dataset: Dataset) -> DataSpec:
    stored = tuple(dataset.train.x.shape[1:])
    return DataSpec(
        dataset.input_shape, stored, extract_labels(dataset), dataset.tokens, dataset.preparation, dataset.task,
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
            other = loaded.with_document({**loaded.recipe.document(), "data": {"dataset": part.dataset}})
            examples = read_data(other, registries, folder).train.x
            return _check_same_shape(loaded, examples, dataset.train.x)[: part.examples]


def _check_same_shape(loaded: LoadedRecipe, public: Tensor, local: Tensor) -> Tensor:
    if public.shape[1:] == local.shape[1:] and public.dtype == local.dtype:
        return public
    message = f"its examples have shape {tuple(public.shape[1:])}, the devices' have {tuple(local.shape[1:])}"
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


def build_partition(loaded: LoadedRecipe, registries: Registries, labels: Labels) -> Partition:
    data, seed = loaded.recipe.data, loaded.recipe.seed
    if devices_own_data(loaded) and loaded.recipe.engine.kind != "flower":
        message, hint = "only real devices have data of their own", 'engine.kind = "flower", or another partition'
        raise loaded.error(RecipeIssue(("data", "partition"), "DEPLOYMENT", message, hint))
    if not devices_own_data(loaded) and data.devices > len(labels.train):
        message = f"there are only {len(labels.train)} training examples for {data.devices} devices"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", message, value=data.devices))
    try:
        partition = _draw_partition(loaded, registries, labels)
    except ValueError as error:
        raise loaded.error(RecipeIssue(("data", "partition"), "RECIPE_VALUE", str(error))) from error
    if len(partition.train) != data.devices:
        message = f"the partition is for {len(partition.train)} devices, the recipe has {data.devices}"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", message, value=data.devices))
    partition = limit_examples(partition, data.max_examples, generator(seed, MAX_EXAMPLES))
    if data.subsample:
        partition = subsample(partition, data.subsample.devices, data.subsample.keep, generator(seed, SUBSAMPLE))
    return correlate_tiers_with_labels(
        partition, labels, data.tier_label_correlation, generator(seed, TIER_LABEL_CORRELATION)
    )


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

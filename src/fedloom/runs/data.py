"""A recipe's data: what is read, what can be told without reading, and who holds which examples."""

import inspect
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data import (
    DATASETS,
    PARTITIONS,
    PREPARATIONS,
    Dataset,
    Labels,
    Partition,
    Preparation,
    correlate_tiers_with_labels,
    extract_labels,
    hold_out,
    limit_examples,
    lookup_dataset_info,
    subsample,
    synthetic_labels,
)
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.validation import instantiate
from ..seeds import MAX_EXAMPLES, PARTITION, PUBLIC, SUBSAMPLE, TIER_LABEL_CORRELATION, VALIDATION, generator


def read_data(loaded: LoadedRecipe, registry: Registry, folder: Path) -> Dataset:
    data = loaded.recipe.data
    reader = registry.datasets[data.dataset]
    place = {"folder": folder} if "folder" in inspect.signature(reader).parameters else {}
    dataset = reader(**place, **data.settings)
    if data.validation is not None:
        dataset = dataset.with_validation_split(torch.from_numpy(draw_validation_rows(loaded, len(dataset.train))))
    if data.test_examples is not None:
        dataset = dataset.limit_test_examples(data.test_examples)
    return replace(dataset, preparation=PREPARATIONS[data.preparation]) if data.preparation else dataset


def draw_validation_rows(loaded: LoadedRecipe, examples: int) -> np.ndarray:
    """The same for every seed: what is chosen by them must be chosen for all seeds."""
    count = loaded.recipe.data.validation or 0
    if count >= examples:
        said = f"there are only {examples} training examples in all"
        raise loaded.error(RecipeIssue(("data", "validation"), "RECIPE_VALUE", said, value=count))
    return hold_out(examples, count, generator(0, VALIDATION))


@dataclass(frozen=True)
class DataSpec:
    """A recipe's data as far as models and partitions can tell."""

    input_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    labels: Labels
    tokens: int | None = None
    preparation: Preparation = PREPARATIONS["plain"]


def read_data_spec(loaded: LoadedRecipe, registry: Registry, folder: Path) -> DataSpec:
    """From what is known of the data set, with made-up balanced labels; of an unknown set from its files."""
    data = loaded.recipe.data
    ours = registry.datasets[data.dataset] is DATASETS.get(data.dataset)
    info = lookup_dataset_info(data.dataset, data.settings) if ours else None
    if info is None:
        return data_spec_of(read_data(loaded, registry, folder))
    prepare = PREPARATIONS[data.preparation or info.preparation]
    made_up = prepare(torch.zeros(1, *info.shape, dtype=torch.uint8 if info.tokens is None else torch.int64))
    held = len(draw_validation_rows(loaded, info.train))
    info = replace(info, train=info.train - held, test=held) if held else info
    labels = synthetic_labels(info, data.test_examples)
    return DataSpec(tuple(made_up.shape[1:]), info.shape, labels, info.tokens, prepare)


def data_spec_of(dataset: Dataset) -> DataSpec:
    stored = tuple(dataset.train.x.shape[1:])
    return DataSpec(dataset.input_shape, stored, extract_labels(dataset), dataset.tokens, dataset.preparation)


def read_public_examples(loaded: LoadedRecipe, registry: Registry, folder: Path, dataset: Dataset) -> Tensor | None:
    """What the server has, as it is stored; None if the recipe gives it nothing."""
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
            return _alike(loaded, read_data(other, registry, folder).train.x, dataset.train.x)[: part.examples]


def _alike(loaded: LoadedRecipe, public: Tensor, own: Tensor) -> Tensor:
    if public.shape[1:] == own.shape[1:] and public.dtype == own.dtype:
        return public
    said = f"its examples are of shape {tuple(public.shape[1:])}, the devices' of {tuple(own.shape[1:])}"
    raise loaded.error(RecipeIssue(("data", "public", "dataset"), "RECIPE_VALUE", said))


def draw_server_rows(loaded: LoadedRecipe, examples: int) -> np.ndarray:
    """The training examples that no device gets, because the server has them."""
    part = loaded.recipe.data.public
    count = part.examples if part is not None and part.source == "holdout" else 0
    if count >= examples:
        said = f"there are only {examples} training examples in all"
        raise loaded.error(RecipeIssue(("data", "public", "examples"), "RECIPE_VALUE", said, value=count))
    return hold_out(examples, count, generator(loaded.recipe.seed, PUBLIC))


def devices_own_data(loaded: LoadedRecipe) -> bool:
    """Whether devices have data that the server knows nothing of."""
    return bool(loaded.recipe.data.partition["kind"] == "own")


def build_partition(loaded: LoadedRecipe, labels: Labels) -> Partition:
    data, seed = loaded.recipe.data, loaded.recipe.seed
    if devices_own_data(loaded) and loaded.recipe.engine.kind != "flower":
        said, hint = "only real devices have data of their own", 'engine.kind = "flower", or another partition'
        raise loaded.error(RecipeIssue(("data", "partition"), "DEPLOYMENT", said, hint))
    if not devices_own_data(loaded) and data.devices > len(labels.train):
        said = f"there are only {len(labels.train)} training examples for {data.devices} devices"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", said, value=data.devices))
    try:
        made = _partition(loaded, labels)
    except ValueError as error:
        raise loaded.error(RecipeIssue(("data", "partition"), "RECIPE_VALUE", str(error))) from error
    if len(made.train) != data.devices:
        said = f"the partition is for {len(made.train)} devices, the recipe has {data.devices}"
        raise loaded.error(RecipeIssue(("data", "devices"), "RECIPE_VALUE", said, value=data.devices))
    made = limit_examples(made, data.max_examples, generator(seed, MAX_EXAMPLES))
    if data.subsample:
        made = subsample(made, data.subsample.devices, data.subsample.keep, generator(seed, SUBSAMPLE))
    return correlate_tiers_with_labels(
        made, labels, data.tier_label_correlation, generator(seed, TIER_LABEL_CORRELATION)
    )


def _partition(loaded: LoadedRecipe, labels: Labels) -> Partition:
    """Of what the server leaves; a map from a file must do so by itself."""
    data, draw = loaded.recipe.data, generator(loaded.recipe.seed, PARTITION)
    cut, kept_back = instantiate(PARTITIONS, data.partition), draw_server_rows(loaded, len(labels.train))
    if not len(kept_back):
        made: Partition = cut(labels, data.devices, draw)
        return made
    if data.partition["kind"] == "file":
        made = cut(labels, data.devices, draw)
        if any(np.isin(rows, kept_back).any() for rows in made.train):
            raise ValueError("the partition gives devices examples that data.public holds out for the server")
        return made
    left = np.delete(np.arange(len(labels.train)), kept_back)
    made = cut(labels.select_train(left), data.devices, draw)
    return Partition(tuple(left[rows] for rows in made.train), made.test)

"""What a data set says is learned from it: by its targets, or by the task that it is given."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.data import (
    DATASETS,
    IGNORED,
    PARTITIONS,
    TASKS,
    DataBroken,
    Dataset,
    Examples,
    as_dataset,
    extract_labels,
)
from fedloom.data.preparation import Preparation
from fedloom.testing import check_dataset

IMAGES, TOKENS, NUMBERS = torch.zeros(6, 1, 4, 4), torch.zeros(6, 5, dtype=torch.int64), torch.zeros(6, 3)


def made(x: torch.Tensor, y: torch.Tensor, classes: int, **settings: Any) -> Dataset:
    examples = Examples(x, y)
    return Dataset("toy", examples, examples, classes, Preparation(), **settings)


FLAGS = torch.tensor([[0, 1, 1], [1, 0, 0]] * 3)
PIXELS = torch.arange(6 * 16).view(6, 4, 4) % 3


@pytest.mark.parametrize(
    ("x", "y", "classes", "kind"),
    [
        (NUMBERS, torch.arange(6) % 2, 2, "classification"),
        (NUMBERS, FLAGS.bool(), 3, "multi_label"),
        (NUMBERS, FLAGS.float(), 3, "multi_label"),
        (NUMBERS, torch.arange(6.0), 1, "regression"),
        (NUMBERS, torch.arange(12.0).view(6, 2), 2, "regression"),
        (IMAGES, PIXELS, 3, "segmentation"),
        (TOKENS, TOKENS, 2, "causal_language_modeling"),
    ],
)
def test_dataset_without_task_infers_it_from_its_targets(
    x: torch.Tensor, y: torch.Tensor, classes: int, kind: str
) -> None:
    dataset = made(x, y, classes)
    assert dataset.task is TASKS[kind]
    assert dataset.train.y.dtype == dataset.task.dtype


def test_dataset_that_masks_tokens_is_masked_language_modeling() -> None:
    examples = Examples(TOKENS, TOKENS)
    dataset = Dataset("toy", examples, examples, 2, Preparation(mask_token=1), tokens=2)
    assert dataset.task.kind == "masked_language_modeling"
    assert dataset.target_shape == (5,)


@pytest.mark.parametrize(
    ("x", "y", "classes", "kind", "reason"),
    [
        (NUMBERS, torch.arange(6), 6, "regression", "type torch.int64"),
        (NUMBERS, torch.arange(6.0), 2, "regression", "shape"),
        (NUMBERS, torch.full((6,), torch.nan), 1, "regression", "not finite"),
        (NUMBERS, 2 * FLAGS.float(), 3, "multi_label", "other than 0 and 1"),
        (NUMBERS, FLAGS.float(), 2, "multi_label", "shape"),
        (IMAGES, torch.arange(6) % 2, 2, "segmentation", "shape"),
        (IMAGES, PIXELS, 2, "segmentation", "labels from 0 to 2"),
        (NUMBERS, torch.arange(6.0), 1, "classification", "type torch.float32"),
    ],
)
def test_dataset_with_targets_of_another_task_is_refused(
    x: torch.Tensor, y: torch.Tensor, classes: int, kind: str, reason: str
) -> None:
    with pytest.raises(DataBroken, match=reason):
        made(x, y, classes, task=TASKS[kind])


def test_dataset_ignored_pixels_are_no_labels() -> None:
    some = PIXELS.clone()
    some[0, 0, 0] = IGNORED
    assert made(IMAGES, some, 3).task.kind == "segmentation"
    with pytest.raises(DataBroken, match="labels from -100"):
        made(NUMBERS, torch.tensor([0, 1, IGNORED, 0, 1, 0]), 2)


@pytest.mark.parametrize("kind", ["label_shards", "sorted_shards", "dirichlet", "dirichlet_per_device"])
@pytest.mark.parametrize("name", ["diabetes", "digits-multilabel", "digits-segmentation"])
def test_partition_by_label_without_class_labels_is_refused_with_a_hint(kind: str, name: str) -> None:
    labels = extract_labels(DATASETS[name]())
    settings = {"label_shards": {"labels_per_device": 2}, "sorted_shards": {"shards_per_device": 2}}
    with pytest.raises(ValueError, match='needs one label per example; use "iid"'):
        PARTITIONS[kind](labels, 5, np.random.default_rng(0), **settings.get(kind, {"alpha": 0.5}))


@pytest.mark.parametrize("name", ["diabetes", "digits-multilabel", "digits-segmentation"])
def test_partition_without_labels_divides_any_targets(name: str) -> None:
    labels = extract_labels(DATASETS[name]())
    for partition in (
        PARTITIONS["iid"](labels, 5, np.random.default_rng(0)),
        PARTITIONS["quantity"](labels, 5, np.random.default_rng(0), alpha=1.0),
    ):
        train, test = (np.concatenate(rows) for rows in (partition.train, partition.test))
        assert len(set(train.tolist())) == len(train) > 0
        assert len(set(test.tolist())) == len(test) > 0


def test_diabetes_is_standardized_and_grouped_by_decade_of_age() -> None:
    dataset = DATASETS["diabetes"]()
    assert (len(dataset.train), len(dataset.test), dataset.classes) == (354, 88, 1)
    torch.testing.assert_close(dataset.train.x.mean(0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(dataset.train.y.std(correction=0), torch.ones(()), atol=1e-5, rtol=0)
    assert dataset.groups is not None
    assert set(dataset.groups[0].tolist()) == set(range(1, 8))


def test_digit_canvases_masks_and_labels_agree() -> None:
    masks, labels = DATASETS["digits-segmentation"](), DATASETS["digits-multilabel"]()
    assert torch.equal(masks.train.x, labels.train.x)
    for label in range(10):
        in_mask = (masks.test.y == label + 1).flatten(1).any(1)
        assert torch.equal(in_mask, labels.test.y[:, label].bool())
    digits = labels.train.y.sum(1)
    assert set(digits.tolist()) == {1.0, 2.0}
    assert bool((masks.train.x[:, 0][masks.train.y > 0] >= 64).all())


def test_digit_canvases_with_fewer_kinds_have_fewer_classes() -> None:
    assert DATASETS["digits-segmentation"](kinds=3).classes == 4
    assert DATASETS["digits-multilabel"](kinds=3).train.y.shape[1] == 3


@pytest.mark.parametrize("name", ["diabetes", "digits-multilabel", "digits-segmentation"])
def test_bundled_dataset_keeps_the_contract(name: str) -> None:
    assert "check_dataset_trains" in check_dataset(DATASETS[name]).passed


def test_dataset_task_survives_changes_of_its_examples() -> None:
    dataset = DATASETS["diabetes"]()
    assert dataset.limit_test_examples(5).task is dataset.task
    assert replace(dataset, name="other").task is dataset.task


def test_as_dataset_takes_targets_of_the_named_task() -> None:
    x, draw = np.zeros((10, 1, 4, 4), np.uint8), np.random.default_rng(0)
    numbers = as_dataset((x, draw.normal(size=10)), task="regression")
    several = as_dataset((x, draw.normal(size=(10, 3))), task="regression")
    labels = as_dataset((x, draw.random((10, 5)) < 0.5), task="multi_label")
    pixels = as_dataset((x, np.arange(160).reshape(10, 4, 4) % 3), task=TASKS["segmentation"])
    made = (numbers, several, labels, pixels)
    assert [one.classes for one in made] == [1, 3, 5, 3]
    assert [one.task.kind for one in made] == ["regression", "regression", "multi_label", "segmentation"]
    assert [one.train.y.dtype for one in made] == [torch.float32] * 3 + [torch.int64]


def test_as_dataset_of_numbers_without_a_task_names_regression() -> None:
    with pytest.raises(DataBroken, match="task = 'regression'"):
        as_dataset((np.zeros((10, 3)), np.linspace(0.1, 0.9, 10)))


def test_as_dataset_of_an_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(DataBroken, match=r"no task 'ranking'.*classification"):
        as_dataset((np.zeros((10, 3)), np.arange(10)), task="ranking")

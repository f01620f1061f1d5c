"""A known data set whose counts or content are not the published ones says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedloom.data import DATASET_INFO, DATASETS, Dataset, Examples, describe_deviation, lookup_dataset_info
from fedloom.data.catalog import CONTENTS


@pytest.mark.parametrize("name", DATASET_INFO)
def test_describe_deviation_published_counts_are_not_mentioned(name: str) -> None:
    info = DATASET_INFO[name]
    assert describe_deviation(name, {}, info.train, info.test, info.classes) == ""


def deviation_of(name: str, dataset: Dataset) -> str:
    counts = len(dataset.train), len(dataset.test), dataset.classes
    return describe_deviation(name, {}, *counts, dataset.fingerprint)


@pytest.mark.parametrize("name", ["digits", "fashion-mini"])
def test_describe_deviation_bundled_sets_are_as_listed(name: str) -> None:
    assert deviation_of(name, DATASETS[name]()) == ""


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "pneumoniamnist"])
def test_describe_deviation_published_files_are_as_listed(name: str, real_folder: Path) -> None:
    assert name in CONTENTS
    assert deviation_of(name, DATASETS[name](folder=real_folder)) == ""


@pytest.mark.parametrize("change", ["pixel", "label", "order", "test"])
def test_describe_deviation_names_other_content_of_published_counts(change: str) -> None:
    dataset = DATASETS["digits"]()
    x, y, test_x = (tensor.clone() for tensor in (dataset.train.x, dataset.train.y, dataset.test.x))
    if change == "pixel":
        x[700, 0, 4, 4] ^= 1
    elif change == "label":
        y[700] = (y[700] + 1) % 10
    elif change == "order":
        x, y = x.flip(0), y.flip(0)
    else:
        test_x[5, 0, 4, 4] ^= 1
    other = replace(dataset, train=Examples(x, y), test=Examples(test_x, dataset.test.y))
    words = "as many examples, but other ones, other labels or another order"
    assert deviation_of("digits", other) == f"not digits as published: {words}"


def test_describe_deviation_redivided_set_is_known_by_its_counts_only() -> None:
    found = describe_deviation("mnist", {"test_share": 0.5}, 35_000, 35_000, 10, lambda: "another")
    assert found == ""


@pytest.mark.parametrize(
    ("name", "settings", "counts", "words"),
    [
        ("mnist", {}, (59_999, 10_000, 10), "59,999 training examples instead of 60,000"),
        ("mnist", {}, (60_000, 100, 10), "100 test examples instead of 10,000"),
        (
            "wikitext2",
            {"published": True},
            (8_600, 3_830, 36_609),
            "8,600 training examples instead of 32,600, 36,609 classes instead of 33,279",
        ),
        ("cifar100", {"labels": "coarse"}, (50_000, 10_000, 100), "100 classes instead of 20"),
        ("sentiment140", {}, (900, 100, 2), "1,000 examples instead of 1,600,359"),
    ],
)
def test_describe_deviation_names_every_other_count(
    name: str, settings: dict[str, Any], counts: tuple[int, int, int], words: str
) -> None:
    assert describe_deviation(name, settings, *counts) == f"not {name} as published: {words}"


def test_describe_deviation_moved_tweets_are_not_missing() -> None:
    assert describe_deviation("sentiment140", {"test_share": 0.2}, 1_280_000, 320_359, 2) == ""


def test_describe_deviation_unknown_set_has_none() -> None:
    assert describe_deviation("npz", {"file": "x"}, 3, 2, 2) == ""


def test_lookup_dataset_info_test_share_divides_all_examples() -> None:
    info = lookup_dataset_info("fashion-mnist", {"test_share": 0.25})
    assert info is not None and (info.train, info.test) == (52_500, 17_500)
    assert describe_deviation("fashion-mnist", {"test_share": 0.25}, 52_500, 17_500, 10) == ""
    assert "69,999 examples instead of 70,000" in describe_deviation("mnist", {"test_share": 0.5}, 35_000, 34_999, 10)

"""The registries of data sets, partitions and preparations: names and recipe parameters."""

import inspect

import pytest

from fedloom.data import DATASETS, PARTITIONS, PREPARATIONS


def test_registries_have_expected_names():
    assert set(DATASETS) >= {
        "digits",
        "fashion-mini",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "pathmnist",
        "wikitext2",
        "sentiment140",
        "npz",
    }
    assert list(PARTITIONS) == [
        "iid",
        "label_shards",
        "pathological",
        "sorted_shards",
        "dirichlet",
        "dirichlet_per_device",
        "quantity",
        "rows",
        "natural",
        "file",
        "own",
    ]
    assert "plain" in PREPARATIONS


@pytest.mark.parametrize("name", DATASETS)
def test_readers_take_only_keywords(name):
    parameters = inspect.signature(DATASETS[name]).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_take_labels_devices_generator_and_keywords(name):
    parameters = list(inspect.signature(PARTITIONS[name]).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["labels", "devices", "generator"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[3:])

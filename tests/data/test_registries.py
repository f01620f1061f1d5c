"""The registries of data sets, partitions and preparations: names and recipe parameters."""

import inspect
import re
from pathlib import Path

import pytest

from fedloom.data import DATASETS, PARTITIONS, PREPARATIONS

ROOT = Path(__file__).parents[2]


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
        "sorted_shards",
        "dirichlet_per_label",
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


def test_dataset_guide_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    guide = (ROOT / "docs" / "add_a_dataset.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "add_a_dataset.md", "exec"), {"__name__": "guide"})
    for name in (*DATASETS, *PARTITIONS):
        assert f"`{name}`" in guide or f'"{name}"' in guide
    for name, partition in PARTITIONS.items():
        for option in list(inspect.signature(partition).parameters)[3:]:
            assert option in guide, f"{option} of {name} is not in the guide"

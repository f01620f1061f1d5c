"""Downloads happen only if enabled; with a fake `datasets` package."""

import sys
from types import ModuleType

import numpy as np
import pytest

from fedloom.data import DATASETS, DataBroken, DataMissing
from fedloom.data.adapters import HUB_NAMES


class Split(dict):
    column_names = property(lambda self: list(self))


def library(image_column="image", channels=1, **labels):
    shape = (3, 28, 28) if channels == 1 else (3, 32, 32, channels)
    images = list(np.arange(np.prod(shape)).reshape(shape).astype(np.uint8))
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {part: Split({image_column: images, **labels}) for part in ("train", "test")}

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    return module, asked


@pytest.fixture
def allowed(monkeypatch):
    monkeypatch.setenv("FEDLOOM_DOWNLOAD", "1")


def install(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("name", "column", "channels", "labels", "hub"),
    [
        ("mnist", "image", 1, {"label": [0, 9, 1]}, ("ylecun/mnist",)),
        ("fashion-mnist", "image", 1, {"label": [0, 9, 1]}, ("zalando-datasets/fashion_mnist",)),
        ("cifar10", "img", 3, {"label": [0, 9, 1]}, ("uoft-cs/cifar10",)),
        ("cifar100", "img", 3, {"coarse_label": [1, 2, 3], "fine_label": [0, 9, 1]}, ("uoft-cs/cifar100",)),
        ("pathmnist", "image", 3, {"label": [[0], [8], [1]]}, ("jafermarq/pathmnist", "28")),
    ],
)
def test_download_missing_set_is_downloaded(monkeypatch, tmp_path, allowed, name, column, channels, labels, hub):
    module, asked = library(column, channels, **labels)
    install(monkeypatch, module)
    data = DATASETS[name](folder=tmp_path)
    assert asked == [hub] and data.name == name
    assert data.train.y[0] == 0 and data.train.y[2] == 1 and data.train.x.shape[1] == channels


def test_download_cifar100_coarse_labels_are_used(monkeypatch, tmp_path, allowed):
    module, _ = library("img", 3, coarse_label=[1, 2, 3], fine_label=[0, 9, 1])
    install(monkeypatch, module)
    assert DATASETS["cifar100"](folder=tmp_path, labels="coarse").train.y.tolist() == [1, 2, 3]


@pytest.mark.parametrize("name", HUB_NAMES)
@pytest.mark.parametrize("setting", [None, "0", ""])
def test_download_not_enabled_raises(monkeypatch, tmp_path, name, setting):
    module, asked = library(label=[0, 1, 2])
    install(monkeypatch, module)
    if setting is not None:
        monkeypatch.setenv("FEDLOOM_DOWNLOAD", setting)
    with pytest.raises(DataMissing, match="FEDLOOM_DOWNLOAD=1"):
        DATASETS[name](folder=tmp_path)
    assert asked == []


def test_download_without_package_raises(monkeypatch, tmp_path, allowed):
    install(monkeypatch, None)
    with pytest.raises(DataMissing, match=r"needs fedloom\[hf\]"):
        DATASETS["mnist"](folder=tmp_path)


def test_download_without_network_raises(monkeypatch, tmp_path, allowed):
    module, _ = library(label=[0, 1, 2])

    def load_dataset(*names):
        raise ConnectionError("no route")

    module.load_dataset = load_dataset
    install(monkeypatch, module)
    with pytest.raises(DataMissing, match="no route") as caught:
        DATASETS["cifar10"](folder=tmp_path)
    assert "FEDLOOM_DATA" in caught.value.hint


def test_download_unknown_columns_raise(monkeypatch, tmp_path, allowed):
    module, _ = library(target=[0, 1, 2])
    install(monkeypatch, module)
    with pytest.raises(DataBroken, match="image, target"):
        DATASETS["mnist"](folder=tmp_path)


def test_download_set_not_on_hub_raises(tmp_path, allowed):
    with pytest.raises(DataMissing):
        DATASETS["pneumoniamnist"](folder=tmp_path)

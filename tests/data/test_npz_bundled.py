"""The bundled data sets: their content is pinned, and the scripts reproduce them."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom.data
from fedloom.data import DATASETS

BUNDLED = Path(fedloom.data.__file__).parent / "bundled"
SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same_arrays(left, right):
    with np.load(left, allow_pickle=False) as one, np.load(right, allow_pickle=False) as other:
        return one.files == other.files and all(np.array_equal(one[name], other[name]) for name in one.files)


def test_fashion_mini_content_is_pinned():
    data = DATASETS["fashion-mini"]()
    assert data.input_shape == (1, 28, 28) and data.train.x.dtype == torch.uint8 and data.classes == 10
    assert data.train.y.bincount().tolist() == [200] * 10 and data.test.y.bincount().tolist() == [50] * 10
    assert data.fingerprint() == "44bf2fd19a9192c8d69f6decfe578f94d61432246d16a3afb6538f5af8a85249"


def test_digits_content_is_pinned():
    data = DATASETS["digits"]()
    assert data.input_shape == (1, 8, 8) and (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.x.min() == 0 and data.train.x.max() == 255
    shares = data.test.y.bincount() / (data.train.y.bincount() + data.test.y.bincount())
    assert (shares - 360 / 1797).abs().max() < 0.5 / 174 + 1e-3
    assert data.fingerprint() == "c8958ba3623bb2a242faae71248836ffd83fe1b8b7df1d5e0ee22a573aa3c04d"


def test_bundled_sets_have_licenses_and_are_small():
    text = (BUNDLED / "LICENSES.txt").read_text()
    for word in (
        "fashion_mini.npz",
        "Zalando SE",
        "WITHOUT WARRANTY OF ANY KIND",
        "digits.npz",
        "Creative Commons Attribution 4.0",
        "BSD-3-Clause",
    ):
        assert word in text
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) < 1_300_000


def test_digits_script_reproduces_file(tmp_path):
    pytest.importorskip("sklearn")
    script("cut_digits").main(tmp_path / "digits.npz")
    assert same_arrays(tmp_path / "digits.npz", BUNDLED / "digits.npz")


def test_fashion_mini_script_reproduces_file(tmp_path, real_folder):
    script("cut_fashion_mini").main(real_folder / "fashion-mnist", tmp_path / "cut.npz")
    assert same_arrays(tmp_path / "cut.npz", BUNDLED / "fashion_mini.npz")
    with pytest.raises(SystemExit):
        script("cut_fashion_mini").main(tmp_path)

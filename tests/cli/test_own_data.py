"""What a user's function returns is taken, or refused when the recipe is checked: place, reason and hint."""

import pytest

FUNCTIONS = """
import numpy as np
import torch
from torch.utils.data import TensorDataset

from fedloom.data import Dataset, Examples, Preparation

draw = np.random.default_rng(0)
rows, labels = draw.normal(size=(60, 16)).astype(np.float32), np.arange(60) % 3
series = draw.normal(size=(60, 3, 16)).astype(np.float32)


def made(x=rows, y=labels, preparation=Preparation(), x_test=None, as_tensor=torch.from_numpy):
    y, y_test = as_tensor(y[:40]), as_tensor(y[40:])
    x, x_test = (torch.from_numpy(one) for one in (x[:40], x[40:] if x_test is None else x_test))
    return Dataset("made", Examples(x, y), Examples(x_test, y_test), 3, preparation)


def numpy_labels():
    return made(as_tensor=np.asarray)


def pair():
    return rows, labels


def four():
    return rows[:40], labels[:40], rows[40:], labels[40:]


def torch_dataset():
    return TensorDataset(torch.from_numpy(rows), torch.from_numpy(labels))


def normalized_series():
    return made(series, preparation=Preparation((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)))


def nan():
    x = rows.copy()
    x[[5, 9]] = np.nan
    return made(x)


def other_shape():
    return made(x_test=rows[40:, :9])


def negative_labels():
    return made(y=labels - 1)


def broken_labels():
    return rows, labels + 0.5


def nothing():
    return None


def cropped_series():
    return made(series, preparation=Preparation(crop_padding=2))


def few_means():
    return made(series, preparation=Preparation((0.1, 0.2), (1.0, 2.0)))


DATASETS = {name: value for name, value in globals().items() if callable(value) and value.__module__ == __name__}
"""
RECIPE = """
rounds = 1

[data]
dataset = "{name}"
devices = 4

[model]
family = "{family}"
hidden = [6]

[[tiers]]
name = "all"
share = 1.0

[method]
name = "fedavg"
"""


@pytest.fixture
def recipe(tmp_path):
    def write(name, family="mlp", more=""):
        (tmp_path / "my.py").write_text(FUNCTIONS)
        text = RECIPE.format(name=name, family=family).replace("devices = 4", f"devices = 4\n{more}")
        (tmp_path / "own.toml").write_text(text)
        return ["own.toml", "--with", "my.py"]

    return write


@pytest.mark.parametrize("name", ["numpy_labels", "pair", "four", "torch_dataset"])
def test_run_whatever_a_function_returns_is_taken(recipe, fedloom, name):
    result = fedloom("run", *recipe(name), "--out", "run", "--format", "json")
    assert result.code == 0, result.err
    assert result.data["final"][0]["value"] >= 0


@pytest.mark.parametrize("family", ["mlp", "convnet1d"])
def test_run_normalized_series_are_trained_on(recipe, fedloom, family):
    """With an axis for devices, they have as many axes as images."""
    assert fedloom("check", *recipe("normalized_series", family)).code == 0
    result = fedloom("run", *recipe("normalized_series", family), "--out", "run", "--format", "json")
    assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("nan", "set of made: 32 inputs are not finite (NaN or infinity), the first one is in row 5", "miss"),
        ("other_shape", "made: training and test examples differ in shape, (16,) and (9,)", "same shape"),
        ("negative_labels", "has labels from -1 to 1", "0 to 2"),
        ("broken_labels", "60 labels are not whole numbers, the first one is 0.5 in row 0", "from 0"),
        ("nothing", "no data set can be made of NoneType", "(x, y)"),
        ("cropped_series", "crop_padding of a preparation is for images, and these are time series", "out"),
        ("few_means", "mean and std of a preparation have 2 numbers, and there are 3 channels", "step"),
    ],
)  # fmt: skip
def test_check_broken_data_of_a_function_is_refused(recipe, fedloom, name, message, hint):
    result = fedloom("check", *recipe(name))
    assert result.code == 4
    assert "data.dataset" in result.err and "DATA_BROKEN" in result.err
    assert message in result.err and hint in result.err.partition("hint:")[2]


def test_check_preparation_of_the_recipe_for_images_is_refused_at_its_line(recipe, fedloom):
    result = fedloom("check", *recipe("pair", more='preparation = "crop_flip"'))
    assert result.code == 4
    assert "own.toml:7  data.preparation = 'crop_flip'" in result.err
    assert "crop_padding and flip of a preparation are for images, and these are rows of shape (16,)" in result.err


def test_check_image_family_for_series_names_the_family(recipe, fedloom):
    result = fedloom("check", *recipe("normalized_series", "convnet"))
    assert result.code == 4 and "convnet cannot be built" in result.err
    assert "hint: convnet1d and mlp take time series [channels, length]" in result.err
    result = fedloom("check", *recipe("pair", "convnet1d"))
    assert "it needs time series [channels, length], but an example here has the shape (16,)" in result.err

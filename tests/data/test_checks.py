"""What is wrong with the values of a data set stops a run, and what is suspicious is logged."""

import logging

import numpy as np
import pytest
import torch

from fedloom.data import DataBroken, Dataset, Examples, Preparation, as_dataset, check_values
from fedloom.data.checks import count_shared_rows, find_warnings


def make(x=None, y=None, x_test=None, y_test=None, classes=3, **options):
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(30, 5, generator=draw) if x is None else x
    y = torch.arange(30) % 3 if y is None else y
    x_test = torch.rand(12, 5, generator=draw) if x_test is None else x_test
    y_test = torch.arange(12) % 3 if y_test is None else y_test
    return Dataset("made", Examples(x, y), Examples(x_test, y_test), classes, Preparation(), **options)


def warnings_of(**changes):
    data = make(**changes)
    check_values(data)
    return list(find_warnings(data))


def test_check_values_of_good_data_is_silent(caplog):
    with caplog.at_level(logging.INFO):
        check_values(make())
    assert caplog.text == ""


def spoiled(value, row):
    x = torch.rand(30, 5)
    x[row, 2], x[row + 3, 1] = value, value
    return x


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_check_values_not_finite_is_counted_and_located(value):
    with pytest.raises(DataBroken, match=r"training set of made: 2 inputs are not finite .* row 7") as caught:
        check_values(make(x=spoiled(value, 7)))
    assert "missing values" in caught.value.hint
    with pytest.raises(DataBroken, match=r"test set of made: 2 inputs are not finite .* row 4"):
        check_values(make(x_test=spoiled(value, 4)[:12]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": torch.rand(12, 4)}, r"differ in shape, \(5,\) and \(4,\)"),
        ({"x_test": torch.rand(12, 5).double()}, "differ in type, torch.float32 and torch.float64"),
        ({"x": torch.ones(30, 5).int(), "x_test": torch.ones(12, 5).int()}, "inputs of type torch.int32"),
        ({"x": torch.ones(30, 5) > 0, "x_test": torch.ones(12, 5) > 0}, "inputs of type torch.bool"),
        ({"y": torch.zeros(30).long(), "y_test": torch.zeros(12).long(), "classes": 1}, "has a single class"),
    ],
)
def test_check_values_that_cannot_be_trained_on_raise(changes, message):
    with pytest.raises(DataBroken, match=message) as caught:
        check_values(make(**changes))
    assert caught.value.hint


def test_check_values_other_range_in_test_is_logged(caplog):
    check_values(make(x=torch.rand(30, 5) * 255))
    assert "made: training inputs lie in" in caplog.text and "are both scaled alike?" in caplog.text
    assert warnings_of(x=torch.rand(30, 5) * 3) == []


def test_check_values_labels_that_are_missing_are_logged():
    names = ("sit", "walk", "run")
    assert warnings_of(y=torch.zeros(30).long(), y_test=torch.zeros(12).long(), classes=2) == [
        "all training examples have the label class 0",
        "no example of class 1 of 2 classes",
    ]
    found = warnings_of(y=torch.arange(30) % 2, class_names=names)
    assert found == ["no training example of class 2 (run), which the test set has"]


def test_check_values_shared_rows_are_counted():
    train = torch.rand(30, 5)
    assert warnings_of(x=train, x_test=torch.cat([train[3:8], torch.rand(7, 5)])) == [
        "5 of 12 test examples are also training examples"
    ]
    assert count_shared_rows(train, train[:, :4]) == 0


@pytest.mark.parametrize(("shape", "what"), [((5,), "features"), ((5, 8), "channels")])
def test_check_values_constant_inputs_are_named(shape, what):
    x = torch.rand(30, *shape)
    x[:, [1, 3]] = 2.0
    x_test = torch.rand(12, *shape)
    assert warnings_of(x=x, x_test=x_test) == [f"2 of 5 {what} have the same value everywhere: 1, 3"]
    images = {"x": torch.zeros(30, 5, 4, 4), "x_test": torch.rand(12, 5, 4, 4)}
    assert not any("same value" in one for one in warnings_of(**images))


# examples of a user's own function


def test_examples_of_numpy_arrays_become_tensors():
    examples = Examples(np.zeros((3, 4), np.float32), np.array([0, 1, 2], np.int32))
    assert examples.x.dtype == torch.float32 and examples.y.dtype == torch.int64
    assert Examples(np.zeros((3, 4), np.uint8), torch.arange(3)).x.dtype == torch.uint8


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.rand(3, 4), [0, 1, 2], "the labels are list, not a tensor"),
        (torch.rand(3, 4), np.array(["a", "b", "c"]), "the labels are an array of <U1"),
        ("text", torch.arange(3), "the inputs are str"),
    ],
)
def test_examples_of_anything_else_are_refused(x, y, message):
    with pytest.raises(DataBroken, match=message) as caught:
        Examples(x, y)
    assert "as_dataset" in caught.value.hint


def test_dataset_of_pairs_instead_of_examples_is_refused():
    pair = torch.rand(3, 4), torch.arange(3)
    with pytest.raises(DataBroken, match="`train` of made is tuple, not Examples"):
        Dataset("made", pair, pair, 3, Preparation())
    with pytest.raises(DataBroken, match="`preparation` of made is NoneType"):
        Dataset("made", Examples(*pair), Examples(*pair), 3, None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "b"), "3 classes but 2 names"),
        (("a", "b", "a"), "are called 'a'"),
        ("abc", "not all text"),
        ((1, 2, 3), "text"),
    ],
)
def test_dataset_class_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(DataBroken, match=message):
        make(class_names=names)
    assert make(class_names=["a", "b", "c"]).class_names == ("a", "b", "c")


# normalization


def test_normalize_uses_training_examples_only():
    x = np.random.default_rng(0).normal(3, 2, (50, 4, 6)).astype(np.float32)
    test = np.full((9, 4, 6), 1000, np.float32) + np.arange(9, dtype=np.float32)[:, None, None]
    data = as_dataset((x, np.arange(50) % 2, test, np.arange(9) % 2), kind="series", normalize=True)
    mean, std = x.mean((0, 2), dtype=np.float64), x.std((0, 2), dtype=np.float64)
    assert np.allclose(data.preparation.mean, mean) and np.allclose(data.preparation.std, std)
    prepared = data.preparation(data.train.x)
    assert torch.allclose(prepared.mean((0, 2)), torch.zeros(4), atol=1e-5)
    assert torch.allclose(prepared.std((0, 2), correction=0), torch.ones(4), atol=1e-5)


@pytest.mark.parametrize("shape", [(50, 3), (50, 3, 7), (50, 3, 5, 4)])
def test_normalize_is_per_channel_or_feature(shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32) * np.array([1, 10, 100]).reshape(
        3, *[1] * (len(shape) - 2)
    )
    data = as_dataset((x, np.arange(50) % 2), kind={2: "tabular", 3: "series", 4: "image"}[len(shape)], normalize=True)
    prepared = data.preparation(data.train.x)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    assert torch.allclose(prepared.mean(axes), torch.zeros(3), atol=1e-5)
    assert torch.allclose(prepared.std(axes, correction=0), torch.ones(3), atol=1e-5)


def test_normalize_bytes_are_scaled_first():
    x = np.random.default_rng(0).integers(0, 256, (50, 4, 4), dtype=np.uint8)
    data = as_dataset((x, np.arange(50) % 2), normalize=True)
    assert data.train.x.dtype == torch.uint8 and 0 < data.preparation.mean[0] < 1
    assert abs(float(data.preparation(data.train.x).mean())) < 1e-5


def test_normalize_constant_feature_is_only_shifted(caplog):
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    x[:, 1] = 7.3
    data = as_dataset((x, np.arange(50) % 2), normalize=True)
    assert data.preparation.std[1] == 1 and "1 of 3 features are constant" in caplog.text
    assert torch.isfinite(data.preparation(data.train.x)).all()


def test_normalize_tokens_or_twice_is_refused():
    with pytest.raises(DataBroken, match="token ids cannot be normalized"):
        as_dataset((np.ones((50, 3), int), np.arange(50) % 2), normalize=True)
    with pytest.raises(DataBroken, match="normalizes already"):
        as_dataset((np.ones((50, 3)), np.arange(50) % 2), normalize=True, preparation=Preparation((0.5,), (1.0,)))

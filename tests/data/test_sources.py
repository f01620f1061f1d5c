"""Everything that holds examples becomes a data set, or is refused by name."""

import numpy as np
import pandas
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from fedloom.data import DataBroken, Preparation, as_dataset

datasets, polars = pytest.importorskip("datasets"), pytest.importorskip("polars")

X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.arange(40) % 3
USERS = np.array([f"user {n % 5}" for n in range(40)])
NAMES = np.array(["sit", "walk", "run"])


def columns(**changes):
    return {"a": X[:, 0], "b": X[:, 1], "who": USERS, "does": NAMES[Y], **changes}


def same(one, other):
    return one.fingerprint() == other.fingerprint() and one.classes == other.classes


# torch


class Pairs(torch.utils.data.Dataset):
    classes = ("sit", "walk", "run")

    def __len__(self):
        return len(Y)

    def __getitem__(self, index):
        return X[index], Y[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def test_as_dataset_of_torch_datasets_and_loaders_has_one_result():
    whole = as_dataset((X, Y))
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    shuffled = DataLoader(tensors, batch_size=7, shuffle=True, drop_last=True)
    for form in (Pairs(), Stream(), tensors, shuffled, DataLoader(Stream(), batch_size=8)):
        assert same(as_dataset(form), whole)
    parts = as_dataset((Subset(Pairs(), range(30)), Subset(Pairs(), range(30, 40))))
    assert len(parts.train) == 30 and torch.equal(parts.test.x, torch.from_numpy(X[30:]))
    assert as_dataset(Pairs()).class_names == parts.class_names == ("sit", "walk", "run")


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([{"x": X[0], "y": 1}] * 4, "an example of the torch data set is a dict of 2"),
        ([(X[0], 1, 2)] * 4, "an example of the torch data set is a tuple of 3"),
        ([(X[0], 1), (X[0, :3], 0)] * 4, r"inputs of the torch data set differ in shape, such as \(3,\) and \(4,\)"),
        ([], "the torch data set is empty"),
    ],
)
def test_as_dataset_of_other_torch_examples_is_refused(examples, message):
    class Own(torch.utils.data.Dataset):
        def __len__(self):
            return len(examples)

        def __getitem__(self, index):
            return examples[index]

    with pytest.raises(DataBroken, match=message) as caught:
        as_dataset(Own())
    assert caught.value.hint


def test_as_dataset_of_loader_with_own_collate_is_refused():
    with pytest.raises(DataBroken, match="collate function of its own"):
        as_dataset(DataLoader(Pairs(), batch_size=4, collate_fn=lambda batch: batch))


# frames


@pytest.mark.parametrize("make", [pandas.DataFrame, polars.DataFrame], ids=["pandas", "polars"])
def test_as_dataset_of_frame_takes_label_groups_and_class_names(make):
    frame = make(columns())
    data = as_dataset(frame, label="does", groups="who")
    assert data.class_names == ("run", "sit", "walk") and data.classes == 3
    assert data.train.x.shape == (30, 2) and data.train.x.dtype == torch.float32 and data.tokens is None
    known = {tuple(row): (label, user) for row, label, user in zip(X[:, :2].tolist(), NAMES[Y], USERS, strict=True)}
    for part, groups in zip((data.train, data.test), data.groups, strict=True):
        for row, label, group in zip(part.x.tolist(), part.y.tolist(), groups.tolist(), strict=True):
            assert known[tuple(row)] == (data.class_names[label], f"user {group}")
    assert np.bincount(data.groups[1].numpy()).tolist() == [2] * 5  # a fifth of every user
    only = as_dataset(frame, label="does", features=["b"])
    assert only.train.x.shape[1:] == (1,)
    pair = as_dataset((frame[:30], frame[30:]), label="does", groups="who")
    assert len(pair.test) == 10 and pair.class_names == data.class_names
    assert same(
        as_dataset((frame[:30], frame[30:], "does"), features=["a", "b"]),
        as_dataset((frame[:30], frame[30:]), label="does", features=["a", "b"]),
    )


def test_as_dataset_of_categories_keeps_their_order():
    order = ["walk", "run", "sit", "fly"]
    pandas_frame = pandas.DataFrame(columns(does=pandas.Categorical(NAMES[Y], categories=order)))
    polars_frame = polars.DataFrame(columns()).with_columns(polars.col("does").cast(polars.Enum(order)))
    for frame in (pandas_frame, polars_frame):
        data = as_dataset(frame, label="does", groups="who")
        assert data.class_names == tuple(order) and data.classes == 4
        assert 3 not in data.train.y


def test_as_dataset_of_frame_with_numbered_columns():
    frame = pandas.DataFrame(np.column_stack([X, Y]))
    assert same(as_dataset(frame, label="4"), as_dataset((X, Y)))


@pytest.mark.parametrize("make", [pandas.DataFrame, polars.DataFrame], ids=["pandas", "polars"])
@pytest.mark.parametrize(
    ("changes", "options", "message", "hint"),
    [
        ({}, {}, "does not tell which column holds the labels", "a, b, who, does"),
        ({}, {"label": "sort"}, "there is no column 'sort'", "a, b, who, does"),
        ({}, {"label": "does", "groups": "user"}, "there is no column 'user'", "a, b, who, does"),
        ({}, {"label": "does"}, "a column is not numeric: 'who'", "leave 'who' out"),
        ({"a": [None] * 3 + [1.0] * 37}, {"label": "does", "groups": "who"}, "3 inputs .* row 0", "miss"),
        ({"does": [None, *NAMES[Y][1:]]}, {"label": "does", "groups": "who"}, "1 examples have no label, .* 0", "out"),
        ({"who": [None, *USERS[1:]]}, {"label": "does", "groups": "who"}, "1 examples have no group, .* 0", "group"),
    ],
)  # fmt: skip
def test_as_dataset_of_frame_that_cannot_be_one_is_refused(make, changes, options, message, hint):
    with pytest.raises(DataBroken, match=message) as caught:
        as_dataset(make(columns(**changes)), **options)
    assert hint in caught.value.hint


# Hugging Face


IMAGES = [np.full((8, 8), n, np.uint8) for n in range(20)]


def images(**changes):
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    return datasets.Dataset.from_dict({"image": IMAGES, "label": [n % 2 for n in range(20)], **changes}, features)


def test_as_dataset_of_hub_images_takes_class_names_and_splits():
    data = as_dataset(images())
    assert (
        data.class_names == ("cat", "dog") and data.train.x.shape == (16, 1, 8, 8) and data.train.x.dtype == torch.uint8
    )
    splits = datasets.DatasetDict(train=images(), test=images().select(range(5)))
    assert len(as_dataset(splits).test) == 5
    assert len(as_dataset(datasets.DatasetDict(train=images(), validation=images().select(range(4)))).test) == 4
    assert len(as_dataset(datasets.DatasetDict(train=images())).test) == 4
    with pytest.raises(DataBroken, match="there is no split 'train' among other"):
        as_dataset(datasets.DatasetDict(other=images()))


def test_as_dataset_of_hub_numbers_takes_columns_or_a_list():
    table = datasets.Dataset.from_dict(columns())
    data = as_dataset(table, label="does", groups="who")
    assert same(data, as_dataset(pandas.DataFrame(columns()), label="does", groups="who"))
    lists = datasets.Dataset.from_dict({"row": X.tolist(), "label": Y.tolist()})
    assert same(as_dataset(lists), as_dataset((X, Y)))
    tokens = datasets.Dataset.from_dict({"input_ids": (Y[:, None] + np.arange(3)).tolist(), "label": Y.tolist()})
    assert as_dataset(tokens).tokens == 5


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ({"text": ["a", "b"] * 5, "label": [0, 1] * 5}, "the column 'text' is text", "token ids"),
        ({"row": [[1.0], [1.0, 2.0]] * 5, "label": [0, 1] * 5}, "the column 'row' differ in length", "Pad"),
        ({"row": [[1.0]] * 10, "age": [3] * 10, "label": [0, 1] * 5}, "the columns row, age cannot", "features="),
        ({"row": [[1.0]] * 10}, "no label column among row", "label="),
        ({"label": [0, 1] * 5}, "no image or number column among label", "numbers"),
    ],
)  # fmt: skip
def test_as_dataset_of_hub_set_that_cannot_be_one_is_refused(content, message, hint):
    with pytest.raises(DataBroken, match=message) as caught:
        as_dataset(datasets.Dataset.from_dict(content))
    assert hint in caught.value.hint


def test_as_dataset_of_hub_images_of_several_sizes_is_refused():
    with pytest.raises(DataBroken, match=r"images differ in shape, such as \(4, 4\) and \(8, 8\)"):
        as_dataset(images(image=[*IMAGES[:-1], np.zeros((4, 4), np.uint8)]))


# arrays: kinds, labels, groups


SERIES = np.random.default_rng(1).normal(size=(40, 9, 16)).astype(np.float32)


def test_as_dataset_kind_decides_between_gray_images_and_series(caplog):
    assert as_dataset((SERIES, Y)).train.x.shape == (32, 1, 9, 16)
    assert "floats of 9 x 16 are taken for gray images; set kind = 'series'" in caplog.text
    caplog.clear()
    assert as_dataset((SERIES, Y), kind="series").train.x.shape == (32, 9, 16)
    assert as_dataset((SERIES, Y), kind="image").train.x.shape == (32, 1, 9, 16)
    assert as_dataset((SERIES.astype(np.uint8), Y)).train.x.shape == (32, 1, 9, 16)
    assert caplog.text == ""


def test_as_dataset_kind_of_whole_numbers():
    rows = np.arange(160).reshape(40, 4)
    assert as_dataset((rows, Y)).tokens == 160
    tabular = as_dataset((rows - 5, Y), kind="tabular")
    assert tabular.tokens is None and tabular.train.x.dtype == torch.float32
    assert as_dataset((X, Y), kind="series").train.x.shape == (32, 1, 4)
    assert as_dataset((X > 0, Y)).train.x.dtype == torch.float32
    assert as_dataset((rows.astype(np.uint8), Y), kind="tabular").train.x.dtype == torch.float32
    assert as_dataset((rows.astype(np.uint8), Y), kind="tokens").train.x.dtype == torch.int64
    pixels = np.arange(40 * 16).reshape(40, 4, 4) % 256
    assert as_dataset((pixels, Y)).train.x.dtype == torch.uint8  # int64 pixels


@pytest.mark.parametrize(
    ("x", "kind", "message"),
    [
        (X, "image", r"shape \(40, 4\) are no images"),
        (SERIES, "tabular", r"shape \(40, 9, 16\) are no rows"),
        (X, "tokens", "float32 .* are no token ids"),
        (X, "picture", "there is no kind 'picture'"),
        (np.arange(-80, 80).reshape(40, 4), None, "taken for token ids, and the lowest is -80"),
        (np.arange(40 * 16).reshape(40, 4, 4), None, "whole numbers from 0 to .* are no pixels"),
        (X[:, 0], None, r"shape \(40,\)"),
        (X.astype(complex), None, "complex128"),
    ],
)
def test_as_dataset_kind_that_does_not_fit_is_refused(x, kind, message):
    with pytest.raises(DataBroken, match=message) as caught:
        as_dataset((x, Y), kind=kind)
    assert caught.value.hint


@pytest.mark.parametrize("labels", [Y.astype(np.float64), Y[:, None], Y.astype(np.int8), Y.astype(object), list(Y)])
def test_as_dataset_labels_that_are_whole_numbers_are_taken(labels):
    assert same(as_dataset((X, labels)), as_dataset((X, Y)))


def test_as_dataset_label_names_and_booleans():
    data = as_dataset((X, NAMES[Y]), class_names=["sit", "walk", "run", "fly"])
    assert data.classes == 4 and torch.equal(data.train.y, as_dataset((X, Y)).train.y)
    assert as_dataset((X, Y % 2 == 0)).classes == 2
    numbered = as_dataset((X, Y), class_names=list(NAMES))
    assert numbered.class_names == ("sit", "walk", "run")


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        (Y + 0.5, {}, "labels are not whole numbers, the first one is 0.5 in row 0"),
        (np.where(Y == 1, np.nan, Y), {}, "the first one is nan in row 1"),
        (np.eye(40), {}, "labels of type float64 and shape"),
        (NAMES[Y], {"class_names": ["sit", "walk"]}, "there is no class 'run' for a label"),
        (Y, {"class_names": ["sit", "walk"]}, "labels from 0 to 2"),
        (Y, {"class_names": ["sit", "walk", "sit"]}, "two classes of data are called 'sit'"),
        (Y, {"class_names": ["a", "b", "c", "d"], "classes": 3}, "3 classes but 4 names"),
        (np.array([(1, 2)] * 40, dtype=object)[:, 0], {"class_names": [1, 2]}, "not all text"),
        (np.array([{}] * 40), {}, "labels of type dict"),
    ],
)
def test_as_dataset_labels_that_are_none_are_refused(labels, options, message):
    with pytest.raises(DataBroken, match=message):
        as_dataset((X, labels), **options)


def test_as_dataset_groups_of_arrays():
    data = as_dataset((X, Y, X[:10], Y[:10]), groups=(USERS, USERS[:10]))
    assert data.groups[0].tolist() == [n % 5 for n in range(40)] and data.groups[1].tolist() == [0, 1, 2, 3, 4] * 2
    numbered = as_dataset((X, Y), groups=np.arange(40) % 4 * 100)
    assert sorted(set(numbered.groups[0].tolist())) == [0, 1, 2, 3]
    with pytest.raises(DataBroken, match=r"groups of shape \(3,\) for 40 examples"):
        as_dataset((X, Y, X, Y), groups=(USERS[:3], USERS))
    with pytest.raises(DataBroken, match=r"groups of shape \(41,\) for 40 examples"):
        as_dataset((X, Y), groups=np.arange(41))
    with pytest.raises(DataBroken, match="2 sets of examples but groups for 1"):
        as_dataset((X, Y, X, Y), groups=USERS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "no data set can be made of int"),
        ((X, Y, X), "no data set can be made of a tuple of 3"),
        ("my.npz", "my.npz is a path, not data"),
        ({"x": X}, "no data set can be made of dict"),
        (([[1, 2], [3]], [0, 1]), "inputs of type list are no array"),
        ((X, Y, X[:, :3], Y), r"differ in shape, \(4,\) and \(3,\)"),
        ((X, Y, X.astype(int), Y), "differ in type, torch.float32 and torch.int64"),
        ((X, Y[:-1], X, Y), "40 examples but 39 labels"),
        ((X[:0], Y[:0], X, Y), "is empty"),
    ],
)
def test_as_dataset_of_anything_else_is_refused(data, message):
    with pytest.raises(DataBroken, match=message) as caught:
        as_dataset(data)
    assert caught.value.hint


def test_as_dataset_of_dataset_takes_no_options():
    data = as_dataset((X, Y))
    assert as_dataset(data, name="other") is data
    with pytest.raises(DataBroken, match="class_names and normalize would not be applied"):
        as_dataset(data, class_names=["a", "b", "c"], normalize=True)


def test_as_dataset_column_of_what_has_none_is_refused():
    with pytest.raises(DataBroken, match="label names a column, and tuple has no columns"):
        as_dataset((X, Y), label="kind")


def test_as_dataset_preparation_is_used():
    cropped = Preparation(crop_padding=1)
    pixels = np.zeros((40, 4, 4), np.uint8)
    assert as_dataset((pixels, Y), preparation=cropped).preparation == cropped
    with pytest.raises(DataBroken, match="crop_padding of a preparation is for images, and these are rows"):
        as_dataset((X, Y), preparation=cropped)

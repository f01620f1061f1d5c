"""Users' own .npz files and MedMNIST's."""

import io

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, DataBroken, DataMissing

NAMES = ("x_train", "y_train", "x_test", "y_test")
LONG_NAMES = ("train_images", "train_labels", "test_images", "test_labels")


def save(path, x, y, names=NAMES):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **dict(zip(names, (x, y, x[:2], y[:2]), strict=True)))


def read(tmp_path, x, y=None, names=NAMES):
    save(tmp_path / "my.npz", x, np.arange(len(x)) % 3 if y is None else y, names)
    return DATASETS["npz"](folder=tmp_path, file="my.npz")


@pytest.mark.parametrize("names", [NAMES, LONG_NAMES])
@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        ((4, 6, 5), (1, 6, 5)),
        ((4, 6, 5, 3), (3, 6, 5)),
        ((4, 6, 5, 1), (1, 6, 5)),
        ((4, 3, 6, 5), (3, 6, 5)),
        ((4, 1, 6, 5), (1, 6, 5)),
        ((4, 12, 20, 20), (12, 20, 20)),
        ((4, 20, 20, 12), (12, 20, 20)),
    ],
)
@pytest.mark.parametrize("kind", [np.uint8, np.float64])
def test_npz_every_image_layout_becomes_channels_first(tmp_path, names, shape, stored, kind):
    x = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    data = read(tmp_path, x, names=names)
    assert data.name == "my" and data.classes == 3 and tuple(data.train.x.shape[1:]) == stored
    assert data.train.x.dtype == (torch.uint8 if kind == np.uint8 else torch.float32)
    expected = x.reshape(4, *stored) if shape[1] == stored[0] or len(shape) == 3 else x.transpose(0, 3, 1, 2)
    assert np.array_equal(data.train.x.numpy(), expected.astype(data.train.x.numpy().dtype))


def test_npz_feature_rows_and_tokens_are_unchanged(tmp_path):
    assert read(tmp_path, np.ones((4, 7))).input_shape == (7,)
    tokens = read(tmp_path, np.arange(20, dtype=np.int32).reshape(4, 5))
    assert tokens.train.x.dtype == torch.int64 and tokens.input_shape == (5,)


def test_npz_labels_in_column_and_any_integer_dtype_are_read(tmp_path):
    data = read(tmp_path, np.zeros((4, 6, 5), np.uint8), np.array([[0], [1], [2], [5]], np.uint8))
    assert data.train.y.tolist() == [0, 1, 2, 5] and data.train.y.dtype == torch.int64 and data.classes == 6


def test_npz_path_outside_data_directory_is_read(tmp_path, monkeypatch):
    save(tmp_path / "here" / "own.npz", np.zeros((4, 2, 2), np.uint8), np.arange(4))
    monkeypatch.chdir(tmp_path / "here")
    empty = tmp_path / "data"
    assert len(DATASETS["npz"](folder=empty, file="own.npz").train) == 4
    assert len(DATASETS["npz"](folder=empty, file=str(tmp_path / "here" / "own.npz")).train) == 4
    with pytest.raises(DataMissing) as caught:
        DATASETS["npz"](folder=empty, file="other.npz")
    assert "other.npz" in caught.value.message and "FEDLOOM_DATA" in caught.value.hint


def test_npz_groups_and_class_names_are_read(tmp_path):
    x, y = np.arange(80.0).reshape(20, 4), np.arange(20) % 3
    users = np.array(["ada", "bob"] * 10)
    for names, groups in ((NAMES, ("groups_train", "groups_test")), (LONG_NAMES, ("train_groups", "test_groups"))):
        arrays = dict(zip((*names, *groups), (x[:14], y[:14], x[14:], y[14:], users[:14], users[14:]), strict=True))
        np.savez(tmp_path / "my.npz", class_names=np.array(["sit", "walk", "run"]), **arrays)
        data = DATASETS["npz"](folder=tmp_path, file="my.npz")
        assert data.class_names == ("sit", "walk", "run")
        assert data.groups[0].tolist() == [0, 1] * 7 and data.groups[1].tolist() == [0, 1] * 3
    arrays.pop("test_groups")
    np.savez(tmp_path / "my.npz", **arrays)
    with pytest.raises(DataBroken, match="groups of the training examples only"):
        DATASETS["npz"](folder=tmp_path, file="my.npz")


def test_npz_without_test_set_holds_out_a_share_of_every_group(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 3, 8)), np.array(["sit", "walk"] * 10)
    np.savez(tmp_path / "my.npz", x=x, y=y, groups=np.arange(20) // 10)
    data = DATASETS["npz"](folder=tmp_path, file="my.npz", kind="series", normalize=True, test_share=0.3)
    assert data.class_names == ("sit", "walk") and data.input_shape == (3, 8) and len(data.preparation.mean) == 3
    assert data.groups[1].tolist() == [0, 0, 0, 1, 1, 1]


def test_npz_whole_float_labels_are_taken_and_bad_rows_located(tmp_path):
    assert read(tmp_path, GREY, np.array([0.0, 1.0, 2.0, 1.0])).train.y.tolist() == [0, 1, 2, 1]
    broken = np.ones((4, 6, 5))
    broken[3, 2, 2] = np.inf
    with pytest.raises(DataBroken, match=r"training set: 1 inputs are not finite .* row 3"):
        read(tmp_path, broken)


GREY = np.zeros((4, 6, 5), np.uint8)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (GREY, np.array([0, 1, 2])),
        (GREY, np.array([0, 1, 2, -1])),
        (GREY, np.array([0.0, 1.0, 2.5, 1.0])),
        (GREY, np.array([0.0, 1.0, np.nan, 1.0])),
        (GREY, np.eye(4, dtype=int)),
        (np.array(["a", "b", "c", "d"]), np.arange(4)),
        (np.full((4, 6, 5), np.nan), np.arange(4)),
        (np.arange(4.0), np.arange(4)),
        (GREY[:0], np.arange(0)),
    ],
)
def test_npz_invalid_arrays_raise(tmp_path, x, y):
    with pytest.raises(DataBroken):
        read(tmp_path, x, y)


def test_npz_different_train_and_test_shapes_raise(tmp_path):
    arrays = (GREY, np.arange(4), GREY[:, :3], np.arange(4))
    np.savez(tmp_path / "my.npz", **dict(zip(NAMES, arrays, strict=True)))
    with pytest.raises(DataBroken, match="differ in shape"):
        DATASETS["npz"](folder=tmp_path, file="my.npz")


def test_npz_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "my.npz", x_train=GREY, y_train=np.arange(4))
    with pytest.raises(DataBroken) as caught:
        DATASETS["npz"](folder=tmp_path, file="my.npz")
    assert "x_test" in caught.value.hint and "train_images" in caught.value.hint


def test_npz_pickled_objects_raise(tmp_path):
    objects = np.array([{"a": 1}, None, 3, "x"], dtype=object)
    np.savez(tmp_path / "my.npz", **dict(zip(NAMES, (objects, np.arange(4), objects, np.arange(4)), strict=True)))
    with pytest.raises(DataBroken, match="cannot be read"):
        DATASETS["npz"](folder=tmp_path, file="my.npz")


def test_npz_invalid_file_raises(tmp_path):
    path = tmp_path / "my.npz"
    save(path, np.random.default_rng(0).integers(0, 256, (40, 9, 9), dtype=np.uint8), np.arange(40))
    whole = path.read_bytes()
    plain = io.BytesIO()
    np.save(plain, GREY)
    damaged = whole[:600] + bytes(reversed(whole[600:700])) + whole[700:]
    for content in (b"", b"hello", whole[: len(whole) // 2], damaged, plain.getvalue()):
        path.write_bytes(content)
        with pytest.raises(DataBroken):
            DATASETS["npz"](folder=tmp_path, file="my.npz")


@pytest.mark.parametrize("location", ["pathmnist/pathmnist.npz", "pathmnist.npz"])
def test_medmnist_file_is_read(tmp_path, location):
    x = np.arange(9 * 28 * 28 * 3).reshape(9, 28, 28, 3).astype(np.uint8)
    save(tmp_path / location, x, np.arange(9, dtype=np.uint8)[:, None], LONG_NAMES)
    data = DATASETS["pathmnist"](folder=tmp_path)
    assert data.classes == 9 and data.input_shape == (3, 32, 32)
    assert np.array_equal(data.train.x.numpy(), x.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("name", "hub"), [("pathmnist", True), ("pneumoniamnist", False)])
def test_medmnist_missing_file_raises(tmp_path, name, hub):
    with pytest.raises(DataMissing) as caught:
        DATASETS[name](folder=tmp_path)
    assert f"{name}.npz" in caught.value.hint and ("fedloom[hf]" in caught.value.hint) == hub


def test_medmnist_labels_out_of_range_raise(tmp_path):
    save(tmp_path / "pneumoniamnist.npz", GREY, np.arange(4), LONG_NAMES)
    with pytest.raises(DataBroken, match="labels from 0 to 3"):
        DATASETS["pneumoniamnist"](folder=tmp_path)


def test_medmnist_real_files_are_read(real_folder):
    data = DATASETS["pneumoniamnist"](folder=real_folder)
    assert len(data.train) == 4708 and len(data.test) == 624 and data.input_shape == (1, 28, 28)

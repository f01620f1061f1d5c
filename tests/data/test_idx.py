"""MNIST's file format, valid and invalid."""

import gzip
import struct

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, DataBroken, DataMissing
from fedloom.data.idx import FILES, read_idx


def idx(array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def arrays():
    images = np.arange(7 * 4 * 5).reshape(7, 4, 5) % 256
    return [images, np.array([0, 1, 2, 3, 4, 5, 9]), images[:3], np.array([9, 8, 7])]


def write(folder, packed=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(FILES, arrays(), strict=True):
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("mnist", "mnist"),
        ("mnist", "."),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_every_folder_and_compression_is_read(tmp_path, name, location, packed):
    write(tmp_path / location, packed)
    data = DATASETS[name](folder=tmp_path)
    assert data.name == name and data.classes == 10
    assert data.train.x.dtype == torch.uint8 and data.train.x.shape == (7, 1, 4, 5)
    assert np.array_equal(data.train.x[:, 0].numpy(), arrays()[0])
    assert data.train.y.tolist() == [0, 1, 2, 3, 4, 5, 9] and data.test.y.tolist() == [9, 8, 7]
    assert data.input_shape == (1, 4, 5)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_missing_files_hint_names_files_and_folder(tmp_path, name):
    with pytest.raises(DataMissing) as caught:
        DATASETS[name](folder=tmp_path)
    assert name in caught.value.message and str(tmp_path) in caught.value.message
    for word in (*FILES, str(tmp_path / name), "FEDLOOM_DATA", "--data-dir", "fedloom[hf]", "FEDLOOM_DOWNLOAD=1"):
        assert word in caught.value.hint


def test_idx_one_missing_file_raises(tmp_path):
    write(tmp_path / "mnist")
    (tmp_path / "mnist" / f"{FILES[3]}.gz").unlink()
    with pytest.raises(DataMissing):
        DATASETS["mnist"](folder=tmp_path)


GOOD = idx(np.zeros((3, 4, 5)))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        GOOD[:10],
        GOOD[:-1],
        GOOD + b"x",
        b"\x80" + GOOD[1:],
        GOOD[:2] + b"\x0d" + GOOD[3:],
        idx(np.zeros(60)),
        struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    ],
    ids=["empty", "header cut", "cut", "too long", "magic", "floats", "axes", "bomb"],
)
@pytest.mark.parametrize("packed", [True, False])
def test_idx_invalid_file_raises(tmp_path, content, packed):
    path = tmp_path / ("file.gz" if packed else "file")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(DataBroken) as caught:
        read_idx(path, 3)
    assert str(path) in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-12], lambda b: b"no gzip", lambda b: b[:20] + b"\xff\xff\xff" + b[23:]]
)
def test_idx_invalid_gzip_raises(tmp_path, damage):
    path = tmp_path / "file.gz"
    path.write_bytes(damage(gzip.compress(idx(np.arange(200).reshape(2, 10, 10)))))
    with pytest.raises(DataBroken):
        read_idx(path, 3)


def test_idx_mismatched_files_raise(tmp_path):
    write(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / FILES[1]).write_bytes(idx(np.zeros(6)))
    with pytest.raises(DataBroken, match="7 examples but 6 labels"):
        DATASETS["mnist"](folder=tmp_path)


def test_idx_labels_above_nine_raise(tmp_path):
    write(tmp_path / "mnist", packed=False)
    (tmp_path / "mnist" / FILES[3]).write_bytes(idx(np.array([1, 2, 10])))
    with pytest.raises(DataBroken, match="labels from 1 to 10"):
        DATASETS["mnist"](folder=tmp_path)


@pytest.mark.parametrize(("name", "first"), [("mnist", [5, 0, 4, 1, 9]), ("fashion-mnist", [9, 0, 0, 3, 0])])
def test_idx_real_files_are_read(real_folder, name, first):
    data = DATASETS[name](folder=real_folder)
    assert len(data.train) == 60_000 and len(data.test) == 10_000 and data.input_shape == (1, 28, 28)
    assert data.train.y[:5].tolist() == first
    mean, std = data.preparation.mean[0], data.preparation.std[0]
    pixels = data.train.x[:20_000].float() / 255
    assert abs(pixels.mean() - mean) < 0.002 and abs(pixels.std() - std) < 0.002


def test_idx_swapped_data_set_raises(real_folder):
    with pytest.raises(DataBroken, match="holds mnist, not fashion-mnist"):
        DATASETS["fashion-mnist"](folder=real_folder / "mnist")


def test_fashion_mnist_test_share_pools_and_splits_every_class(tmp_path):
    labels = np.repeat(np.arange(10), 40)
    images = np.arange(400)[:, None, None] % 250 + np.zeros((1, 4, 5))
    parts = [images[80:], labels[80:], images[:80], labels[:80]]  # the test set has only two of the classes
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name, array in zip(FILES, parts, strict=True):
        (folder / name).write_bytes(idx(array))
    read = DATASETS["fashion-mnist"]
    published, again, same = (
        read(folder=tmp_path, **settings) for settings in ({}, {"test_share": 0.25}, {"test_share": 0.25})
    )
    assert (len(published.train), len(published.test)) == (320, 80)
    assert (len(again.train), len(again.test)) == (300, 100)
    assert np.bincount(again.test.y).tolist() == [10] * 10
    both = [torch.cat([one.train.x, one.test.x]).flatten(1)[:, 0].sort().values for one in (published, again)]
    assert torch.equal(*both)
    assert torch.equal(again.test.x, same.test.x)
    assert again.fingerprint() == same.fingerprint() != published.fingerprint()

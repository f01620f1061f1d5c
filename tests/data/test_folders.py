"""A folder for each user becomes a data set with groups."""

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.data import DATASETS, DataBroken, DataMissing

read = DATASETS["folder"]


def save_arrays(path, rows, seed=0, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32)
    np.savez(path, **{"x": x, "y": np.arange(rows) % 3, **changes})


def save_images(root, user, label, count, size=(6, 5), mode="L"):
    folder = root / user / label
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new(mode, size, number if mode == "L" else (number, 0, 0, 255)[: len(mode)]).save(
            folder / f"{number}.png"
        )


def test_folder_of_arrays_has_users_as_groups(tmp_path):
    for number, user in enumerate(("ada", "bob", "cyd")):
        save_arrays(tmp_path / "phones" / user / "train.npz", 10 + number, seed=number)
        save_arrays(tmp_path / "phones" / user / "test.npz", 3, seed=10 + number)
    data = read(folder=tmp_path, path="phones")
    assert data.name == "phones" and data.classes == 3 and data.input_shape == (4,)
    assert np.bincount(data.groups[0].numpy()).tolist() == [10, 11, 12]
    assert np.bincount(data.groups[1].numpy()).tolist() == [3, 3, 3]
    assert torch.equal(data.train.x[:10], torch.from_numpy(np.load(tmp_path / "phones/ada/train.npz")["x"]))


def test_folder_without_test_sets_holds_out_a_share_of_every_user(tmp_path):
    save_arrays(tmp_path / "ada" / "train.npz", 20)
    save_arrays(tmp_path / "bob" / "train.npz", 10, seed=1)
    save_arrays(tmp_path / "cyd" / "train.npz", 7, seed=2)
    save_arrays(tmp_path / "cyd" / "test.npz", 4, seed=3)
    data = read(folder=tmp_path.parent, path=tmp_path.name, test_share=0.3)
    assert {group: data.groups[1].tolist().count(group) for group in range(3)} == {0: 6, 1: 3, 2: 4}
    assert len(data.train) + len(data.test) == 41


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("RGBA", 3)])
def test_folder_of_images_has_class_names(tmp_path, mode, channels):
    for user in ("ada", "bob"):
        save_images(tmp_path, user, "cat", 5, mode=mode)
        save_images(tmp_path, user, "dog", 5, mode=mode)
    (tmp_path / "ada" / ".hidden").mkdir()
    data = read(folder=tmp_path.parent, path=str(tmp_path))
    assert data.class_names == ("cat", "dog") and data.train.x.shape == (16, channels, 5, 6)
    assert data.train.x.dtype == torch.uint8
    assert data.groups[0].tolist().count(0) == 8 and data.groups[1].tolist().count(1) == 2


def test_folder_of_images_with_test_set(tmp_path):
    for user in ("ada", "bob"):
        for part, count in (("train", 4), ("test", 2)):
            save_images(tmp_path / user, part, "cat", count)
            save_images(tmp_path / user, part, "dog", count)
    data = read(folder=tmp_path, path=str(tmp_path))
    assert (len(data.train), len(data.test)) == (16, 8) and data.class_names == ("cat", "dog")


def test_folder_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataMissing, match="no folder phones"):
        read(folder=tmp_path, path="phones")
    root = tmp_path / "phones"
    root.mkdir()
    with pytest.raises(DataBroken, match="has no folders of users") as caught:
        read(folder=tmp_path, path="phones")
    assert "train.npz" in caught.value.hint
    (root / "ada").mkdir()
    with pytest.raises(DataBroken, match=r"neither train\.npz nor images"):
        read(folder=tmp_path, path="phones")
    save_images(root, "ada", "cat", 3)
    save_images(root, "ada", "dog", 1, size=(7, 7))
    with pytest.raises(DataBroken, match=r"images differ in shape, \(5, 6\) in .* and \(7, 7\) in .*dog.0.png"):
        read(folder=tmp_path, path="phones")
    (root / "ada" / "dog" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataBroken, match=r"0.png cannot be read"):
        read(folder=tmp_path, path="phones")
    np.savez(root / "ada" / "train.npz", x=np.zeros((3, 4)))
    with pytest.raises(DataBroken, match="lacks the arrays x and y"):
        read(folder=tmp_path, path="phones")


def test_folder_of_users_with_other_shapes_is_refused(tmp_path):
    save_arrays(tmp_path / "ada" / "train.npz", 10)
    save_arrays(tmp_path / "bob" / "train.npz", 10, x=np.zeros((10, 5)))
    with pytest.raises(DataBroken, match=r"examples differ in shape, such as \(4,\) and \(5,\)"):
        read(folder=tmp_path, path=str(tmp_path))

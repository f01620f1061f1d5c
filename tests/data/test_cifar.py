"""CIFAR's binary files in every supported folder, and invalid ones."""

import io
import tarfile

import numpy as np
import pytest
import torch

from fedloom.data import DATASETS, DataBroken, DataMissing

TEN = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
HUNDRED = ["train.bin", "test.bin"]
ARCHIVES = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}
FOLDERS = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}


def pixels(seed, count=2):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def records(images, *labels):
    columns = [np.full((len(images), 1), label, np.uint8) for label in labels]
    return np.concatenate([*columns, images.reshape(len(images), -1)], axis=1).tobytes()


def files(name):
    if name == "cifar10":
        return {file: records(pixels(number), number) for number, file in enumerate(TEN)}
    return {"train.bin": records(pixels(0, 3), 19, 99), "test.bin": records(pixels(1), 4, 7)}


def write(folder, contents):
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        (folder / file).write_bytes(content)


def pack(path, contents, prefix):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for file, content in {"readme.html": b"", **contents}.items():
            member = tarfile.TarInfo(f"{prefix}/{file}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def check(name, data):
    if name == "cifar10":
        assert data.train.y.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and data.test.y.tolist() == [5, 5]
        assert np.array_equal(data.train.x.numpy(), np.concatenate([pixels(number) for number in range(5)]))
        assert np.array_equal(data.test.x.numpy(), pixels(5)) and data.classes == 10
    else:
        assert data.train.y.tolist() == [99] * 3 and data.test.y.tolist() == [7, 7] and data.classes == 100
        assert np.array_equal(data.train.x.numpy(), pixels(0, 3))
    assert data.train.x.dtype == torch.uint8 and data.input_shape == (3, 32, 32)


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("location", ["official", "name", "nested", "direct"])
def test_cifar_extracted_files_are_read(tmp_path, name, location):
    places = {"official": FOLDERS[name], "name": name, "nested": f"{name}/{FOLDERS[name]}", "direct": "."}
    write(tmp_path / places[location], files(name))
    check(name, DATASETS[name](folder=tmp_path))


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("location", [".", "name"])
def test_cifar_official_archive_is_read(tmp_path, name, location):
    folder = tmp_path / (name if location == "name" else location)
    pack(folder / ARCHIVES[name], files(name), FOLDERS[name])
    check(name, DATASETS[name](folder=tmp_path))
    assert [path.name for path in folder.iterdir()] == [ARCHIVES[name]]


def test_cifar_archive_writes_nothing_to_disk(tmp_path):
    pack(tmp_path / "data" / ARCHIVES["cifar100"], files("cifar100"), "../../outside")
    check("cifar100", DATASETS["cifar100"](folder=tmp_path / "data"))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("name", FOLDERS)
def test_cifar_npz_is_read(tmp_path, name):
    (tmp_path / name).mkdir()
    images = pixels(0, 4).transpose(0, 2, 3, 1)
    labels = np.arange(4)
    np.savez(
        tmp_path / name / f"{name}.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:2],
        test_labels=labels[:2],
    )
    data = DATASETS[name](folder=tmp_path)
    assert np.array_equal(data.train.x.numpy(), pixels(0, 4)) and data.train.y.tolist() == [0, 1, 2, 3]
    if name == "cifar100":
        with pytest.raises(DataBroken, match="lacks"):
            DATASETS[name](folder=tmp_path, labels="coarse")


def test_cifar100_coarse_labels_are_read(tmp_path):
    write(tmp_path / "cifar100", files("cifar100"))
    data = DATASETS["cifar100"](folder=tmp_path, labels="coarse")
    assert data.train.y.tolist() == [19] * 3 and data.test.y.tolist() == [4, 4] and data.classes == 20
    with pytest.raises(ValueError, match="labels must be"):
        DATASETS["cifar100"](folder=tmp_path, labels="medium")


@pytest.mark.parametrize("name", FOLDERS)
def test_cifar_missing_files_hint_names_files_and_folder(tmp_path, name):
    contents = files(name)
    contents.popitem()
    write(tmp_path / name, contents)
    with pytest.raises(DataMissing) as caught:
        DATASETS[name](folder=tmp_path)
    for word in (*files(name), FOLDERS[name], ARCHIVES[name], "FEDLOOM_DATA", "--data-dir", "fedloom[hf]"):
        assert word in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"", records(pixels(0), 1)[:-1], records(pixels(0), 1) + b"x"], ids=["empty", "cut", "long"]
)
def test_cifar_invalid_records_raise(tmp_path, content):
    write(tmp_path / "cifar10", {**files("cifar10"), TEN[2]: content})
    with pytest.raises(DataBroken, match=TEN[2]):
        DATASETS["cifar10"](folder=tmp_path)


def test_cifar_labels_out_of_range_raise(tmp_path):
    write(tmp_path / "cifar10", {**files("cifar10"), TEN[0]: records(pixels(0), 10)})
    with pytest.raises(DataBroken, match="labels from 1 to 10"):
        DATASETS["cifar10"](folder=tmp_path)


def test_cifar_invalid_archive_raises(tmp_path):
    path = tmp_path / ARCHIVES["cifar10"]
    pack(path, files("cifar10"), "x")
    whole = path.read_bytes()
    for content in (b"", b"not an archive", whole[: len(whole) // 2], whole[:5000] + bytes(400) + whole[5400:]):
        path.write_bytes(content)
        with pytest.raises(DataBroken):
            DATASETS["cifar10"](folder=tmp_path)
    pack(path, {TEN[0]: b""}, "x")
    with pytest.raises(DataBroken, match=r"lacks data_batch_2.bin"):
        DATASETS["cifar10"](folder=tmp_path)


@pytest.mark.parametrize("name", FOLDERS)
def test_cifar_real_files_are_read(real_folder, name):
    data = DATASETS[name](folder=real_folder)
    assert data.input_shape == (3, 32, 32) and len(data.train) >= 10_000 and len(data.test) >= 5_000
    pixels_ = data.train.x[:10_000].float().div(255).transpose(0, 1).flatten(1)
    assert (pixels_.mean(1) - torch.tensor(data.preparation.mean)).abs().max() < 0.006

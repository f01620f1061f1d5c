"""UCI HAR from small files in its format."""

import numpy as np
import pytest
import torch

from fedloom.data import DATASET_INFO, DATASETS, PARTITIONS, DataBroken, DataMissing, describe_deviation, extract_labels
from fedloom.data.catalog import LABEL_NAMES, lookup_dataset_info, synthetic_labels
from fedloom.data.ucihar import SIGNALS

SUBJECTS = {"train": [1, 1, 3, 3, 3, 1] * 5, "test": [2, 2, 4] * 4}


def write(root, seed=0):
    draw = np.random.default_rng(seed)
    for part, subjects in SUBJECTS.items():
        folder = root / part / "Inertial Signals"
        folder.mkdir(parents=True)
        count = len(subjects)
        np.savetxt(root / part / f"subject_{part}.txt", subjects, fmt="%d")
        np.savetxt(root / part / f"y_{part}.txt", 1 + np.arange(count) % 6, fmt="%d")
        np.savetxt(root / part / f"X_{part}.txt", draw.normal(size=(count, 561)), fmt="%.7e")
        for number, signal in enumerate(SIGNALS):
            values = draw.normal(size=(count, 128)) + 10 * number
            np.savetxt(folder / f"{signal}_{part}.txt", values, fmt="%.7e")


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "ucihar")
    return tmp_path


def test_ucihar_within_subjects_every_person_has_tests(folder):
    data = DATASETS["ucihar"](folder=folder)
    assert data.input_shape == (9, 128) and data.train.x.dtype == torch.float32 and data.classes == 6
    assert data.class_names == LABEL_NAMES["ucihar"] and data.class_names[5] == "laying"
    counts = [np.bincount(groups.numpy()).tolist() for groups in data.groups]
    assert counts == [[11, 6, 11, 3], [4, 2, 4, 1]]  # of 15, 8, 15 and 4 windows, 0.3 each
    partition = PARTITIONS["natural"](extract_labels(data), 4, np.random.default_rng(0))
    assert all(len(rows) for rows in (*partition.train, *partition.test))


def test_ucihar_signals_are_normalized_channels(folder):
    data = DATASETS["ucihar"](folder=folder)
    assert [round(mean / 10) for mean in data.preparation.mean] == list(range(9))
    assert abs(float(data.preparation(data.train.x).mean())) < 1e-4
    assert DATASETS["ucihar"](folder=folder, normalize=False).preparation.mean == ()


def test_ucihar_published_split_has_other_people(folder):
    data = DATASETS["ucihar"](folder=folder, split="published", inputs="features")
    assert (len(data.train), len(data.test)) == (30, 12) and data.input_shape == (561,)
    assert not set(data.groups[0].tolist()) & set(data.groups[1].tolist())
    assert data.train.y[:7].tolist() == [0, 1, 2, 3, 4, 5, 0]


def test_ucihar_is_the_same_every_time_and_complete(folder):
    one, other = (DATASETS["ucihar"](folder=folder) for _ in range(2))
    assert one.fingerprint() == other.fingerprint()
    first = np.loadtxt(folder / "ucihar/train/Inertial Signals/body_acc_x_train.txt", dtype=np.float32)
    every = torch.cat([one.train.x, one.test.x])[:, 0]
    assert {row.tobytes() for row in first} <= {row.numpy().tobytes() for row in every}


def test_ucihar_missing_or_broken_files_are_named(folder):
    with pytest.raises(DataMissing, match="ucihar is not in") as caught:
        DATASETS["ucihar"](folder=folder / "nowhere")
    assert "UCI HAR Dataset.zip" in caught.value.hint
    path = folder / "ucihar" / "train" / "y_train.txt"
    path.write_text("7\n" * 30)
    with pytest.raises(DataBroken, match="labels from 7 to 7"):
        DATASETS["ucihar"](folder=folder)
    path.write_text("1\n" * 29)
    with pytest.raises(DataBroken, match="29 labels but 30 windows of body_acc_x"):
        DATASETS["ucihar"](folder=folder)
    path.write_text("one\n")
    with pytest.raises(DataBroken, match=r"y_train.txt cannot be read"):
        DATASETS["ucihar"](folder=folder)
    path.unlink()
    with pytest.raises(DataBroken, match=r"y_train.txt cannot be read"):
        DATASETS["ucihar"](folder=folder)


def test_ucihar_counts_are_known_without_files():
    info = DATASET_INFO["ucihar"]
    assert (info.shape, info.classes, info.train + info.test, info.groups) == ((9, 128), 6, 10_299, (30, 0))
    labels = synthetic_labels(info)
    assert set(labels.groups[0]) == set(labels.groups[1]) == set(range(30))
    published = lookup_dataset_info("ucihar", {"split": "published", "inputs": "features"})
    assert (published.train, published.test, published.shape) == (7_352, 2_947, (561,))
    assert describe_deviation("ucihar", {}, 7_210, 3_089, 6) == ""
    assert "30 examples instead of 10,299" in describe_deviation("ucihar", {}, 20, 10, 6)
    assert "7,351 training" in describe_deviation("ucihar", {"split": "published"}, 7_351, 2_947, 6)

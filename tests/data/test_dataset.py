"""The data set type, its checks and its fingerprint."""

import copy
import dataclasses

import pytest
import torch

from fedloom.data import PREPARATIONS, DataBroken, DataMissing, Dataset, Examples


def make(x=None, y=None, classes=3, preparation="plain"):
    x = torch.arange(6 * 4, dtype=torch.uint8).view(6, 1, 2, 2) if x is None else x
    y = torch.tensor([0, 1, 2, 0, 1, 2]) if y is None else y
    return Dataset("made", Examples(x, y), Examples(x[:3], y[:3]), classes, PREPARATIONS[preparation])


def test_dataset_length_and_input_shape_are_correct():
    data = make()
    assert len(data.train) == 6 and len(data.test) == 3
    assert data.input_shape == (1, 2, 2)
    assert make(preparation="fedsup_fashion").input_shape == (3, 32, 32)
    assert make(torch.zeros(6, 5, dtype=torch.int64)).input_shape == (5,)


def test_fingerprint_depends_on_values_shapes_and_dtypes_only():
    data = make()
    print_ = data.fingerprint()
    assert print_ == make(preparation="heterofl_mnist").fingerprint() and len(print_) == 64
    changed = data.train.x.clone()
    changed[5, 0, 1, 1] += 1
    others = [
        make(changed),
        make(y=data.train.y.flip(0)),
        make(data.train.x.view(6, 1, 1, 4)),
        make(data.train.x.float()),
    ]
    assert len({print_, *(other.fingerprint() for other in others)}) == 5


def test_fingerprint_does_not_depend_on_memory_layout():
    x = torch.arange(6 * 2 * 3 * 2, dtype=torch.uint8).view(6, 2, 3, 2)
    assert make(x.contiguous(memory_format=torch.channels_last)).fingerprint() == make(x).fingerprint()


@pytest.mark.parametrize("bad", [[0, 1, 2, 0, 1, 3], [0, -1, 2, 0, 1, 2]])
def test_dataset_labels_out_of_range_raise(bad):
    with pytest.raises(DataBroken, match="labels from"):
        make(y=torch.tensor(bad))


def test_dataset_wrong_dtype_length_or_empty_raises():
    with pytest.raises(DataBroken, match="type"):
        make(y=torch.tensor([0, 1, 2, 0, 1, 2], dtype=torch.int32))
    with pytest.raises(DataBroken, match="6 inputs but 5 labels"):
        make(y=torch.zeros(5, dtype=torch.int64))
    with pytest.raises(DataBroken, match="empty"):
        make(torch.zeros(0, 1, 2, 2), torch.zeros(0, dtype=torch.int64))


def test_dataset_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().classes = 4


@pytest.mark.parametrize("kind", [DataMissing, DataBroken])
def test_data_error_message_and_hint_survive_pickling(kind):
    error = copy.copy(kind("what", "how"))
    assert (error.message, error.hint, str(error)) == ("what", "how", "what. how")

"""Partitions by group: whole groups, disjoint, the largest ones, and deterministic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import PARTITIONS, Labels
from fedloom.seeds import generator

QUICK = settings(max_examples=60, deadline=None)
GROUPS = st.lists(st.integers(0, 9), min_size=1, max_size=80)


def grouped(train, test=(0,)):
    train, test = np.array(train), np.array(test, dtype=np.int64)
    return Labels(np.zeros(len(train), int), np.zeros(len(test), int), 1, (train, test))


def run(name, labels, devices, seed=0, **options):
    return PARTITIONS[name](labels, devices, generator(seed, "partition"), **options)


def of(part, groups):
    return [set(groups[rows].tolist()) for rows in part]


@QUICK
@given(train=GROUPS, test=GROUPS, seed=st.integers(0, 99), data=st.data())
def test_natural_assigns_largest_groups_as_a_whole(train, test, seed, data):
    labels = grouped(train, test)
    devices = data.draw(st.integers(1, len(set(train))))
    partition = run("natural", labels, devices, seed)
    assert partition.fingerprint() == run("natural", labels, devices, seed).fingerprint()
    owners = [groups.pop() for groups in of(partition.train, labels.groups[0])]
    assert len(set(owners)) == devices == len(partition.train)
    for owner, rows, tests in zip(owners, partition.train, partition.test, strict=True):
        assert rows.tolist() == np.flatnonzero(labels.groups[0] == owner).tolist()
        assert tests.tolist() == np.flatnonzero(labels.groups[1] == owner).tolist()
    by_size = sorted(set(train), key=lambda group: (-train.count(group), train.index(group)))
    assert set(owners) == set(by_size[:devices])


def test_natural_does_not_sort_devices_by_size():
    labels = grouped(np.repeat(np.arange(20), np.arange(20, 0, -1)))
    orders = {tuple(len(rows) for rows in run("natural", labels, 20, seed).train) for seed in range(5)}
    assert len(orders) == 5


def test_natural_too_few_large_groups_raises():
    labels = grouped([0, 0, 0, 1, 1, 2])
    assert len(run("natural", labels, 2, least=2).train) == 2
    with pytest.raises(ValueError, match="only 2 of 3 groups have least = 2"):
        run("natural", labels, 3, least=2)
    with pytest.raises(ValueError, match="only 3 of 3 groups"):
        run("natural", labels, 4)


@QUICK
@given(train=GROUPS, test=GROUPS, seed=st.integers(0, 99), data=st.data())
def test_rows_are_assigned_whole_and_once(train, test, seed, data):
    labels = grouped(train, test)
    devices = data.draw(st.integers(1, len(set(train))))
    partition = run("rows", labels, devices, seed)
    assert partition.fingerprint() == run("rows", labels, devices, seed).fingerprint()
    held = of(partition.train, labels.groups[0])
    assert {len(groups) for groups in held} == {len(set(train)) // devices}
    assert len(set.union(*held)) == sum(len(groups) for groups in held)
    for groups, rows in zip(held, partition.train, strict=True):
        assert sorted(rows.tolist()) == np.flatnonzero(np.isin(labels.groups[0], list(groups))).tolist()
    if set(train) & set(test):
        assert all(own <= groups for own, groups in zip(of(partition.test, labels.groups[1]), held, strict=True))


def test_rows_keep_text_order_and_split_other_test_rows_evenly():
    labels = grouped(np.repeat(np.arange(6), 5), np.repeat([6, 7], 5))
    partition = run("rows", labels, 3)
    for rows in partition.train:
        assert [np.diff(half).tolist() for half in (rows[:5], rows[5:])] == [[1] * 4] * 2
    assert [rows.tolist() for rows in partition.test] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError, match="only 6 rows"):
        run("rows", labels, 7)


@pytest.mark.parametrize("name", ["rows", "natural"])
def test_group_partition_without_groups_raises(name, even_labels):
    with pytest.raises(ValueError, match="has no groups"):
        run(name, even_labels, 2)
    with pytest.raises(ValueError, match="devices = 0"):
        run(name, grouped([0, 1]), 0)


def test_labels_select_train_keeps_groups_of_selected_rows():
    labels = grouped([3, 4, 3, 5], [4]).select_train(np.array([1, 2]))
    assert labels.groups[0].tolist() == [4, 3] and labels.groups[1].tolist() == [4] and len(labels.train) == 2
    assert of(run("natural", labels, 2).train, labels.groups[0]) in ([{4}, {3}], [{3}, {4}])


def test_labels_select_train_without_groups_has_none(even_labels):
    assert even_labels.select_train(np.arange(3)).groups is None

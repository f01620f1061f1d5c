"""Properties of every partition for any labels, number of devices and options."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedloom.data import PARTITIONS, Labels, Partition, correlate_tiers_with_labels, hold_out, subsample
from fedloom.seeds import generator

QUICK = settings(max_examples=60, deadline=None)
ALPHAS = st.floats(1e-6, 1e6) | st.sampled_from([1e-300, 1e-9, 0.01, 0.5, 100.0, 1e300])


@st.composite
def labels_and_devices(draw, most_devices=12):
    """Any labels, perhaps some without examples, and at most as many devices as examples."""
    classes = draw(st.integers(1, 6))
    train = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=120))
    test = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=60))
    devices = draw(st.integers(1, min(most_devices, len(train))))
    return Labels(np.array(train), np.array(test), classes), devices


@st.composite
def cases(draw):
    """The name of a partition, labels and devices that it supports, and any options."""
    others = ("file", "label_shards", "pathological", "rows", "natural", "own")
    name = draw(st.sampled_from([name for name in PARTITIONS if name not in others]))
    labels, devices = draw(labels_and_devices())
    most = len(labels.train) // devices
    options = {}
    if name.startswith("dirichlet") or name == "quantity":
        options["alpha"] = draw(ALPHAS)
    if name in ("dirichlet", "quantity"):
        options["min_examples"] = draw(st.integers(1, most))
    if name == "dirichlet":
        options["balanced"] = draw(st.booleans())
        options["test_sizes"] = draw(st.sampled_from(["equal", "proportional"]))
    if name == "sorted_shards":
        options["shards_per_device"] = draw(st.integers(1, most))
    return name, labels, devices, options


@st.composite
def shard_cases(draw):
    """Labels, devices and labels per device that divide evenly."""
    classes, devices = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    per_device = draw(st.sampled_from([k for k in range(1, classes + 1) if k * devices % classes == 0] or [classes]))
    shards = per_device * devices // classes
    train = np.repeat(np.arange(classes), [shards + draw(st.integers(0, 9)) for _ in range(classes)])
    test = np.repeat(np.arange(classes), [draw(st.integers(0, 15)) for _ in range(classes)])
    order = np.random.default_rng(draw(st.integers(0, 99)))
    return Labels(order.permutation(train), order.permutation(test), classes), devices, per_device, shards


def run(case, seed):
    name, labels, devices, options = case
    return PARTITIONS[name](labels, devices, generator(seed, "partition"), **options)


def check_rows(maps, devices, count):
    """Rows of every device are in range, and no row occurs twice."""
    assert len(maps) == devices and all(rows.dtype == np.int64 and rows.ndim == 1 for rows in maps)
    rows = np.concatenate(maps)
    assert len(np.unique(rows)) == len(rows)
    assert len(rows) == 0 or 0 <= rows.min() <= rows.max() < count
    return len(rows)


@QUICK
@given(cases(), st.integers(0, 2**32))
def test_partition_is_disjoint_and_complete(case, seed):
    name, labels, devices, options = case
    partition = run(case, seed)
    used = check_rows(partition.train, devices, len(labels.train))
    check_rows(partition.test, devices, len(labels.test))
    sizes = [len(rows) for rows in partition.train]
    parts = devices * options.get("shards_per_device", 1)
    if name in ("iid", "sorted_shards", "dirichlet_per_device"):
        assert set(sizes) == {parts // devices * (len(labels.train) // parts)}
    else:
        assert used == len(labels.train)
    assert min(sizes) >= options.get("min_examples", 1)


@QUICK
@given(cases(), st.integers(0, 2**32))
def test_partition_test_labels_are_among_training_labels(case, seed):
    name, labels, devices, options = case
    assume(name != "iid")
    partition = run(case, seed)
    is_equal = options.get("test_sizes", "equal") == "equal"
    for train, test in zip(partition.train, partition.test, strict=True):
        assert set(labels.test[test]) <= set(labels.train[train])
        assert not is_equal or len(test) <= max(1, len(labels.test) / devices + 0.5)


@QUICK
@given(cases(), st.integers(0, 2**32))
def test_partition_test_counts_are_rounded_training_proportions(case, seed):
    name, labels, devices, options = case
    assume(name != "iid")
    partition = run(case, seed)
    supply, demand = (np.bincount(one, minlength=labels.classes) for one in (labels.test, labels.train))
    tested = np.bincount(labels.test, minlength=labels.classes) > 0
    for train, test in zip(partition.train, partition.test, strict=True):
        held = np.bincount(labels.train[train], minlength=labels.classes) * tested
        got = np.bincount(labels.test[test], minlength=labels.classes)
        expected = len(labels.test) / devices * held / max(held.sum(), 1)
        if options.get("test_sizes") == "proportional":
            expected = held * supply / np.maximum(demand, 1)
        assert (got <= np.floor(expected) + 1).all()


@QUICK
@given(cases(), st.integers(0, 2**32))
def test_partition_depends_only_on_seed(case, seed):
    first = run(case, seed)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert run(case, seed).fingerprint() == first.fingerprint()
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@QUICK
@given(shard_cases(), st.booleans(), st.integers(0, 2**32))
def test_label_shards_sizes_and_labels_are_balanced(case, dedupe, seed):
    labels, devices, per_device, shards = case
    partition = PARTITIONS["label_shards"](
        labels, devices, generator(seed), labels_per_device=per_device, dedupe=dedupe
    )
    used = check_rows(partition.train, devices, len(labels.train))
    used_test = check_rows(partition.test, devices, len(labels.test))
    assert dedupe or (used == len(labels.train) and used_test == len(labels.test))
    held = np.stack([np.bincount(labels.train[rows], minlength=labels.classes) for rows in partition.train])
    assert ((held > 0).sum(axis=1) <= per_device).all()
    smallest = np.bincount(labels.train, minlength=labels.classes) // shards
    pieces = np.where(held > 0, np.maximum(held // (smallest + 1), 1), 0)
    assert not dedupe or (pieces.sum(axis=0) <= shards).all()
    for train, test in zip(partition.train, partition.test, strict=True):
        assert set(labels.test[test]) <= set(labels.train[train])
    again = PARTITIONS["label_shards"](labels, devices, generator(seed), labels_per_device=per_device, dedupe=dedupe)
    assert again.fingerprint() == partition.fingerprint()


@QUICK
@given(labels_and_devices(), ALPHAS, st.integers(0, 2**32))
def test_partition_class_totals_are_conserved(case, alpha, seed):
    labels, devices = case
    even = len(labels.train) // devices * devices
    labels = Labels(labels.train[:even], labels.test, labels.classes)
    partition = PARTITIONS["dirichlet_per_device"](labels, devices, generator(seed), alpha=alpha)
    dealt = np.bincount(labels.train[np.concatenate(partition.train)], minlength=labels.classes)
    assert (dealt == np.bincount(labels.train, minlength=labels.classes)).all()


@QUICK
@given(labels_and_devices(), st.floats(0, 1), st.integers(0, 2**32))
def test_tier_label_correlation_only_reorders(case, correlation, seed):
    labels, devices = case
    partition = PARTITIONS["iid"](labels, devices, generator(seed))
    tied = correlate_tiers_with_labels(partition, labels, correlation, generator(seed, "correlation"))
    pairs = [
        {(tuple(train), tuple(test)) for train, test in zip(part.train, part.test, strict=True)}
        for part in (partition, tied)
    ]
    assert pairs[0] == pairs[1]


@QUICK
@given(labels_and_devices(), st.integers(-3, 200), st.integers(-3, 20), st.floats(), st.integers(-3, 200))
def test_partition_any_options_give_partition_or_reason(case, devices, count, alpha, minimum):
    labels, _ = case
    options = {
        "iid": {},
        "label_shards": {"labels_per_device": count},
        "sorted_shards": {"shards_per_device": count},
        "dirichlet": {"alpha": alpha, "min_examples": minimum},
        "dirichlet_per_device": {"alpha": alpha},
        "quantity": {"alpha": alpha, "min_examples": minimum},
    }
    for name, own in options.items():
        try:
            partition = PARTITIONS[name](labels, devices, generator(0), **own)
        except ValueError as reason:
            assert any(word in str(reason) for word in ("devices", *own))
        else:
            assert len(partition.train) == devices and min(len(rows) for rows in partition.train) >= 1


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("alpha", [1e-300, 0.01, 1.0])
def test_partition_hardest_case_terminates(alpha, balanced):
    labels = Labels(np.arange(2000) % 10, np.arange(500) % 10, 10)
    options = {"alpha": alpha, "balanced": balanced, "min_examples": 20}
    partition = PARTITIONS["dirichlet"](labels, 100, generator(0), **options)
    assert {len(rows) for rows in partition.train} == {20}


@given(count=st.integers(1, 200), part=st.floats(0, 1), seed=st.integers(0, 5))
def test_hold_out_returns_distinct_sorted_rows(count: int, part: float, seed: int) -> None:
    rows = hold_out(count, int(part * count), np.random.default_rng(seed))
    assert len(rows) == int(part * count)
    assert rows.tolist() == sorted(set(rows.tolist()) & set(range(count)))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    devices=st.floats(0.01, 1),
    keep=st.floats(0.01, 1),
    seed=st.integers(0, 5),
)
def test_subsample_reduces_some_devices_and_keeps_others(
    sizes: list[int], devices: float, keep: float, seed: int
) -> None:
    ends = np.cumsum([0, *sizes])
    rows = tuple(np.arange(a, b) for a, b in pairwise(ends))
    result = subsample(Partition(rows, rows), devices, keep, np.random.default_rng(seed))
    assert result.test is rows or all(np.array_equal(a, b) for a, b in zip(result.test, rows, strict=True))
    untouched = [np.array_equal(a, b) for a, b in zip(result.train, rows, strict=True)]
    assert untouched.count(False) <= round(devices * len(sizes))
    for own, before in zip(result.train, rows, strict=True):
        assert set(own.tolist()) <= set(before.tolist())
        assert len(own) in (len(before), max(1, round(keep * len(before))))

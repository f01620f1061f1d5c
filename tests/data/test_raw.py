"""Laws of raw examples: names become numbers, and the test set takes its share of every group."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.raw import RawExamples, encode_groups, encode_labels, hold_out_of_groups, split_off_test

names = st.text("abc", min_size=1, max_size=2)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.floats(0, 1), st.integers(0, 9))
def test_hold_out_of_groups_takes_the_share_of_every_group(groups, share, seed):
    order = np.random.default_rng(seed).permutation(len(groups))
    is_test = hold_out_of_groups(np.array(groups), share, order)
    for group in set(groups):
        members = np.array(groups) == group
        assert is_test[members].sum() == np.rint(share * members.sum())


@given(st.lists(names, min_size=4, max_size=40), st.data())
def test_encode_labels_and_groups_can_be_undone(labels, data):
    groups = data.draw(st.lists(names, min_size=len(labels), max_size=len(labels)))
    whole = RawExamples(np.arange(len(labels))[:, None], np.array(labels), np.array(groups))
    parts = [whole.select(np.arange(0, len(labels), 2)), whole.select(np.arange(1, len(labels), 2))]
    encoded, class_names = encode_labels(parts, (), "test")
    encoded = encode_groups(encoded, "test")
    listed = sorted(set(groups))
    for before, after in zip(parts, encoded, strict=True):
        assert [class_names[label] for label in after.y] == before.y.tolist()
        assert [listed[group] for group in after.groups] == before.groups.tolist()


@given(st.integers(5, 60), st.booleans())
def test_split_off_test_keeps_every_example_once(count, grouped):
    x = np.arange(count)[:, None]
    whole = RawExamples(x, np.arange(count), np.arange(count) // 5 if grouped else None)
    train, test = split_off_test(whole, 0.2)
    assert sorted([*train.y.tolist(), *test.y.tolist()]) == list(range(count))
    for part in (train, test):
        assert np.array_equal(part.x[:, 0], part.y) and np.all(np.diff(part.y) > 0)

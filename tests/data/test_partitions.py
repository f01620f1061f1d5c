"""Partitions: hand-computed examples, errors, saved partitions and the tier-label correlation."""

import json

import numpy as np
import pytest

from fedloom.data import (
    PARTITIONS,
    DataBroken,
    DataMissing,
    Labels,
    Partition,
    correlate_tiers_with_labels,
    limit_examples,
)
from fedloom.data.partitions import (
    assign_test_rows,
    cut_points,
    draw_open_proportions,
    draw_proportions,
    fill_slots,
    retry_until_minimum,
    top_up,
)
from fedloom.seeds import generator


def extract_labels(train, test=None, classes=None):
    train = np.array(train)
    test = train if test is None else np.array(test)
    return Labels(train, test, classes or int(train.max()) + 1)


def repeated(*counts):
    return np.repeat(np.arange(len(counts)), counts)


def draw(seed=0):
    return generator(seed, "partition")


def test_label_shards_match_hand_computed_example(even_labels):
    for seed in range(20):
        partition = PARTITIONS["label_shards"](even_labels, 4, draw(seed), labels_per_device=2, dedupe=False)
        for train, test in zip(partition.train, partition.test, strict=True):
            assert len(train) == 8 and len(np.unique(even_labels.train[train])) <= 2
            held = np.bincount(even_labels.train[train], minlength=4)
            assert set(held) <= {0, 4, 8} and (np.bincount(even_labels.test[test], minlength=4) * 2 == held).all()


def test_label_shards_dedupe_keeps_one_shard_of_repeated_label(even_labels):
    doubles = 0
    for seed in range(20):
        both = PARTITIONS["label_shards"](even_labels, 4, draw(seed), labels_per_device=2, dedupe=False)
        once = PARTITIONS["label_shards"](even_labels, 4, draw(seed), labels_per_device=2)
        for full, lean in zip(both.train, once.train, strict=True):
            kinds = len(np.unique(even_labels.train[full]))
            assert len(lean) == 4 * kinds and set(lean) <= set(full)
            doubles += kinds == 1
    assert doubles > 0


def test_label_shards_remainder_matches_hand_computed_example():
    labels = extract_labels(repeated(11, 11))
    partition = PARTITIONS["label_shards"](labels, 4, draw(), labels_per_device=2, dedupe=False)
    pieces = [tuple(rows[labels.train[rows] == 0]) for rows in partition.train]
    sizes = [3, 3, 3, 2]
    shards = np.split(np.arange(11), np.cumsum(sizes)[:-1])
    assert sorted(row for piece in pieces for row in piece) == list(range(11))
    assert all(any(set(shard) <= set(piece) for piece in pieces) for shard in shards)


def test_label_shards_sizes_match_paper():
    labels = extract_labels(repeated(*[5000] * 10), repeated(*[1000] * 10))
    partition = PARTITIONS["label_shards"](labels, 100, draw(), labels_per_device=2)
    for train, test in zip(partition.train, partition.test, strict=True):
        kinds = len(np.unique(labels.train[train]))
        assert (len(train), len(test)) == (250 * kinds, 50 * kinds)


def test_iid_matches_hand_computed_example():
    partition = PARTITIONS["iid"](extract_labels(np.zeros(11, int), np.zeros(7, int)), 3, draw())
    assert [len(rows) for rows in partition.train] == [3] * 3 and [len(rows) for rows in partition.test] == [2] * 3


def test_sorted_shards_may_span_two_labels():
    labels = extract_labels([1, 0, 1, 0, 0, 1, 0, 1, 1, 1])
    partition = PARTITIONS["sorted_shards"](labels, 2, draw(), shards_per_device=1)
    assert sorted(sorted(labels.train[rows]) for rows in partition.train) == [[0, 0, 0, 0, 1], [1] * 5]


def test_cut_points_match_hand_computed_example():
    assert cut_points(np.array([0.25, 0.5, 0.25]), 10).tolist() == [2, 7]
    assert np.diff([0, *cut_points(np.array([0.25, 0.5, 0.25]), 10), 10]).tolist() == [2, 5, 3]


def test_cut_points_zero_share_gets_no_rows():
    shares = np.array([0.1] * 10 + [0.0])
    assert cut_points(shares, 1000)[-1] == 1000
    assert cut_points(np.array([0.0, 1.0, 0.0]), 5).tolist() == [0, 5]


def test_draw_open_proportions_match_hand_computed_example():
    shares = draw_open_proportions(draw(), 0.5, np.array([10, 0]), 10)
    assert shares.tolist() == [0, 1]
    assert cut_points(shares, 10).tolist() == [0]


def test_draw_open_proportions_full_devices_get_zero():
    shares = draw_open_proportions(draw(), 0.5, np.array([5, 0, 9, 4]), 5)
    assert shares[0] == shares[2] == 0 and shares[1] > 0 and shares[3] > 0 and abs(shares.sum() - 1) < 1e-12
    assert abs(draw_open_proportions(draw(), 0.5, np.array([5, 5]), 5).sum() - 1) < 1e-12


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-9, 0.01, 1, 100, 1e9, 1e300, 1.7e308])
def test_draw_proportions_extreme_alpha_is_valid(alpha):
    for seed in range(5):
        shares = draw_proportions(draw(seed), alpha, 7)
        assert shares.min() >= 0 and abs(shares.sum() - 1) < 1e-9
        assert (shares.max() > 0.999) if alpha < 1e-8 else True
        assert (shares.max() < 0.15) if alpha > 1e8 else True


def test_retry_until_minimum_tops_up_after_last_attempt():
    calls = []

    def attempt():
        calls.append(1)
        return [np.arange(12), np.arange(12, 12), np.arange(12, 15)]

    assert [len(rows) for rows in retry_until_minimum(attempt, 4)] == [7, 4, 4]
    assert len(calls) == 50
    assert [len(rows) for rows in retry_until_minimum(attempt, 1)] == [11, 1, 3]


def test_top_up_takes_from_largest():
    parts = top_up([np.array([0, 1, 2, 3]), np.array([4]), np.array([5, 6, 7, 8, 9, 10])], 3)
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 10, 9], [5, 6, 7, 8]]


def test_fill_slots_follows_preferences_then_falls_back():
    counts = fill_slots(np.array([[1.0, 0, 0], [1.0, 0, 0]]), np.array([2, 3, 1]), 3, draw())
    assert counts.sum(axis=0).tolist() == [2, 3, 1] and counts.sum(axis=1).tolist() == [3, 3]
    assert fill_slots(np.eye(2), np.array([4, 4]), 4, draw()).tolist() == [[4, 0], [0, 4]]


def test_fill_slots_frequencies_match_preferences():
    counts = fill_slots(np.array([[0.2, 0.8, 0.0]]), np.array([9999] * 3), 5000, draw())
    assert abs(counts[0, 0] / 5000 - 0.2) < 0.02 and counts[0, 2] == 0


def test_dirichlet_small_alpha_is_skewed_and_large_is_even():
    labels = extract_labels(repeated(*[500] * 10))
    for name in ("dirichlet", "dirichlet_per_device"):
        share = []
        for alpha in (0.05, 100.0):
            partition = PARTITIONS[name](labels, 10, draw(), alpha=alpha)
            share.append(np.mean([np.bincount(labels.train[rows]).max() / len(rows) for rows in partition.train]))
        assert share[0] > 0.5 and share[1] < 0.2


def test_quantity_varies_sizes_but_not_labels():
    labels = extract_labels(repeated(*[2000] * 4))
    partition = PARTITIONS["quantity"](labels, 8, draw(), alpha=0.5)
    sizes = [len(rows) for rows in partition.train]
    assert max(sizes) > 3 * min(sizes) and min(sizes) >= 10 and sum(sizes) == 8000
    largest = partition.train[int(np.argmax(sizes))]
    assert abs(np.bincount(labels.train[largest]) / max(sizes) - 0.25).max() < 0.05


def test_dirichlet_per_label_balanced_bounds_device_sizes():
    labels = extract_labels(repeated(*[100] * 50))
    sizes = [len(rows) for rows in PARTITIONS["dirichlet"](labels, 10, draw(), alpha=0.5).train]
    assert max(sizes) < 500 + 100


def test_assign_test_rows_match_hand_computed_example():
    labels = extract_labels(repeated(6, 2, 0, 8), repeated(10, 10, 10, 10), 4)
    test = assign_test_rows(labels, [np.arange(8), np.arange(8, 16)], draw())
    held = [np.bincount(labels.test[rows], minlength=4).tolist() for rows in test]
    # n_test / devices = 20: the second needs 20 of label 3 and there are 10, the first 15 of label 0 and there are 10.
    assert held == [[10, 3, 0, 0], [0, 0, 0, 10]]


def test_assign_test_rows_small_shares_keep_device_total():
    labels = extract_labels(np.tile(np.arange(10), 100), np.tile(np.arange(10), 10), 10)
    train = PARTITIONS["iid"](labels, 20, draw()).train
    assert {len(rows) for rows in assign_test_rows(labels, train, draw())} <= {4, 5}


def test_assign_test_rows_label_without_test_examples_is_skipped():
    labels = extract_labels(repeated(4, 4), [0, 0], 2)
    test = assign_test_rows(labels, [np.arange(4), np.arange(4, 8)], draw())
    assert len(test[0]) == 1 and len(test[1]) == 0
    mixed = assign_test_rows(labels, [np.array([0, 4]), np.array([1, 5])], draw())
    assert [len(rows) for rows in mixed] == [1, 1]


def test_assign_test_rows_gives_one_row_each_while_available():
    labels = extract_labels(np.zeros(24, int), np.zeros(5, int))
    test = assign_test_rows(labels, np.split(np.arange(24), 12), draw())
    assert sorted(len(rows) for rows in test) == [0] * 7 + [1] * 5


IMPOSSIBLE = [
    ("iid", 0, {}, "devices"),
    ("iid", 33, {}, "devices"),
    ("label_shards", 4, {"labels_per_device": 0}, "labels_per_device"),
    ("label_shards", 4, {"labels_per_device": 5}, "labels_per_device"),
    ("label_shards", 3, {"labels_per_device": 2}, "labels_per_device"),
    ("label_shards", 2, {"labels_per_device": 1}, "labels_per_device"),
    ("label_shards", 32, {"labels_per_device": 4}, "labels_per_device"),
    ("sorted_shards", 4, {"shards_per_device": 0}, "shards_per_device"),
    ("sorted_shards", 4, {"shards_per_device": 9}, "shards_per_device"),
    ("dirichlet", 4, {"alpha": 0}, "alpha"),
    ("dirichlet", 4, {"alpha": float("nan")}, "alpha"),
    ("dirichlet", 4, {"alpha": float("inf")}, "alpha"),
    ("dirichlet", 4, {"alpha": 1}, "min_examples"),
    ("dirichlet", 4, {"alpha": 1, "min_examples": 0}, "min_examples"),
    ("dirichlet", 40, {"alpha": 1, "min_examples": 1}, "devices"),
    ("dirichlet_per_device", 4, {"alpha": -1}, "alpha"),
    ("dirichlet_per_device", 33, {"alpha": 1}, "devices"),
    ("quantity", 4, {"alpha": 0}, "alpha"),
    ("quantity", 4, {"alpha": 1, "min_examples": 9}, "min_examples"),
]


@pytest.mark.parametrize(("name", "devices", "options", "named"), IMPOSSIBLE)
def test_partitions_impossible_option_raises_and_names_it(even_labels, name, devices, options, named):
    with pytest.raises(ValueError, match=named) as caught:
        PARTITIONS[name](even_labels, devices, draw(), **options)
    assert len(str(caught.value)) > 30


def test_partition_save_and_load_round_trip(tmp_path, even_labels):
    partition = PARTITIONS["iid"](even_labels, 3, draw())
    partition.save(tmp_path / "map.json")
    for back in (
        Partition.load(tmp_path / "map.json"),
        PARTITIONS["file"](even_labels, 3, draw(), path=str(tmp_path / "map.json")),
    ):
        assert back.fingerprint() == partition.fingerprint()
        assert all(
            np.array_equal(a, b) and b.dtype == np.int64 for a, b in zip(partition.train, back.train, strict=True)
        )


def test_partition_fingerprint_depends_on_assignment():
    rows = np.arange(4)
    one = Partition((rows[:2], rows[2:]), (rows[:1], rows[1:]))
    others = [
        Partition((rows[2:], rows[:2]), one.test),
        Partition((rows[:1], rows[1:]), one.test),
        Partition(one.test, one.train),
        Partition((rows[[1, 0]], rows[2:]), one.test),
    ]
    assert len({part.fingerprint() for part in (one, *others)}) == 5
    assert one.fingerprint() == Partition(tuple(rows.astype(np.int32) for rows in one.train), one.test).fingerprint()
    with pytest.raises(ValueError, match="devices"):
        Partition(one.train, one.test[:1])


def test_partition_load_invalid_file_raises(tmp_path, even_labels):
    path = tmp_path / "map.json"
    with pytest.raises(DataMissing):
        Partition.load(path)
    PARTITIONS["iid"](even_labels, 3, draw()).save(path)
    text, content = path.read_text(), json.loads(path.read_text())
    swapped = {**content, "train": content["train"][::-1]}
    lacking = {key: value for key, value in content.items() if key != "sha256"}
    broken = [swapped, lacking, {**content, "format": "other"}, [], 3, {**content, "test": content["test"][:1]}]
    broken += [{**content, "train": [[0.5]]}, {**content, "train": [[True]]}, {**content, "train": [[2**70]]}]
    for wrong in (
        b"",
        text[: len(text) // 2].encode(),
        b"\xff\xfe\x00",
        *(json.dumps(part).encode() for part in broken),
    ):
        path.write_bytes(wrong)
        with pytest.raises(DataBroken):
            Partition.load(path)


def test_from_file_for_other_data_set_raises(tmp_path, even_labels):
    path = str(tmp_path / "map.json")
    PARTITIONS["iid"](even_labels, 3, draw()).save(tmp_path / "map.json")
    with pytest.raises(ValueError, match="devices = 4"):
        PARTITIONS["file"](even_labels, 4, draw(), path=path)
    for small in (extract_labels(repeated(5, 5), repeated(8, 8)), extract_labels(repeated(16, 16), repeated(2, 2))):
        with pytest.raises(ValueError, match="rows beyond"):
            PARTITIONS["file"](small, 3, draw(), path=path)


def shares_of_one_label(order):
    labels = extract_labels(repeated(*[4] * len(order)))
    train = tuple(np.flatnonzero(labels.train == label) for label in order)
    return labels, Partition(train, train)


def test_tier_label_correlation_zero_and_one_are_unchanged_and_sorted():
    labels, partition = shares_of_one_label([3, 0, 2, 1, 4])
    assert correlate_tiers_with_labels(partition, labels, 0, draw()) is partition
    tied = correlate_tiers_with_labels(partition, labels, 1, draw())
    assert [labels.train[rows[0]] for rows in tied.train] == [0, 1, 2, 3, 4]
    assert all(np.array_equal(a, b) for a, b in zip(tied.train, tied.test, strict=True))


def test_tier_label_correlation_ranks_by_main_label_mean_label_and_index():
    labels = extract_labels([0, 0, 1, 1, 1, 0, 0, 2, 0, 0, 1])
    shares = ([2, 3, 4], [0, 1, 7], [5, 6, 10], [8, 9], [])
    partition = Partition(tuple(np.array(rows, dtype=np.int64) for rows in shares), tuple(np.arange(0) for _ in shares))
    tied = correlate_tiers_with_labels(partition, labels, 1, draw())
    assert [rows.tolist() for rows in tied.train] == [[8, 9], [], [5, 6, 10], [0, 1, 7], [2, 3, 4]]


def test_tier_label_correlation_main_label_precedes_mean():
    labels = extract_labels([1, 1, 0, 0, 5])
    partition = Partition((np.array([0, 1]), np.array([2, 3, 4])), (np.arange(0), np.arange(0)))
    assert [len(rows) for rows in correlate_tiers_with_labels(partition, labels, 1, draw()).train] == [3, 2]


def test_tier_label_correlation_between_follows_formula():
    labels, partition = shares_of_one_label([3, 0, 2, 1, 4])
    random_rank = draw(5).permutation(5)
    score = {label: 0.5 * label + 0.5 * random_rank[index] for index, label in enumerate([3, 0, 2, 1, 4])}
    tied = correlate_tiers_with_labels(partition, labels, 0.5, draw(5))
    expected = sorted(range(5), key=lambda label: (score[label], label))
    assert [labels.train[rows[0]] for rows in tied.train] == expected


def test_tier_label_correlation_is_monotonic():
    labels, partition = shares_of_one_label(list(draw().permutation(200)))

    def rank_correlation(strength):
        main = [
            labels.train[rows[0]] for rows in correlate_tiers_with_labels(partition, labels, strength, draw(1)).train
        ]
        return np.corrcoef(main, np.arange(200))[0, 1]

    ladder = [rank_correlation(strength) for strength in (0.0, 0.3, 0.5, 0.7, 1.0)]
    assert ladder == sorted(ladder) and abs(ladder[0]) < 0.2 and ladder[-1] > 0.999


@pytest.mark.parametrize("correlation", [-0.1, 1.1, float("nan")])
def test_tier_label_correlation_out_of_range_raises(even_labels, correlation):
    with pytest.raises(ValueError, match="correlation"):
        correlate_tiers_with_labels(PARTITIONS["iid"](even_labels, 2, draw()), even_labels, correlation, draw())


def test_limit_examples_keeps_subset_of_each_device() -> None:
    before = Partition((np.arange(10), np.arange(10, 13)), (np.arange(3), np.arange(3, 6)))
    after = limit_examples(before, 4, np.random.default_rng(0))
    assert [len(rows) for rows in after.train] == [4, 3]
    assert all(set(kept) <= set(held) for kept, held in zip(after.train, before.train, strict=True))
    assert after.test is before.test
    assert limit_examples(before, None, np.random.default_rng(0)) is before


class TestPathological:
    """PFLlib's two labels a device: label by label, the next devices with room share its examples."""

    def labels(self, classes=10, train=120, test=40):
        counts = [(np.arange(classes * each) % classes).astype(np.int64) for each in (train, test)]
        return Labels(*counts, classes)

    @pytest.mark.parametrize("balanced", [True, False])
    def test_pathological_devices_have_two_labels_shared_by_groups(self, balanced):
        labels = self.labels()
        made = PARTITIONS["pathological"](labels, 20, draw(), labels_per_device=2, balanced=balanced)
        held = [tuple(np.unique(labels.train[rows])) for rows in made.train]
        assert sorted(held) == sorted([(2 * n, 2 * n + 1) for n in range(5)] * 4)
        assert held != sorted(held)  # tiers go by index, and groups are not all of one tier
        rows = np.sort(np.concatenate(made.train))
        assert rows.tolist() == list(range(len(labels.train)))
        assert np.sort(np.concatenate(made.test)).tolist() == list(range(len(labels.test)))
        sizes = np.array(
            [[np.sum(labels.train[rows] == label) for label in own] for rows, own in zip(made.train, held, strict=True)]
        )
        assert (len(np.unique(sizes)) == 1) == balanced
        assert sizes.min() >= 3  # a tenth of an equal part of 120 / 4

    def test_pathological_test_sizes_follow_training_sizes(self):
        labels = self.labels()
        made = PARTITIONS["pathological"](labels, 20, draw(), labels_per_device=2)
        for train, test in zip(made.train, made.test, strict=True):
            for label in np.unique(labels.train[train]):
                expected = np.sum(labels.train[train] == label) / 3
                assert abs(np.sum(labels.test[test] == label) - expected) <= 1
            assert set(labels.test[test]) <= set(labels.train[train])

    @pytest.mark.parametrize(("devices", "labels_per_device"), [(1, 1), (3, 2), (7, 3), (12, 2), (13, 10), (40, 1)])
    def test_pathological_any_numbers_every_device_has_examples(self, devices, labels_per_device):
        labels = self.labels()
        made = PARTITIONS["pathological"](labels, devices, draw(), labels_per_device=labels_per_device)
        held = [set(labels.train[rows]) for rows in made.train]
        assert all(1 <= len(own) <= labels_per_device for own in held)
        assert len(np.unique(np.concatenate(made.train))) == sum(map(len, made.train))

    @pytest.mark.parametrize(("devices", "per_device", "message"), [(20, 11, "10 classes"), (100, 10, "fewer devices")])
    def test_pathological_impossible_numbers_raise(self, devices, per_device, message):
        with pytest.raises(ValueError, match=message):
            PARTITIONS["pathological"](self.labels(train=50), devices, draw(), labels_per_device=per_device)


def test_dirichlet_test_sizes_proportional_follow_training_sizes():
    labels = Labels(np.arange(1200) % 10, np.arange(400) % 10, 10)
    made = PARTITIONS["dirichlet"](labels, 8, draw(), alpha=0.3, test_sizes="proportional")
    assert sum(map(len, made.test)) <= 400
    for train, test in zip(made.train, made.test, strict=True):
        assert abs(len(test) - len(train) / 3) <= 5

"""WikiText-2, artificial and real files: words, windows and masks; data sets of text in general."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import (
    DATASETS,
    PARTITIONS,
    PREPARATIONS,
    DataBroken,
    DataMissing,
    Dataset,
    Examples,
    Labels,
    Preparation,
    correlate_tiers_with_labels,
    extract_labels,
    lookup_dataset_info,
    read_word_vectors,
    synthetic_labels,
)
from fedloom.seeds import generator

TRAIN = " \n = Bees = \n a bee is an <unk> and a bee is a friend \n"
VALID = " \n a wasp is no friend \n"
TEST = " \n an ant is an ant and no bee \n"
WORDS = ["<eos>", "=", "Bees", "a", "bee", "is", "an", "<unk>", "and", "friend", "wasp", "no", "ant"]


def write(folder, train=TRAIN, valid=VALID, test=TEST):
    subfolder = folder / "wikitext-2"
    subfolder.mkdir(exist_ok=True)
    for part, text in (("train", train), ("valid", valid), ("test", test)):
        (subfolder / f"wiki.{part}.tokens").write_text(text, encoding="utf-8", newline="\n")
    return folder


def read(folder, **options):
    return DATASETS["wikitext2"](folder=folder, **{"rows": 2, "test_rows": 1, "length": 3, **options})


def words(dataset, tokens):
    return [dataset.vocabulary[token] for token in tokens.flatten()]


def test_wikitext2_word_ids_are_in_order_of_appearance(tmp_path):
    data = read(write(tmp_path))
    assert data.vocabulary == (*WORDS, "<mask>")
    assert (data.classes, data.tokens, data.input_shape) == (len(WORDS), len(WORDS) + 1, (3,))
    text = f"<eos> {TRAIN.strip()} <eos>".replace("\n", "<eos>").split()
    assert len(text) == 17
    assert words(data, data.train.x) == [*text[:6], *text[8:14]]
    assert data.train.x is data.train.y and data.train.x.dtype == torch.int64


def test_wikitext2_published_adds_unused_id(tmp_path):
    data = read(write(tmp_path), published=True)
    assert (data.classes, data.tokens, data.vocabulary[-2:]) == (len(WORDS) + 1, len(WORDS) + 2, ("<unused>", "<mask>"))
    assert data.preparation.mask_token == len(WORDS) + 1


def test_wikitext2_test_order_columns_groups_one_window_of_each_row(tmp_path):
    """A batch of as many windows as there are rows is a column of the text, as in HeteroFL's code; masks stay."""
    write(tmp_path, test="a b c d e f g h \n" * 20)
    plain, columns = (read(tmp_path, test_rows=4, test_order=order) for order in ("rows", "columns"))
    per_row = len(plain.test.y) // 4
    for number, (x, y) in enumerate(zip(columns.test.x, columns.test.y, strict=True)):
        there = (number % 4) * per_row + number // 4
        assert torch.equal(x, plain.test.x[there]) and torch.equal(y, plain.test.y[there])
    assert columns.groups[1][:5].tolist() == [2, 3, 4, 5, 2]


def test_wikitext2_rare_words_become_unknown(tmp_path):
    data = read(write(tmp_path), most_words=4)
    assert data.vocabulary == ("<eos>", "=", "a", "<unk>", "<mask>")  # as often as "bee" and "is", but earlier
    whole = read(write(tmp_path))
    for old, new in zip(words(whole, whole.train.y), words(data, data.train.y), strict=True):
        assert new == (old if old in data.vocabulary else "<unk>")
    assert read(write(tmp_path), most_words=13).vocabulary == whole.vocabulary
    assert read(write(tmp_path), most_words=1).vocabulary == ("<unk>", "<mask>")
    assert "<unk>" in read(write(tmp_path, train="b b b b b b \n"), most_words=2).vocabulary


def test_wikitext2_test_masks_are_deterministic(tmp_path):
    write(tmp_path, test="a b c d e f g h \n" * 2000)
    data, again = read(tmp_path), read(tmp_path)
    hidden = data.test.x == data.classes
    assert torch.equal(data.test.x, again.test.x)
    assert abs(hidden.float().mean().item() - 0.15) < 0.01
    assert torch.equal(data.test.x[~hidden], data.test.y[~hidden]) and data.test.y.max() < data.classes


@settings(max_examples=30, deadline=None)
@given(
    text=st.lists(st.sampled_from("abcdefgh\n"), min_size=40, max_size=300),
    rows=st.integers(1, 5),
    length=st.integers(1, 7),
)
def test_wikitext2_windows_cover_text_in_order(tmp_path_factory, text, rows, length):
    folder = write(tmp_path_factory.mktemp("text"), train=" ".join(text))
    data = read(folder, rows=rows, length=length)
    words_in_text = [word for line in " ".join(text).split("\n") for word in (*line.split(), "<eos>")]
    if text[-1] == "\n":
        words_in_text.pop()
    each = len(words_in_text) // rows
    rows_of_words = [words_in_text[row * each : row * each + each // length * length] for row in range(rows)]
    assert words(data, data.train.x) == [word for row in rows_of_words for word in row]
    for row in range(rows):
        assert words(data, data.train.x[data.groups[0] == row]) == rows_of_words[row]
    assert not set(data.groups[0].tolist()) & set(data.groups[1].tolist())


def test_wikitext2_invalid_missing_or_short_file_raises(tmp_path):
    with pytest.raises(DataMissing, match=r"wiki\.valid\.tokens"):
        read(tmp_path)
    with pytest.raises(DataBroken, match="rows"):
        read(write(tmp_path), rows=9)
    (tmp_path / "wikitext-2" / "wiki.test.tokens").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataBroken, match="UTF-8"):
        read(tmp_path)


def test_preparation_masks_have_their_rate_and_hide_only_masked_tokens():
    preparation = Preparation(mask_chance=0.15, mask_token=9)
    x = torch.arange(4000 * 64).view(4000, 64) % 9
    augmentation = preparation.draw_augmentation(generator(0, "augmentation"), 4000, 64)
    mask = augmentation["mask"]
    assert set(augmentation) == {"mask"} and mask.shape == (4000, 64) and mask.dtype == torch.bool
    assert abs(mask.float().mean().item() - 0.15) < 0.005
    seen = preparation(x.view(40, 100, 64), {"mask": mask.view(40, 100, 64)}).view(4000, 64)
    assert torch.equal(seen, torch.where(mask, 9, x)) and x.max() == 8
    assert preparation(x) is x and PREPARATIONS["plain"].draw_augmentation(generator(0, "augmentation"), 5, 64) == {}
    assert torch.equal(preparation.draw_augmentation(generator(0, "augmentation"), 4000, 64)["mask"], mask)


@pytest.mark.parametrize("name", PREPARATIONS)
def test_draw_augmentation_size_and_full_shape_agree(name):
    by_size, by_shape = (
        PREPARATIONS[name].draw_augmentation(generator(1, "d"), 6, *shape) for shape in ((20, 24), (3, 20, 24))
    )
    assert set(by_size) == set(by_shape)
    assert all(torch.equal(by_size[key], by_shape[key]) for key in by_size)


def test_draw_augmentation_calls_generator_in_pinned_order():
    preparation = Preparation(crop_padding=4, crop_chance=0.5, flip=True, cutout=16)
    augmentation, stream = preparation.draw_augmentation(generator(1, "d"), 6, 3, 20, 24), generator(1, "d")
    offsets, moved = stream.integers(0, 9, (6, 2)), stream.random((6, 1)) < 0.5
    assert np.array_equal(augmentation["crop"].numpy(), np.where(moved, offsets, 4))
    assert np.array_equal(augmentation["flip"].numpy(), stream.random((6, 1)) < 0.5)
    assert np.array_equal(augmentation["cutout"].numpy(), stream.integers(0, (20, 24), (6, 2)))


def make(x, y, tokens=5, **options):
    return Dataset("made", Examples(x, y), Examples(x, y), 5, PREPARATIONS["plain"], tokens, **options)


def test_dataset_label_per_token_is_checked_and_fingerprinted():
    x = torch.arange(12).view(4, 3) % 5
    data = make(x, x)
    assert data.fingerprint() == make(x, x).fingerprint() != make(x, x.flip(0)).fingerprint()
    with pytest.raises(DataBroken, match="labels of shape"):
        make(x, x[:, :2])
    with pytest.raises(DataBroken, match="tokens from 0 to 4"):
        make(x, x, tokens=4)
    with pytest.raises(DataBroken, match="tokens of type"):
        make(x.float(), x[:, 0])
    with pytest.raises(DataBroken, match="2 words"):
        make(x, x, vocabulary=("a", "b"))
    with pytest.raises(DataBroken, match="groups"):
        make(x, x, groups=(torch.zeros(4, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)))


def test_limit_test_examples_limits_groups():
    x = torch.arange(12).view(4, 3) % 5
    fewer = make(x, x, groups=(torch.arange(4), torch.arange(4))).limit_test_examples(3)
    assert len(fewer.test) == 3 and fewer.groups[1].tolist() == [0, 1, 2] and len(fewer.groups[0]) == 4
    assert make(x, x).limit_test_examples(2).groups is None


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_shards", {"labels_per_device": 1}),
        ("sorted_shards", {"shards_per_device": 1}),
        ("dirichlet", {"alpha": 1.0}),
        ("dirichlet_per_device", {"alpha": 1.0}),
    ],
)
def test_label_partition_with_label_per_token_raises(name, options):
    labels = Labels(np.zeros((40, 3), int), np.zeros((4, 3), int), 2)
    with pytest.raises(ValueError, match="3 labels"):
        PARTITIONS[name](labels, 2, generator(0), **options)
    shares = PARTITIONS["iid"](labels, 2, generator(0))
    assert [len(rows) for rows in shares.train] == [20, 20]
    with pytest.raises(ValueError, match="3 labels"):
        correlate_tiers_with_labels(shares, labels, 0.5, generator(0))


def test_lookup_dataset_info_matches_readers():
    facts = lookup_dataset_info("wikitext2", {})
    assert (facts.shape, facts.classes, facts.tokens) == ((64,), 33_278, 33_279)
    assert (facts.train, facts.test) == (32_600, 3_830)
    assert lookup_dataset_info("wikitext2", {"published": True}).classes == 33_279
    small = lookup_dataset_info("wikitext2", {"most_words": 500, "rows": 7, "length": 10})
    assert (small.shape, small.classes, small.train) == ((10,), 500, 7 * (2_088_628 // 7 // 10))
    assert (
        lookup_dataset_info("cifar100", {"labels": "coarse"}).classes == 20
        and lookup_dataset_info("npz", {"file": "x"}) is None
    )


def test_synthetic_labels_support_same_partitions_as_data():
    labels = synthetic_labels(lookup_dataset_info("wikitext2", {}), 100)
    assert labels.train.shape == (32_600, 64) and len(labels.test) == 100
    shares = PARTITIONS["rows"](labels, 100, generator(0))
    assert {len(rows) for rows in shares.train} == {326}
    images = synthetic_labels(lookup_dataset_info("mnist", {}))
    assert images.groups is None and images.train.shape == (60_000,)


def test_read_word_vectors_of_vocabulary(tmp_path):
    path = tmp_path / "vectors.txt"
    path.write_text("the 1 2\nbee 0.5 -1\n. . . 3 4\n. 5 6\n", encoding="utf-8")
    actual = read_word_vectors(path, ("<pad>", "bee", "."))
    assert actual.dtype == np.float32 and actual.tolist() == [[0, 0], [0.5, -1], [5, 6]]
    with pytest.raises(DataBroken, match="none of the 1 words"):
        read_word_vectors(path, ("ant",))
    with pytest.raises(DataMissing):
        read_word_vectors(tmp_path / "nothing.txt", ("bee",))
    path.write_text("the 1 2\nbee 0.5\n", encoding="utf-8")
    with pytest.raises(DataBroken, match="bee"):
        read_word_vectors(path, ("bee",))
    path.write_text("the 1 2\nbee 0.5 x\n", encoding="utf-8")
    with pytest.raises(DataBroken, match="not a file of word vectors"):
        read_word_vectors(path, ("bee",))


def test_wikitext2_real_files_are_read(real_folder):
    if not (real_folder / "wikitext-2" / "wiki.test.tokens").is_file():
        pytest.skip("FEDLOOM_DATA has no wikitext-2")
    data = DATASETS["wikitext2"](folder=real_folder)
    assert data.test.y.shape == (3_830, 64)
    assert abs((data.test.x == data.classes).float().mean().item() - 0.15) < 0.005
    shares = PARTITIONS["rows"](extract_labels(data), 100, generator(0))
    assert len({len(rows) for rows in shares.train}) == 1 and {len(rows) for rows in shares.test} == {38}

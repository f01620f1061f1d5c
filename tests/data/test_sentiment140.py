"""Sentiment140, artificial and real files: columns, words, labels, and the test split."""

import csv
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data import DATASETS, PARTITIONS, DataBroken, DataMissing, extract_labels
from fedloom.data.sentiment140 import split_words
from fedloom.seeds import generator

PLAIN = [["label", "text"], ["4", "good good day"], ["0", "bad day, really bad"], ["2", "neutral"], ["4", "day"]]
MANUAL = [["label", "text"], ["4", "good night"], ["2", "neutral"], ["0", "bad night"]]


def write(folder, train=PLAIN, test=MANUAL):
    subfolder = folder / "sentiment140"
    subfolder.mkdir(exist_ok=True)
    for name, lines in (("training.csv", train), ("testdata.csv", test)):
        with (subfolder / name).open("w", encoding="latin-1", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(lines)
    return folder


def official(tweets):
    return [[label, "1", "Mon Apr 06", "NO_QUERY", user, text] for label, user, text in tweets]


def read(folder, **options):
    return DATASETS["sentiment140"](folder=folder, **{"length": 4, **options})


def test_sentiment140_labels_words_padding_and_unknown_words_are_encoded(tmp_path):
    data = read(write(tmp_path))
    assert data.vocabulary == ("<pad>", "<unk>", "day", "good", "bad", "really")
    assert (data.classes, data.tokens, data.groups, data.input_shape) == (2, 6, None, (4,))
    assert data.train.y.tolist() == [1, 0, 1] and data.test.y.tolist() == [1, 0]
    assert data.train.x.tolist() == [[3, 3, 2, 0], [4, 2, 5, 4], [2, 0, 0, 0]]
    assert data.test.x.tolist() == [[3, 1, 0, 0], [4, 1, 0, 0]]


def test_sentiment140_small_vocabulary_and_length_are_respected(tmp_path):
    data = read(write(tmp_path), words=1, length=2)
    assert data.vocabulary == ("<pad>", "<unk>", "good")
    assert data.train.x.tolist() == [[2, 2], [1, 1], [1, 0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I LOVE it!!", ["i", "love", "it", "!", "!"]),
        ("@anna_b see http://a.bc/d?e and www.x.org", ["<user>", "see", "<url>", "and", "<url>"]),
        ("don't wait 2 hrs, 10:30 or 1,000.50", ["don't", "wait", "<number>", "hrs", "<number>", "or", "<number>"]),
        ("gr8 #FollowFriday &quot;yes&quot; :( ...", ["gr8", "followfriday", "yes"]),
        ("", []),
    ],
)
def test_split_words_examples(text, words):
    assert list(split_words(text)) == words


@given(st.text(max_size=60))
def test_split_words_any_text_has_no_blanks(text):
    assert all(word and not any(sign.isspace() for sign in word) for word in split_words(text))


def by_users(counts):
    tweets = [(str(4 * (n % 2)), f"u{user}", f"from{user} word{n}") for user, c in enumerate(counts) for n in range(c)]
    return official(tweets)


def test_sentiment140_users_are_groups_in_train_and_test(tmp_path):
    write(
        tmp_path, by_users([10, 20, 3]), official([("4", "u1", "hand"), ("0", "stranger", "hand"), ("2", "u0", "no")])
    )
    data = read(tmp_path, test_share=0.1)
    train, test = (Counter(groups.tolist()) for groups in data.groups)
    assert train == {0: 9, 1: 18, 2: 3}
    assert test == {0: 1, 1: 2 + 1, 3: 1}
    assert data.groups[1][-2:].tolist() == [1, 3]
    own = data.vocabulary.index("from1")
    assert set(data.groups[0][(data.train.x == own).any(1)].tolist()) == {1}
    partition = PARTITIONS["natural"](extract_labels(data), 2, generator(0))
    assert sorted(len(rows) for rows in partition.train) == [9, 18]
    assert sorted(len(rows) for rows in partition.test) == [1, 3]


def test_sentiment140_split_is_deterministic_and_complete(tmp_path):
    write(tmp_path, by_users([7, 11]), official([("4", "x", "hand")]))
    data = read(tmp_path, test_share=0.5, length=2)
    assert data.fingerprint() == read(tmp_path, test_share=0.5, length=2).fingerprint()
    assert len(data.train) == 4 + 6 and len(data.test) == 3 + 5 + 1
    none = read(tmp_path, test_share=0.0)
    assert len(none.train) == 18 and len(none.test) == 1


def test_sentiment140_test_share_tolerates_rounding(tmp_path):
    write(tmp_path, by_users([100]), official([("4", "x", "hand")]))
    assert len(read(tmp_path, test_share=0.29).test) == 30


def test_sentiment140_header_columns_in_any_order_are_read(tmp_path):
    write(tmp_path, [["Text", "User", "Target"], ["good", "a", "4"], ["bad", "b", "0"], ["bad", "a", "0"]])
    data = read(tmp_path, test_share=0.0)
    assert data.groups[0].tolist() == [0, 1, 0] and data.train.y.tolist() == [1, 0, 0]


def test_sentiment140_latin1_quotes_and_line_breaks_are_read(tmp_path):
    data = read(write(tmp_path, [["label", "text"], ["4", 'caf\xe9 "now", \n yes'], ["0", "no"]]))
    assert set(data.vocabulary[2:]) == {"caf\xe9", "now", "yes", "no"}


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([["4", "no header"]], "2 columns"),
        ([], "0 columns"),
        ([["mood", "text"], ["4", "good"]], "mood"),
        ([["label", "text"], ["3", "good"]], "line 2"),
        ([["text", "label"], ["good"]], "line 2"),
        ([["label", "text"], ["2", "neutral"]], "empty"),
    ],
)
def test_sentiment140_invalid_file_raises_and_names_it(tmp_path, train, message):
    with pytest.raises(DataBroken, match=message):
        read(write(tmp_path, train))


def test_sentiment140_missing_or_duplicate_files_raise(tmp_path):
    with pytest.raises(DataMissing, match=r"training\.1600000"):
        read(tmp_path)
    write(tmp_path)
    (tmp_path / "sentiment140" / "train_more.csv").write_text("")
    with pytest.raises(DataBroken, match=r"train_more\.csv"):
        read(tmp_path)


def test_sentiment140_real_files_are_read(real_folder):
    if not (real_folder / "sentiment140").is_dir():
        pytest.skip("FEDLOOM_DATA has no sentiment140")
    data = DATASETS["sentiment140"](folder=real_folder)
    assert data.tokens == 10_002 and data.train.x.shape[1] == 25
    assert np.isclose(data.train.y.float().mean().item(), 0.5, atol=0.01)
    assert (data.train.x == 1).float().mean() < 0.05

"""Sentiment140: positive and negative tweets from csv files, with their users if the file has them.

Tweets are split into words, and words and users become ids.
"""

import csv
import html
import itertools
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..seeds import SENTIMENT140_TEST, generator
from ..settings import Count, Fraction
from . import adapters
from .dataset import DataBroken, Dataset, Examples
from .embeddings import UNKNOWN, sort_by_frequency
from .partition import Rows
from .preparation import PREPARATIONS

_WORD = re.compile(
    r"(?P<url>https?://\S+|www\.\S+)|(?P<user>@\w+)|(?P<number>\d+(?:[.,:]\d+)*(?!\w))|\w+(?:'\w+)*|[!?]"
)
_LABELS = {"0": 0, "4": 1}
_NEUTRAL = "2"
_NAMES = {"label": ("label", "polarity", "target", "sentiment"), "user": ("user",), "text": ("text", "tweet")}
_HINT = "Take the official csv files, or a header with label (0, 2 or 4), text and perhaps user."


@dataclass(frozen=True, eq=False)
class Tweets:
    words: Rows  # [n, length]
    labels: Rows
    users: Rows

    def select(self, mask: npt.NDArray[np.bool_]) -> "Tweets":
        return Tweets(self.words[mask], self.labels[mask], self.users[mask])

    def concatenate(self, other: "Tweets") -> "Tweets":
        pairs = (self.words, other.words), (self.labels, other.labels), (self.users, other.users)
        return Tweets(*(np.concatenate(pair) for pair in pairs))


def split_words(text: str) -> Iterator[str]:
    """The words of a tweet in lower case, with ! and ? but no other punctuation.

    Links become <url>, @names <user> and numbers <number>; hashtags lose the #.
    """
    for match in _WORD.finditer(html.unescape(text).lower()):
        yield f"<{match.lastgroup}>" if match.lastgroup else match.group()


def read_tweets(path: Path, length: int, word_ids: dict[str, int], users: dict[str | None, int]) -> Tweets:
    """The first `length` words of every tweet that is not neutral, padded with 0.

    New words and users get the next id. If the file has no users, all tweets belong to the user None.
    """
    words, labels, owners = array("q"), array("q"), array("q")  # a list of numbers would take four times the memory
    for label, user, text in _read_records(path):
        ids = [word_ids.setdefault(word, len(word_ids)) for word in itertools.islice(split_words(text), length)]
        words.extend(ids + [0] * (length - len(ids)))
        labels.append(label)
        owners.append(users.setdefault(user, len(users)))
    columns = [np.array(column, dtype=np.int64) for column in (words, labels, owners)]
    return Tweets(columns[0].reshape(-1, length), columns[1], columns[2])


def _read_records(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """Label, user (or None) and text of each tweet; the official files are in latin-1."""
    with path.open(encoding="latin-1", newline="") as file:
        lines = csv.reader(file)
        try:
            first = next(lines, [])
            label, user, text = _find_columns(first, path)
            for line in itertools.chain([] if _is_header(first) else [first], lines):
                if line and line[label] != _NEUTRAL:
                    yield _LABELS[line[label]], None if user is None else line[user], line[text]
        except (csv.Error, IndexError, KeyError) as problem:
            raise DataBroken(f"{path}, line {lines.line_num}, is not a tweet: {problem!r}", _HINT) from problem


def _is_header(line: Sequence[str]) -> bool:
    return not line[0].isdigit()


def _find_columns(line: Sequence[str], path: Path) -> tuple[int, int | None, int]:
    """The columns of label, user and text by the header, or, without a header, as in the official files."""
    if not line or not _is_header(line):
        if len(line) == 6:
            return 0, 4, 5
        raise DataBroken(f"{path} has {len(line)} columns and no header", _HINT)
    names = [name.strip().lower() for name in line]
    columns = {
        field: next((names.index(name) for name in known if name in names), None) for field, known in _NAMES.items()
    }
    label, text = columns["label"], columns["text"]
    if label is None or text is None:
        raise DataBroken(f"{path} has the columns {', '.join(names)}", _HINT)
    return label, columns["user"], text


PADDING = "<pad>"
FILES = "training.1600000.processed.noemoticon.csv and testdata.manual.2009.06.14.csv"


def sentiment140(*, folder: Path, length: Count = 25, words: Count = 10_000, test_share: Fraction = 0.1) -> Dataset:
    """Sentiment140, tweets of many users: negative (0) or positive (1); neutral ones are left out.

    Id 0 is padding and 1 an unknown word. The test set is the hand-labeled tweets. If the training file has users, they
    are the groups.

    Parameters
    ----------
    length : the number of words of a tweet that are used, its first ones.
    words : the number of words that have an id of their own, the most frequent ones of the training set.
    test_share : the share of every user's tweets, rounded down, that is added to the test set, if the file has users.
    """
    word_ids = {PADDING: 0, UNKNOWN: 1}
    train, test, has_users = _read(folder, length, word_ids)
    if has_users:
        is_test = _draw_test_tweets(train.users, test_share)
        train, test = train.select(~is_test), train.select(is_test).concatenate(test)
    kept, new_ids = _limit_vocabulary(train.words, len(word_ids), words)
    parts = [Examples(torch.from_numpy(new_ids[part.words]), torch.from_numpy(part.labels)) for part in (train, test)]
    groups = (torch.from_numpy(train.users), torch.from_numpy(test.users)) if has_users else None
    all_words = list(word_ids)
    vocabulary = tuple(all_words[word_id] for word_id in kept)
    return Dataset("sentiment140", parts[0], parts[1], 2, PREPARATIONS["plain"], len(kept), groups, vocabulary)


def _read(folder: Path, length: int, word_ids: dict[str, int]) -> tuple[Tweets, Tweets, bool]:
    """The training tweets, the hand-labeled ones, and whether the former have users."""
    users: dict[str | None, int] = {}
    train = read_tweets(_find_file(folder, "train"), length, word_ids, users)
    has_users = None not in users
    return train, read_tweets(_find_file(folder, "test"), length, word_ids, users), has_users


def _find_file(folder: Path, part: str) -> Path:
    subfolder = folder / "sentiment140"
    files = sorted(subfolder.glob(f"{part}*.csv"))
    if not files:
        raise adapters.missing_data_error("sentiment140", folder, f"{FILES} into {subfolder}")
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise DataBroken(f"{subfolder} has {names}, but one is needed", "Keep only the one to read there.")
    return files[0]


def _draw_test_tweets(users: Rows, share: float) -> npt.NDArray[np.bool_]:
    """A mask with the same random fraction of every user's tweets, always with the same seed."""
    shuffled = generator(0, SENTIMENT140_TEST).permutation(len(users))
    order = shuffled[np.argsort(users[shuffled], kind="stable")]
    counts = np.bincount(users)
    positions = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_test = np.zeros(len(users), dtype=np.bool_)
    is_test[order] = positions < np.repeat(np.floor(counts * share + 1e-9), counts)  # 0.29 * 100 is a little below 29
    return is_test


def _limit_vocabulary(text: Rows, known: int, size: int) -> tuple[Rows, Rows]:
    """The ids of the words to keep, after padding and unknown, and the new id of every known word."""
    counts = np.bincount(text.reshape(-1), minlength=known)
    frequent = sort_by_frequency(counts)
    words = frequent[(frequent > 1) & (counts[frequent] > 0)][:size]
    kept = np.concatenate([[0, 1], words])
    new_ids = np.ones(known, dtype=np.int64)
    new_ids[kept] = np.arange(len(kept))
    return kept, new_ids

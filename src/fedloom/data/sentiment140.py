"""Sentiment140: tweets that are glad or sad, with the user who wrote them where the file says so.

Tweets out of csv files: columns found, words cut apart, and words and users turned into numbers.
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

    def only(self, which: npt.NDArray[np.bool_]) -> "Tweets":
        return Tweets(self.words[which], self.labels[which], self.users[which])

    def and_then(self, other: "Tweets") -> "Tweets":
        pairs = (self.words, other.words), (self.labels, other.labels), (self.users, other.users)
        return Tweets(*(np.concatenate(pair) for pair in pairs))


def words_of(text: str) -> Iterator[str]:
    """A tweet's words in small letters, with ! and ?; other signs are left out.

    Links become <url>, @names <user> and numbers <number>; of #topics the word stays.
    """
    for found in _WORD.finditer(html.unescape(text).lower()):
        yield f"<{found.lastgroup}>" if found.lastgroup else found.group()


def read_tweets(path: Path, length: int, numbers: dict[str, int], users: dict[str | None, int]) -> Tweets:
    """The first `length` words of every tweet that is not neutral, filled up with 0.

    A new word and a new user get the next number. Where the file names no users, all tweets are of the user None.
    """
    words, labels, owners = array("q"), array("q"), array("q")  # a list of numbers would take four times the memory
    for label, user, text in _records(path):
        known = [numbers.setdefault(word, len(numbers)) for word in itertools.islice(words_of(text), length)]
        words.extend(known + [0] * (length - len(known)))
        labels.append(label)
        owners.append(users.setdefault(user, len(users)))
    columns = [np.array(column, dtype=np.int64) for column in (words, labels, owners)]
    return Tweets(columns[0].reshape(-1, length), columns[1], columns[2])


def _records(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """Label, user if the file names users, and text; the official files are in latin-1."""
    with path.open(encoding="latin-1", newline="") as file:
        lines = csv.reader(file)
        try:
            first = next(lines, [])
            label, user, text = _columns(first, path)
            for line in itertools.chain([] if _is_header(first) else [first], lines):
                if line and line[label] != _NEUTRAL:
                    yield _LABELS[line[label]], None if user is None else line[user], line[text]
        except (csv.Error, IndexError, KeyError) as problem:
            raise DataBroken(f"{path}, line {lines.line_num}, is not a tweet: {problem!r}", _HINT) from problem


def _is_header(line: Sequence[str]) -> bool:
    return not line[0].isdigit()


def _columns(line: Sequence[str], path: Path) -> tuple[int, int | None, int]:
    """Where label, user and text stand, by the header's names or, without a header, as in the official files."""
    if not line or not _is_header(line):
        if len(line) == 6:
            return 0, 4, 5
        raise DataBroken(f"{path} has {len(line)} columns and no header", _HINT)
    names = [name.strip().lower() for name in line]
    found = {
        what: next((names.index(name) for name in spelled if name in names), None) for what, spelled in _NAMES.items()
    }
    label, text = found["label"], found["text"]
    if label is None or text is None:
        raise DataBroken(f"{path} has the columns {', '.join(names)}", _HINT)
    return label, found["user"], text


PADDING = "<pad>"
FILES = "training.1600000.processed.noemoticon.csv and testdata.manual.2009.06.14.csv"


def sentiment140(*, folder: Path, length: Count = 25, words: Count = 10_000, test_share: Fraction = 0.1) -> Dataset:
    """Tweets as the numbers of their first `length` words, sad (0) or glad (1); neutral ones are left out.

    The number 0 fills up, 1 stands for unknown words, and then come the `words` most frequent words of training. Tested
    are the tweets labelled by hand; where the training file names users, also `test_share` of every user's tweets,
    rounded down, and users are the groups.
    """
    numbers = {PADDING: 0, UNKNOWN: 1}
    train, test, by_user = _read(folder, length, numbers)
    if by_user:
        held = _held_back(train.users, test_share)
        train, test = train.only(~held), train.only(held).and_then(test)
    kept, new = _fewer(train.words, len(numbers), words)
    parts = [Examples(torch.from_numpy(new[part.words]), torch.from_numpy(part.labels)) for part in (train, test)]
    groups = (torch.from_numpy(train.users), torch.from_numpy(test.users)) if by_user else None
    spelled = list(numbers)
    vocabulary = tuple(spelled[number] for number in kept)
    return Dataset("sentiment140", parts[0], parts[1], 2, PREPARATIONS["plain"], len(kept), groups, vocabulary)


def _read(folder: Path, length: int, numbers: dict[str, int]) -> tuple[Tweets, Tweets, bool]:
    """The training tweets, those labelled by hand, and whether it is known who wrote the first."""
    users: dict[str | None, int] = {}
    train = read_tweets(_file(folder, "train"), length, numbers, users)
    by_user = None not in users
    return train, read_tweets(_file(folder, "test"), length, numbers, users), by_user


def _file(folder: Path, part: str) -> Path:
    place = folder / "sentiment140"
    found = sorted(place.glob(f"{part}*.csv"))
    if not found:
        raise adapters.missing_data("sentiment140", folder, f"{FILES} into {place}")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataBroken(f"{place} has {names}, and one is needed", "Leave only the one to read there.")
    return found[0]


def _held_back(users: Rows, share: float) -> npt.NDArray[np.bool_]:
    """Which tweets are for testing: of every user as large a share, drawn at random but always the same."""
    shuffled = generator(0, SENTIMENT140_TEST).permutation(len(users))
    order = shuffled[np.argsort(users[shuffled], kind="stable")]
    counts = np.bincount(users)
    places = np.arange(len(users)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = np.zeros(len(users), dtype=np.bool_)
    held[order] = places < np.repeat(np.floor(counts * share + 1e-9), counts)  # 0.29 * 100 is a little below 29
    return held


def _fewer(text: Rows, known: int, most: int) -> tuple[Rows, Rows]:
    """Which words are kept, the two signs first, and the new number of every known word."""
    counts = np.bincount(text.reshape(-1), minlength=known)
    frequent = sort_by_frequency(counts)
    words = frequent[(frequent > 1) & (counts[frequent] > 0)][:most]
    kept = np.concatenate([[0, 1], words])
    new = np.ones(known, dtype=np.int64)
    new[kept] = np.arange(len(kept))
    return kept, new

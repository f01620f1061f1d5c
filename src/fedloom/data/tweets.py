"""Tweets out of csv files: columns found, words cut apart, and words and users turned into numbers."""

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

from .examples import DataBroken
from .maps import Rows

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

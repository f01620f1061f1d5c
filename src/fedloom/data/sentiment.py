"""Sentiment140: tweets that are glad or sad, with the user who wrote them where the file says so."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..seeds import SENTIMENT140_TEST, generator
from ..settings import Count, Fraction
from . import hub
from .examples import DataBroken, Dataset, Examples
from .maps import Rows
from .preparation import PREPARATIONS
from .tweets import Tweets, read_tweets
from .words import UNKNOWN, most_frequent

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
        raise hub.missing("sentiment140", folder, f"{FILES} into {place}")
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
    frequent = most_frequent(counts)
    words = frequent[(frequent > 1) & (counts[frequent] > 0)][:most]
    kept = np.concatenate([[0, 1], words])
    new = np.ones(known, dtype=np.int64)
    new[kept] = np.arange(len(kept))
    return kept, new

"""WikiText-2 from its official token files, for guessing hidden words.

The text is folded into rows, and every row cut into windows: what a device gets is a stretch of running text.
"""

from pathlib import Path

import numpy as np
import torch

from ..seeds import MASKED_TEST_TOKENS, generator
from ..settings import Count
from . import adapters
from .dataset import DataBroken, Dataset, Examples
from .embeddings import UNKNOWN, sort_by_frequency
from .partition import Rows
from .preparation import Preparation

FILES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
MASK_CHANCE = 0.15


def wikitext2(
    *,
    folder: Path,
    rows: Count = 100,
    test_rows: Count = 10,
    length: Count = 64,
    most_words: Count | None = None,
    published: bool = False,
) -> Dataset:
    """Encyclopedia articles: 2,088,628 + 245,569 words in windows of `length`, a word to tell at every place.

    A word is what stands between blanks, and every line ends with <eos>. Words are numbered in the order of their first
    appearance in the training, validation and test files (33,278 in all); `most_words` keeps that many, the most
    frequent of the training text, and the others become <unk>. `published` adds the number without a word that
    HeteroFL's published sizes include. The number after the last is the mask: training hides each word with a chance of
    0.15, and of the test set always the same words are hidden. What fills no row or no window is left out.
    """
    words, train, test = _read(_place(folder))
    if most_words is not None and most_words < len(words):
        words, (train, test) = _fewer(words, train, test, most_words)
    words += ["<unused>"] * published
    mask = len(words)
    x, y = (torch.from_numpy(_windows(*part, length)) for part in ((train, rows), (test, test_rows)))
    hidden = generator(0, MASKED_TEST_TOKENS).random(y.shape) < MASK_CHANCE
    tests = Examples(y.masked_fill(torch.from_numpy(hidden), mask), y)
    groups = _row_of(x, rows, 0), _row_of(y, test_rows, rows)  # no test row continues a training row
    preparation = Preparation(mask_chance=MASK_CHANCE, mask_token=mask)
    return Dataset("wikitext2", Examples(x, x), tests, mask, preparation, mask + 1, groups, (*words, "<mask>"))


def _place(folder: Path) -> Path:
    for place in (folder / "wikitext-2", folder / "wikitext2", folder):
        if all((place / file).is_file() for file in FILES):
            return place
    raise adapters.missing_data("wikitext2", folder, f"{', '.join(FILES)} into {folder / 'wikitext-2'}")


def _read(place: Path) -> tuple[list[str], Rows, Rows]:
    """All words, and the numbers of the training and the test text."""
    numbers: dict[str, int] = {}
    train, _, test = [_numbered(place / file, numbers) for file in FILES]
    return list(numbers), train, test


def _numbered(path: Path, numbers: dict[str, int]) -> Rows:
    """The text as numbers; a new word gets the next one."""
    text: list[int] = []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                text += [numbers.setdefault(word, len(numbers)) for word in (*line.split(), "<eos>")]
    except UnicodeDecodeError as problem:
        raise DataBroken(f"{path} is not text in UTF-8: {problem}", "Download the file again.") from problem
    return np.array(text, dtype=np.int64)


def _fewer(words: list[str], train: Rows, test: Rows, most: int) -> tuple[list[str], tuple[Rows, Rows]]:
    """The most frequent words, still in order, <unk> always among them, and both texts in their numbers."""
    words = words if UNKNOWN in words else [*words, UNKNOWN]
    unknown = words.index(UNKNOWN)
    frequent = sort_by_frequency(np.bincount(train, minlength=len(words)))
    kept = np.sort([unknown, *frequent[frequent != unknown][: most - 1]])
    new = np.full(len(words), np.searchsorted(kept, unknown))
    new[kept] = np.arange(len(kept))
    return [words[number] for number in kept], (new[train], new[test])


def _windows(text: Rows, rows: int, length: int) -> Rows:
    """[windows, length]: those of the first row in order, then those of the second, and so on."""
    each = len(text) // rows
    if each < length:
        hint = "Take the complete files, or set fewer rows or a smaller length."
        raise DataBroken(f"{len(text)} words do not fill {rows} rows of {length}", hint)
    return text[: rows * each].reshape(rows, each)[:, : each // length * length].reshape(-1, length)


def _row_of(windows: torch.Tensor, rows: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + rows).repeat_interleave(len(windows) // rows)

"""WikiText-2 from its official token files, for masked language modeling.

The text is reshaped into rows, and every row is split into windows, so a device gets continuous text.
"""

from pathlib import Path
from typing import Literal

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
    test_order: Literal["rows", "columns"] = "rows",
) -> Dataset:
    """WikiText-2, encyclopedia articles for masked language modeling: 2,088,628 + 245,569 words.

    An example is a window of words, with one label per word. Words are separated by blanks, and every line ends with
    <eos>. Word ids are in the order of first appearance in the training, validation and test files (33,278 in all). The
    last id is the mask: training masks each word with probability 0.15, and the test set always masks the same words.
    Incomplete rows and windows are dropped.

    Parameters
    ----------
    rows : the number of rows that the training text is cut into; with the partition "rows" a device holds whole rows.
    test_rows : the same for the test text.
    length : the number of words of a window.
    most_words : keep this many of the most frequent words of the training text; the others become <unk>. None: all.
    published : whether to add the unused id that HeteroFL's published sizes include.
    test_order : the order of test windows, which decides the batches that perplexity is a mean over: row after row, or
        by "columns", the first windows of all rows, then the second ones: with `test_rows` windows per batch, those of
        HeteroFL's code.
    """
    words, train, test = _read(_find_folder(folder))
    if most_words is not None and most_words < len(words):
        words, (train, test) = _limit_vocabulary(words, train, test, most_words)
    words += ["<unused>"] * published
    mask = len(words)
    x, y = (torch.from_numpy(_windows(*part, length)) for part in ((train, rows), (test, test_rows)))
    own = torch.arange(len(y)).view(test_rows, -1)
    order = own.T.flatten() if test_order == "columns" else own.flatten()
    hidden = generator(0, MASKED_TEST_TOKENS).random(y.shape) < MASK_CHANCE
    tests = Examples(y.masked_fill(torch.from_numpy(hidden), mask)[order], y[order])
    groups = _row_of(x, rows, 0), _row_of(y, test_rows, rows)[order]  # no test row continues a training row
    preparation = Preparation(mask_chance=MASK_CHANCE, mask_token=mask)
    return Dataset("wikitext2", Examples(x, x), tests, mask, preparation, mask + 1, groups, (*words, "<mask>"))


def _find_folder(folder: Path) -> Path:
    for path in (folder / "wikitext-2", folder / "wikitext2", folder):
        if all((path / file).is_file() for file in FILES):
            return path
    raise adapters.missing_data_error("wikitext2", folder, f"{', '.join(FILES)} into {folder / 'wikitext-2'}")


def _read(folder: Path) -> tuple[list[str], Rows, Rows]:
    """All words, and the word ids of the training and the test text."""
    word_ids: dict[str, int] = {}
    train, _, test = [_read_ids(folder / file, word_ids) for file in FILES]
    return list(word_ids), train, test


def _read_ids(path: Path, word_ids: dict[str, int]) -> Rows:
    """The text as word ids; a new word gets the next id."""
    text: list[int] = []
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                text += [word_ids.setdefault(word, len(word_ids)) for word in (*line.split(), "<eos>")]
    except UnicodeDecodeError as problem:
        raise DataBroken(f"{path} is not text in UTF-8: {problem}", "Download the file again.") from problem
    return np.array(text, dtype=np.int64)


def _limit_vocabulary(words: list[str], train: Rows, test: Rows, size: int) -> tuple[list[str], tuple[Rows, Rows]]:
    """The most frequent words in their old order, always with <unk>, and both texts in new ids."""
    words = words if UNKNOWN in words else [*words, UNKNOWN]
    unknown = words.index(UNKNOWN)
    frequent = sort_by_frequency(np.bincount(train, minlength=len(words)))
    kept = np.sort([unknown, *frequent[frequent != unknown][: size - 1]])
    new_ids = np.full(len(words), np.searchsorted(kept, unknown))
    new_ids[kept] = np.arange(len(kept))
    return [words[word_id] for word_id in kept], (new_ids[train], new_ids[test])


def _windows(text: Rows, rows: int, length: int) -> Rows:
    """[windows, length], row by row."""
    row_length = len(text) // rows
    if row_length < length:
        hint = "Use the complete files, or set fewer rows or a smaller length."
        raise DataBroken(f"{len(text)} words do not fill {rows} rows of {length}", hint)
    return text[: rows * row_length].reshape(rows, row_length)[:, : row_length // length * length].reshape(-1, length)


def _row_of(windows: torch.Tensor, rows: int, first: int) -> torch.Tensor:
    return torch.arange(first, first + rows).repeat_interleave(len(windows) // rows)

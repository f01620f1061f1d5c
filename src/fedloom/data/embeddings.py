"""Vocabularies: which words to keep, and pretrained word vectors such as GloVe's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .dataset import DataBroken, DataMissing
from .partition import Rows

Vector = npt.NDArray[np.float32]

UNKNOWN = "<unk>"


def sort_by_frequency(counts: Rows) -> Rows:
    """Word ids by descending count; the lowest id first among equals."""
    return np.argsort(-counts, kind="stable")


def read_word_vectors(path: Path, vocabulary: Sequence[str]) -> Vector:
    """Read pretrained word vectors, such as GloVe's, for a vocabulary.

    Parameters
    ----------
    path : a text file with one word and its numbers per line.
    vocabulary : the words.

    Returns
    -------
    The vectors, [words, width]; zeros for words that are not in the file.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            width = len(file.readline().split()) - 1
            file.seek(0)
            found = dict(_parse_lines(file, dict(zip(vocabulary, range(len(vocabulary)), strict=True)), width))
    except FileNotFoundError:
        raise DataMissing(f"no word vectors at {path}", "Put a text file of GloVe's there.") from None
    except ValueError as problem:
        raise DataBroken(f"{path} is not a file of word vectors: {problem}", "Download it again.") from problem
    if not found:
        raise DataBroken(f"{path} has none of the {len(vocabulary)} words", "Take vectors of the text's language.")
    vectors = np.zeros((len(vocabulary), width), np.float32)
    vectors[list(found)] = list(found.values())
    return vectors


def _parse_lines(file: Iterable[str], numbers: Mapping[str, int], width: int) -> Iterator[tuple[int, Vector]]:
    for line in file:
        word, _, rest = line.rstrip().partition(" ")
        if word not in numbers:
            continue
        vector = rest.split(" ")
        if len(vector) < width:
            raise ValueError(f"{len(vector)} numbers for {word!r}, not {width}")
        if len(vector) == width:  # longer lines belong to a phrase that starts with this word
            yield numbers[word], np.array(vector, np.float32)

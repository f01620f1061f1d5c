"""Words and their numbers: how a text's vocabulary is cut down, and the vectors that others have learnt for words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .dataset import DataBroken, DataMissing
from .partition import Rows

Vector = npt.NDArray[np.float32]

UNKNOWN = "<unk>"


def most_frequent(counts: Rows) -> Rows:
    """The numbers of words by how often they occur, the most frequent first and the lowest number among equals."""
    return np.argsort(-counts, kind="stable")


def word_vectors(path: Path, vocabulary: Sequence[str]) -> Vector:
    """The vectors [words, width] of a vocabulary from a text file such as GloVe's, a word and its numbers a line.

    Words that are not in the file have a row of zeros.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            width = len(file.readline().split()) - 1
            file.seek(0)
            found = dict(_known(file, dict(zip(vocabulary, range(len(vocabulary)), strict=True)), width))
    except FileNotFoundError:
        raise DataMissing(f"there are no word vectors at {path}", "Put a text file of GloVe's there.") from None
    except ValueError as problem:
        raise DataBroken(f"{path} is not a file of word vectors: {problem}", "Download it again.") from problem
    if not found:
        raise DataBroken(f"{path} has none of the {len(vocabulary)} words", "Take vectors of the text's language.")
    vectors = np.zeros((len(vocabulary), width), np.float32)
    vectors[list(found)] = list(found.values())
    return vectors


def _known(file: Iterable[str], numbers: Mapping[str, int], width: int) -> Iterator[tuple[int, Vector]]:
    for line in file:
        word, _, rest = line.rstrip().partition(" ")
        if word not in numbers:
            continue
        vector = rest.split(" ")
        if len(vector) < width:
            raise ValueError(f"{len(vector)} numbers for {word!r}, not {width}")
        if len(vector) == width:  # longer: the line of a phrase that only starts with this word
            yield numbers[word], np.array(vector, np.float32)

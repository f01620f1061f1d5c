"""Cut src/fedloom/data/bundled/fashion_mini.npz out of Fashion-MNIST: 200 training and 50 test images per class.

The images come from Debian's package dataset-fashion-mnist (`dpkg -L dataset-fashion-mnist` shows its folder); any
folder with the four official idx files gives the same result. Nothing is drawn at random. Run, from the root:

    PYTHONPATH=src python scripts/cut_fashion_mini.py FOLDER [OUTPUT]
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedloom.data.idx import read_folder

OUTPUT = Path(__file__).parents[1] / "src" / "fedloom" / "data" / "bundled" / "fashion_mini.npz"


def main(folder: Path, output: Path = OUTPUT) -> None:
    """Write the cut of the set in `folder`."""
    whole = read_folder(folder)
    if whole is None:
        raise SystemExit(f"{folder} does not hold the four idx files of Fashion-MNIST")
    train, test = first_of_each_label(whole.train_labels, 200), first_of_each_label(whole.test_labels, 50)
    np.savez_compressed(
        output,
        train_images=whole.train_images[train],
        train_labels=whole.train_labels[train],
        test_images=whole.test_images[test],
        test_labels=whole.test_labels[test],
    )


def first_of_each_label(labels: npt.NDArray[np.uint8], count: int) -> npt.NDArray[np.int64]:
    """The first `count` rows of every label, in the order of the file."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in range(10)]))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))

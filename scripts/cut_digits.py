"""Write src/fedloom/data/bundled/digits.npz from scikit-learn's 8 x 8 digits: 1,437 training and 360 test images.

Grey values 0..16 become bytes: value · 255 / 16, rounded. Every label gives the same share of test images, spread
evenly over its rows; nothing is drawn at random. Needs scikit-learn. Run, from the root:

    python scripts/cut_digits.py [OUTPUT]
"""

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

OUTPUT = Path(__file__).parents[1] / "src" / "fedloom" / "data" / "bundled" / "digits.npz"
TEST_IMAGES = 360


def main(output: Path = OUTPUT) -> None:
    """Write the split set."""
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    test = test_rows(labels, TEST_IMAGES)
    train = np.setdiff1d(np.arange(len(labels)), test)
    np.savez_compressed(
        output,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
    )


def test_rows(labels: npt.NDArray[np.uint8], total: int) -> npt.NDArray[np.int64]:
    """As many rows of each label as its share of `total` (largest remainders rounded up), evenly spaced."""
    sizes = np.bincount(labels)
    shares = sizes * total / len(labels)
    counts = np.floor(shares).astype(np.int64)
    counts[np.argsort(counts - shares, kind="stable")[: total - counts.sum()]] += 1
    chosen = []
    for label, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        places = ((np.arange(count) + 0.5) * size / count).astype(np.int64)
        chosen.append(np.flatnonzero(labels == label)[places])
    return np.sort(np.concatenate(chosen))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))

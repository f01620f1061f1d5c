"""The two small data sets inside the package, so that everything can be tried with no download.

Origin and license of each are in bundled/LICENSES.txt; scripts/cut_*.py made the files.
"""

from pathlib import Path

from .adapters import as_dataset
from .dataset import Dataset
from .npz import read_npz
from .preparation import PREPARATIONS

_BUNDLED = Path(__file__).parent / "bundled"


def digits() -> Dataset:
    """Handwritten digits: 1,437 + 360 grey images of 8 x 8."""
    return as_dataset("digits", read_npz(_BUNDLED / "digits.npz"), 10, PREPARATIONS["plain"])


def fashion_mini() -> Dataset:
    """A cut of Fashion-MNIST: 2,000 + 500 grey images of 28 x 28, every class as often."""
    return as_dataset("fashion-mini", read_npz(_BUNDLED / "fashion_mini.npz"), 10, PREPARATIONS["fashion"])

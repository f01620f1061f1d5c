"""Write src/fedloom/data/bundled/diabetes.npz from scikit-learn's diabetes data: 354 training and 88 test patients.

The ten measurements and the progression of the disease are as published; every fifth patient, in the published order,
is a test example. Needs scikit-learn. Run, from the root:

    python scripts/cut_diabetes.py [OUTPUT]
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

OUTPUT = Path(__file__).parents[1] / "src" / "fedloom" / "data" / "bundled" / "diabetes.npz"


def main(output: Path = OUTPUT) -> None:
    """Write the split set."""
    data = load_diabetes(scaled=False)
    measurements, progression = data.data.astype(np.float32), data.target.astype(np.float32)
    is_test = np.arange(len(progression)) % 5 == 4
    np.savez_compressed(
        output,
        x_train=measurements[~is_test],
        y_train=progression[~is_test],
        x_test=measurements[is_test],
        y_test=progression[is_test],
    )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit(__doc__)
    main(*map(Path, sys.argv[1:]))

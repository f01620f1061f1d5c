"""Speed and memory, as ratios measured side by side in one run. `python -m benchmarks`"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: one thread per process

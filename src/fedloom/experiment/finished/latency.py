"""How long a model takes on this machine."""

import statistics
import time
from functools import lru_cache

import torch

from ...models import Model
from ..running.run import one_thread

WARM_UPS, TIMED = 10, 100


@lru_cache(maxsize=4096)
def latency_ms(net: Model) -> float:
    """Of one example, in the plain module on one thread of this machine: the median of 100 runs after 10."""
    module, example, spent = net.module().eval(), net.blank(1), []
    with one_thread(), torch.inference_mode():
        for _ in range(WARM_UPS + TIMED):
            began = time.perf_counter()
            module(example)
            spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent[WARM_UPS:])

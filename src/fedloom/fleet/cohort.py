"""Who takes part in a round."""

import math

from ..seeds import generator
from .device import Device
from .tiers import Fleet


def draw_cohort(fleet: Fleet, participation: float, round_number: int) -> list[Device]:
    """The first ceil(share · N) of a random permutation of the devices that may take part, in order of name."""
    able = fleet.able(round_number)
    order = generator(fleet.seed, "cohort", round_number).permutation(len(able))
    chosen = order[: math.ceil(participation * len(able) - 1e-9)]
    return [fleet.device(able[index], round_number) for index in sorted(int(i) for i in chosen)]

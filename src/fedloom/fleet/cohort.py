"""Who takes part in a round."""

import math
from collections import Counter
from typing import Literal

from ..seeds import COHORT, POISSON_COHORT, generator
from .device import Device
from .tiers import Fleet
from .trace import ALWAYS, Trace

Sampling = Literal["fixed_size", "poisson"]


def draw_cohort(
    fleet: Fleet,
    participation: float,
    round_number: int,
    trace: Trace = ALWAYS,
    over_selection: float = 0.0,
    sampling: Sampling = "fixed_size",
) -> list[Device]:
    """The first ceil(share · N) of a random permutation of the devices that may take part, in order of name. Who is not
    there is passed over for the next; `over_selection` adds a share of that number to it."""
    if sampling == "poisson":
        return _each_by_chance(fleet, participation * (1 + over_selection), round_number, trace)
    able = fleet.able(round_number)
    order = generator(fleet.seed, COHORT, round_number).permutation(len(able))
    there = [able[index] for index in order if trace.there(able[index], round_number)]
    wanted = math.ceil(cohort_size(fleet, participation, round_number) * (1 + over_selection) - 1e-9)
    return [fleet.device(index, round_number) for index in sorted(there[:wanted])]


def cohort_size(fleet: Fleet, participation: float, round_number: int) -> int:
    """How many devices a round needs."""
    return math.ceil(participation * len(fleet.able(round_number)) - 1e-9)


def _each_by_chance(fleet: Fleet, chance: float, round_number: int, trace: Trace) -> list[Device]:
    """Each device that may take part does so with that chance, whatever the others do: so a cohort can be of any size,
    and whether one device is in it tells nothing about another."""
    able = fleet.able(round_number)
    drawn = generator(fleet.seed, POISSON_COHORT, round_number).random(len(able)) < chance
    there = [index for index, chosen in zip(able, drawn, strict=True) if chosen and trace.there(index, round_number)]
    return [fleet.device(index, round_number) for index in there]


def expected_voters(fleet: Fleet, participation: float) -> dict[str, float]:
    """Tier by tier how many devices are in a cohort on average: from what is known of the fleet before any round."""
    if fleet.assignment == "redrawn":
        members = fleet.size - len(fleet.unseen)
        shares = {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        return {tier.name: participation * members * shares[tier.name] for tier in fleet.served}
    members_of = Counter(device.tier for device in fleet.members(1))
    return {tier.name: participation * members_of[tier.name] for tier in fleet.served}

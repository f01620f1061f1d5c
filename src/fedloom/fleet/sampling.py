"""Who takes part in a round.

Who can be reached in which rounds, from a file: whoever cannot is not asked.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np

from ..seeds import COHORT, POISSON_COHORT, generator
from .device import Device
from .tiers import Fleet

Span = tuple[int, int]
"""From one round to another, both counted."""


class BadTrace(ValueError):  # noqa: N818 - named for what is wrong
    """A file that says nothing, or nothing possible, about the fleet's devices."""


@dataclass(frozen=True)
class AvailabilityTrace:
    """By index of the device the rounds in which it is there; a device that is not named always is. After `period`
    rounds, if there is one, all begins anew."""

    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    period: int | None = None

    def is_available(self, index: int, round_number: int) -> bool:
        if index not in self.spans:
            return True
        number = round_number if self.period is None else (round_number - 1) % self.period + 1
        return any(first <= number <= last for first, last in self.spans[index])


ALWAYS = AvailabilityTrace()


def read_trace(path: Path, devices: int) -> AvailabilityTrace:
    """A JSON object or an npz file, by the name's ending."""
    try:
        made = _from_npz(path) if path.suffix == ".npz" else _from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BadTrace(f"there is no file {path}") from None
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise BadTrace(f"{path} is not a trace: {error}") from error
    unknown = [index for index in made.spans if not 0 <= index < devices]
    if unknown:
        raise BadTrace(f"{path} names device {unknown[0]}; there are {devices}, from 0 on")
    return made


def _from_json(said: Any) -> AvailabilityTrace:
    """{"available": {"3": [[1, 5], [9, 12]]}, "period": 20}"""
    if not isinstance(said, dict) or not isinstance(said.get("available"), dict):
        raise ValueError('a table with the key "available" is needed')
    period = said.get("period")
    if period is not None and (type(period) is not int or period < 1):
        raise ValueError(f"period must be a whole number from 1 on, not {period!r}")
    return AvailabilityTrace({int(name): tuple(map(_span, spans)) for name, spans in said["available"].items()}, period)


def _span(said: Any) -> Span:
    first, last = said
    if type(first) is not int or type(last) is not int or not 1 <= first <= last:
        raise ValueError(f"{said} is not a first and a last round")
    return first, last


def _from_npz(path: Path) -> AvailabilityTrace:
    """`available`, truth values [devices, rounds]; its columns are gone through again and again."""
    with np.load(path, allow_pickle=False) as held:
        table = held["available"]
    if table.ndim != 2 or table.dtype != np.bool_ or not table.shape[1]:
        raise ValueError("`available` must be truth values, devices by rounds")
    return AvailabilityTrace({index: _spans(row) for index, row in enumerate(table)}, table.shape[1])


def _spans(row: np.ndarray) -> tuple[Span, ...]:
    """Where truth begins and where it ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return tuple((int(first) + 1, int(end)) for first, end in edges.reshape(-1, 2))


Sampling = Literal["fixed_size", "poisson"]


def draw_cohort(
    fleet: Fleet,
    participation: float,
    round_number: int,
    trace: AvailabilityTrace = ALWAYS,
    over_selection: float = 0.0,
    sampling: Sampling = "fixed_size",
) -> list[Device]:
    """The first ceil(share · N) of a random permutation of the devices that may take part, in order of name. Who is not
    there is passed over for the next; `over_selection` adds a share of that number to it."""
    if sampling == "poisson":
        return _each_by_chance(fleet, participation * (1 + over_selection), round_number, trace)
    able = fleet.eligible_indices(round_number)
    order = generator(fleet.seed, COHORT, round_number).permutation(len(able))
    there = [able[index] for index in order if trace.is_available(able[index], round_number)]
    wanted = math.ceil(cohort_size(fleet, participation, round_number) * (1 + over_selection) - 1e-9)
    return [fleet.device(index, round_number) for index in sorted(there[:wanted])]


def cohort_size(fleet: Fleet, participation: float, round_number: int) -> int:
    """How many devices a round needs."""
    return math.ceil(participation * len(fleet.eligible_indices(round_number)) - 1e-9)


def _each_by_chance(fleet: Fleet, chance: float, round_number: int, trace: AvailabilityTrace) -> list[Device]:
    """Each device that may take part does so with that chance, whatever the others do: so a cohort can be of any size,
    and whether one device is in it tells nothing about another."""
    able = fleet.eligible_indices(round_number)
    drawn = generator(fleet.seed, POISSON_COHORT, round_number).random(len(able)) < chance
    there = [index for index, chosen in zip(able, drawn, strict=True) if chosen and trace.is_available(index, round_number)]
    return [fleet.device(index, round_number) for index in there]


def expected_participants(fleet: Fleet, participation: float) -> dict[str, float]:
    """Tier by tier how many devices are in a cohort on average: from what is known of the fleet before any round."""
    if fleet.assignment == "redrawn":
        members = fleet.size - len(fleet.holdout_devices)
        shares = {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        return {tier.name: participation * members * shares[tier.name] for tier in fleet.active_tiers}
    members_of = Counter(device.tier for device in fleet.eligible_devices(1))
    return {tier.name: participation * members_of[tier.name] for tier in fleet.active_tiers}

"""Client sampling: which devices form the cohort of a round, given an availability trace."""

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

Sampling = Literal["fixed_size", "poisson"]
Span = tuple[int, int]
"""(first round, last round), both included."""


class InvalidTrace(ValueError):  # noqa: N818 - named for what is wrong
    """A file that is not an availability trace of the fleet."""


@dataclass(frozen=True)
class AvailabilityTrace:
    """Device index -> the rounds in which it is available; devices that are not listed always are.

    With a `period`, the trace repeats after that many rounds.
    """

    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    period: int | None = None

    def is_available(self, index: int, round_number: int) -> bool:
        if index not in self.spans:
            return True
        number = round_number if self.period is None else (round_number - 1) % self.period + 1
        return any(first <= number <= last for first, last in self.spans[index])


ALWAYS = AvailabilityTrace()


def draw_cohort(
    fleet: Fleet,
    participation: float,
    round_number: int,
    trace: AvailabilityTrace = ALWAYS,
    over_selection: float = 0.0,
    sampling: Sampling = "fixed_size",
) -> list[Device]:
    """Draw the devices of a round, in order of name.

    Parameters
    ----------
    fleet : the fleet.
    participation : the share of the eligible devices that take part.
    round_number : the round.
    trace : which devices are available in which rounds.
    over_selection : draw more devices, by a factor of 1 + `over_selection`.
    sampling : "fixed_size": the first ceil(participation · N) available devices of a random permutation of the N
        eligible ones; "poisson": each eligible device independently.
    """
    if sampling == "poisson":
        return _draw_poisson_cohort(fleet, participation * (1 + over_selection), round_number, trace)
    eligible = fleet.eligible_indices(round_number)
    order = generator(fleet.seed, COHORT, round_number).permutation(len(eligible))
    available = [eligible[index] for index in order if trace.is_available(eligible[index], round_number)]
    count = math.ceil(cohort_size(fleet, participation, round_number) * (1 + over_selection) - 1e-9)
    return [fleet.device(index, round_number) for index in sorted(available[:count])]


def cohort_size(fleet: Fleet, participation: float, round_number: int) -> int:
    """The number of devices of a round, without over-selection."""
    return math.ceil(participation * len(fleet.eligible_indices(round_number)) - 1e-9)


def _draw_poisson_cohort(fleet: Fleet, probability: float, round_number: int, trace: AvailabilityTrace) -> list[Device]:
    """Each device independently, so that its presence reveals nothing about another's."""
    eligible = fleet.eligible_indices(round_number)
    drawn = generator(fleet.seed, POISSON_COHORT, round_number).random(len(eligible)) < probability
    chosen = [
        index
        for index, is_drawn in zip(eligible, drawn, strict=True)
        if is_drawn and trace.is_available(index, round_number)
    ]
    return [fleet.device(index, round_number) for index in chosen]


def expected_participants(fleet: Fleet, participation: float) -> dict[str, float]:
    """Tier -> the expected number of its devices in a cohort, from what is known before the first round.

    Parameters
    ----------
    fleet : the fleet.
    participation : the share of the eligible devices that take part.
    """
    if fleet.assignment == "redrawn":
        devices = fleet.size - len(fleet.holdout_devices)
        shares = {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        return {tier.name: participation * devices * shares[tier.name] for tier in fleet.active_tiers}
    counts = Counter(device.tier for device in fleet.eligible_devices(1))
    return {tier.name: participation * counts[tier.name] for tier in fleet.active_tiers}


def read_trace(path: Path, devices: int) -> AvailabilityTrace:
    """Read a trace from a JSON or npz file, by its suffix."""
    try:
        trace = _from_npz(path) if path.suffix == ".npz" else _from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InvalidTrace(f"there is no file {path}") from None
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise InvalidTrace(f"{path} is not a trace: {error}") from error
    unknown = [index for index in trace.spans if not 0 <= index < devices]
    if unknown:
        raise InvalidTrace(f"{path} names device {unknown[0]}; there are {devices}, from 0 on")
    return trace


def _from_json(document: Any) -> AvailabilityTrace:
    """{"available": {"3": [[1, 5], [9, 12]]}, "period": 20}"""
    if not isinstance(document, dict) or not isinstance(document.get("available"), dict):
        raise ValueError('a table with the key "available" is needed')
    period = document.get("period")
    if period is not None and (type(period) is not int or period < 1):
        raise ValueError(f"period must be a whole number from 1 on, not {period!r}")
    spans = {int(name): tuple(map(_read_span, spans)) for name, spans in document["available"].items()}
    return AvailabilityTrace(spans, period)


def _read_span(value: Any) -> Span:
    first, last = value
    if type(first) is not int or type(last) is not int or not 1 <= first <= last:
        raise ValueError(f"{value} is not a first and a last round")
    return first, last


def _from_npz(path: Path) -> AvailabilityTrace:
    """`available`, booleans [devices, rounds]; the columns repeat."""
    with np.load(path, allow_pickle=False) as arrays:
        table = arrays["available"]
    if table.ndim != 2 or table.dtype != np.bool_ or not table.shape[1]:
        raise ValueError("`available` must be truth values, devices by rounds")
    return AvailabilityTrace({index: _true_spans(row) for index, row in enumerate(table)}, table.shape[1])


def _true_spans(row: np.ndarray) -> tuple[Span, ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return tuple((int(first) + 1, int(end)) for first, end in edges.reshape(-1, 2))

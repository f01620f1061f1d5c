"""What a recipe costs per tier, before it is spent."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..engines import Rehearsal
from ..fleet import Fleet, Turn
from ..methods import Method
from ..models import cost
from .assemble import build, outline
from .latency import latency_ms
from .load import Loaded
from .tables import Tables


@dataclass(frozen=True)
class TierCost:
    """Of one device of a tier: its model, and what one round moves to and from it."""

    name: str
    parameters: int
    macs: int
    published_flops: int
    bytes_down: int
    bytes_up: int
    latency_ms: float | None = None  # of one example on this machine, where it was asked for

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def tier_costs(loaded: Loaded, tables: Tables, folder: Path, timed: bool = False) -> list[TierCost]:
    """Found by rehearsing a round with one device of each tier; needs no data if the data set is a known one."""
    fleet, method = build(loaded, tables, outline(loaded, tables, folder))
    moved = rehearse(method, fleet)
    found = []
    for tier in fleet.tiers:
        spent = cost(tier.model)
        found.append(
            TierCost(
                tier.name, spent.parameters, spent.macs, spent.published_flops,
                moved.down.get(tier.name, 0), moved.up.get(tier.name, 0), latency_ms(tier.model) if timed else None,
            )
        )  # fmt: skip
    return found


def rehearse(method: Method, fleet: Fleet) -> Rehearsal:
    """One round with one device of each tier, without devices."""
    engine = Rehearsal()
    one_of_each = Fleet(fleet.tiers, tuple(1 / len(fleet.tiers) for _ in fleet.tiers), len(fleet.tiers), fleet.seed)
    method.round(method.start(fleet, fleet.seed), Turn(1, one_of_each.devices(1), one_of_each, engine))
    return engine

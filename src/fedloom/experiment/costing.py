"""What a recipe costs per tier, before it is spent."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..engines import Rehearsal
from ..fleet import Fleet, Turn
from ..methods import Method
from ..models import cost
from .assemble import build
from .latency import latency_ms
from .load import Loaded
from .sources import Outline, outline, server_rows
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
    seen = outline(loaded, tables, folder)
    fleet, method = build(loaded, tables, seen)
    moved = rehearse(loaded, method, fleet, seen)
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


def rehearse(loaded: Loaded, method: Method, fleet: Fleet, seen: Outline) -> Rehearsal:
    """The second round with one device of each tier, and no devices: in the first some have nothing to tell yet."""
    data, every = loaded.recipe.data, len(seen.labels.train)
    held = (every - len(server_rows(loaded, every))) // data.devices
    shown = 0 if data.public is None else every if data.public.source == "train_pool" else data.public.examples
    public = torch.zeros(shown, *seen.stored_shape, dtype=torch.uint8) if shown else None
    shares = tuple(1 / len(fleet.tiers) for _ in fleet.tiers)
    one_of_each = replace(fleet, shares=shares, size=len(fleet.tiers), assignment="fixed", unseen=frozenset())
    server = method.start(one_of_each, fleet.seed)
    for number in (1, 2):
        engine = Rehearsal(lambda device: min(held, data.most_examples or held))
        cohort = one_of_each.members(number)
        server = method.round(server, Turn(number, cohort, one_of_each, engine, public=public))
    return engine

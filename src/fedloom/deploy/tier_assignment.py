"""Which device of a real fleet is which, by its key, and which tier it is given: the largest that fits and that its key
allows."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.costs import tier_costs
from ..analysis.hardware import Machine
from ..analysis.planning import plan_fleet
from ..engines import Refusal
from ..fleet import Fleet, parameters
from ..recipe.errors import RecipeIssue
from ..recipe.load import Loaded, load
from ..recipe.registry import Registry
from ..runs.state import RunState
from .registry import FleetRegistry
from .remote import numbered
from .runtime import Config

if TYPE_CHECKING:
    from ..flower.nodes import Place


MEASURED = ("speed", "memory", "bandwidth")


def by_key(book: FleetRegistry, fleet: Fleet) -> "Place":
    """A node is the device its key is for, whatever it says; and if it says otherwise it takes no part."""

    def place(node: int, said: Config) -> str | Refusal | None:
        named = numbered(fleet, node, said)
        if not book.secure:
            return named
        number = book.number_of(node)
        if number is None:
            return Refusal("", "UNREGISTERED", f"node {node}: its key is none of this fleet's")
        if named != fleet.name(number):
            return Refusal(fleet.name(number), "OTHER_DEVICE", f"by its key it is {book.entries[number].name}")
        return named

    return place


def seated(
    loaded: Loaded, tables: Registry, data: Path, fleet: Fleet, book: FleetRegistry, said: Mapping[str, Config]
) -> Loaded:
    """The recipe with the tier of every device in it, from what devices have said of themselves, by name. So whoever
    reads the recipe knows them, and a run that goes on has the same."""
    sizes = [one.name for one in sorted(fleet.active_tiers, key=lambda tier: -parameters(tier.model.shapes()))]
    for entry in book.entries:
        if entry.cap is not None and entry.cap not in sizes:
            raise loaded.error(
                RecipeIssue(("tiers",), "TIER_NAME", f"{entry.name} may carry {entry.cap!r}, no tier here")
            )
    given = loaded.recipe.fleet.device_tiers
    if given:
        _refuse_above(loaded, book, sizes)
        return loaded
    spoken = [said.get(fleet.name(number)) for number in range(fleet.size)]
    machines = [machine(book.entries[n].name, one or {}, loaded.recipe.faults.deadline) for n, one in enumerate(spoken)]
    planned = plan_fleet(loaded, tables, data, machines, tier_costs(loaded, tables, data, memory=True)).planned
    fits = [None if one.fit is None else one.fit.tier for one in planned]
    document = loaded.recipe.document()
    document["fleet"]["device_tiers"] = list(largest_allowed([one.cap for one in book.entries], fits, sizes))
    return load(json.loads(json.dumps(document)), tables)


def largest_allowed(caps: Sequence[str | None], fits: Sequence[str | None], sizes: Sequence[str]) -> tuple[str, ...]:
    """`sizes` are all tiers, the largest first. Who can carry none gets the smallest: it may yet surprise us."""
    given = []
    for cap, fit in zip(caps, fits, strict=True):
        allowed = sizes.index(cap) if cap else 0
        able = sizes.index(fit) if fit else len(sizes) - 1
        given.append(sizes[max(allowed, able)])
    return tuple(given)


def machine(name: str, said: Config, deadline: float | None) -> Machine:
    """As a device has measured itself; what it does not say, or says amiss, does not limit it."""
    told = said.get("machine")
    told = told if isinstance(told, dict) else {}
    speed, memory, bandwidth = (float(told[key]) if _amount(told.get(key)) else math.inf for key in MEASURED)
    examples = said.get("examples")
    held = examples if type(examples) is int and 0 < examples < 1 << 40 else None
    return Machine(name, speed, memory, bandwidth, deadline or math.inf, examples=held)


def rejected_connections(log: Path, standing: RunState) -> Iterator[Refusal]:
    """Whom the gate has turned away since the last time; how far that was read is part of how the run stands."""
    if not log.exists():
        return
    with log.open("rb") as file:
        file.seek(int(standing.others.get("gate", 0)))
        for line in file:
            if not line.endswith(b"\n"):
                break
            standing.others["gate"] = int(standing.others.get("gate", 0)) + len(line)
            said: dict[str, Any] = json.loads(line)
            yield Refusal("", said["code"], said["reason"])


def _refuse_above(loaded: Loaded, book: FleetRegistry, sizes: Sequence[str]) -> None:
    for entry, tier in zip(book.entries, loaded.recipe.fleet.device_tiers, strict=True):
        if entry.cap and sizes.index(tier) < sizes.index(entry.cap):
            said = f"{entry.name} is given {tier}, its key allows {entry.cap} at most"
            raise loaded.error(RecipeIssue(("fleet", "device_tiers"), "TIER_CAP", said))


def _amount(said: Any) -> bool:
    return isinstance(said, int | float) and not isinstance(said, bool) and math.isfinite(said) and said > 0

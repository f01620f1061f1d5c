"""What a recipe costs per tier, before it is spent."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..client import OPTIMIZERS
from ..engines import DryRun
from ..fleet import PLAIN, Fleet, RoundContext
from ..methods import Method
from ..models import cost
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.validation import instantiate
from ..runs.build import build
from ..runs.clock import Clock
from ..runs.compression import build_codec
from ..runs.data import Outline, outline, server_rows
from .profiling import latency_ms, training_memory


@dataclass(frozen=True)
class TierCost:
    """Of one device of a tier: its model, and what one round moves to and from it."""

    name: str
    parameters: int
    macs: int
    published_flops: int
    bytes_down: int
    bytes_up: int
    training_memory: int | None = None  # bytes of all tensors at the worst moment of training, where asked for
    bytes_down_compressed: int | None = None  # as they travel, where there is a codec
    bytes_up_compressed: int | None = None
    device_seconds: float | None = None  # of a round, where the recipe says how fast the tier is
    latency_ms: float | None = None  # of one example on this machine, where it was asked for

    @property
    def bytes_moved(self) -> int:
        """Bytes both ways, as they travel."""
        down, up = self.bytes_down_compressed, self.bytes_up_compressed
        return (self.bytes_down if down is None else down) + (self.bytes_up if up is None else up)

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def tier_costs(
    loaded: LoadedRecipe, registry: Registry, folder: Path, timed: bool = False, memory: bool = False
) -> list[TierCost]:
    """Found by rehearsing a round with one device of each tier; needs no data if the data set is a known one."""
    seen = outline(loaded, registry, folder)
    fleet, method = build(loaded, registry, seen)
    moved = dry_run(loaded, method, fleet, seen)
    coded = build_codec(loaded.recipe) is not None
    optimizer, batch = instantiate(OPTIMIZERS, loaded.recipe.training.optimizer)(), loaded.recipe.training.batch_size
    found = []
    for tier in fleet.tiers:
        spent = cost(tier.model)
        one = TierCost(
            tier.name, spent.parameters, spent.macs, spent.published_flops,
            moved.down.get(tier.name, 0), moved.up.get(tier.name, 0),
            training_memory(tier.model, batch, optimizer) if memory else None,
            moved.coded_down[tier.name] if coded else None, moved.coded_up[tier.name] if coded else None,
            latency_ms=latency_ms(tier.model) if timed else None,
        )  # fmt: skip
        found.append(replace(one, device_seconds=_device_seconds(loaded, method, fleet, one, seen)))
    return found


def _device_seconds(loaded: LoadedRecipe, method: Method, fleet: Fleet, spent: TierCost, seen: Outline) -> float | None:
    clock = Clock(loaded.recipe, method, {})
    if not clock.knows([spent.name]):
        return None
    device = next(one for one in one_device_per_tier(fleet).devices(1) if one.tier == spent.name)
    return clock.seconds(device, spent.bytes_moved, examples_per_device(loaded, seen))


def examples_per_device(loaded: LoadedRecipe, seen: Outline) -> int:
    """That a device holds, if all hold as many."""
    data, every = loaded.recipe.data, len(seen.labels.train)
    held = (every - len(server_rows(loaded, every))) // data.devices
    return min(held, data.max_examples or held)


def one_device_per_tier(fleet: Fleet) -> Fleet:
    """A fleet of the same tiers with a device for each."""
    shares = tuple(1 / len(fleet.tiers) for _ in fleet.tiers)
    return replace(
        fleet, shares=shares, size=len(fleet.tiers), assignment="fixed", holdout_devices=frozenset(), device_tiers=()
    )


def dry_run(loaded: LoadedRecipe, method: Method, fleet: Fleet, seen: Outline) -> DryRun:
    """The second round with one device of each tier, and no devices: in the first some have nothing to tell yet."""
    data, every, held = loaded.recipe.data, len(seen.labels.train), examples_per_device(loaded, seen)
    shown = 0 if data.public is None else every if data.public.source == "train_pool" else data.public.examples
    public = torch.zeros(shown, *seen.stored_shape, dtype=torch.uint8) if shown else None
    few = one_device_per_tier(fleet)
    server = method.start(few, fleet.seed)
    for number in (1, 2):
        engine = DryRun(lambda device: held, coding=build_codec(loaded.recipe) or PLAIN)
        server = method.round(server, RoundContext(number, few.eligible_devices(number), few, engine, public=public))
    return engine

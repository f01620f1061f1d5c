"""How long a round would take on the fleet's own devices: a figure that does not depend on the machine that simulates.

The slowest device decides: its bytes over its bandwidth, then three passes' worth of multiply-adds for each example it
trains on over its speed; and after that the server. Where devices may fail, whoever is still waited for decides.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..fleet import Device, Fleet, RoundContext
from ..fleet.speed import STRAGGLERS, DeviceSpeed, DeviceSpeeds
from ..methods import Method
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import Recipe
from ..recipe.validation import instantiate


@dataclass(frozen=True)
class Clock:
    recipe: Recipe
    method: Method
    device_speeds: DeviceSpeeds

    def knows(self, tiers: Iterable[str]) -> bool:
        """Whether the recipe says how fast these are."""
        return all(tier in self._able for tier in tiers)

    def seconds(self, device: Device, moved: int, examples: int) -> float:
        """Of one device that has moved so many bytes and trains on so many examples as often as the recipe says."""
        (speed, bandwidth), pace, part = (
            self._able[device.tier],
            self.device_speeds.get(device.name, DeviceSpeed()),
            self.recipe.training,
        )
        steps = part.epochs * -(-examples // part.batch_size)
        work = self.method.device_macs(device.model, part.epochs * examples, steps)
        return moved / (bandwidth * pace.bandwidth) + work / (speed * pace.speed)

    def round_seconds(self, context: RoundContext, waited: float | None = None) -> float | None:
        """Seconds of a round; None unless the recipe says how fast every tier that was asked is. `waited`: until when
        the server waited, where devices may fail."""
        traffic, speed = context.traffic, self.recipe.fleet.server_speed
        if not self.knows(traffic.devices[name].tier for name in traffic.compressed_by_device):
            return None
        held = {name: traffic.examples.get(name, 0) for name in traffic.compressed_by_device}
        server_macs = self.method.server_macs(context.fleet.global_model, sum(held.values()))
        if server_macs and speed is None:
            return None
        seconds = (
            self.seconds(traffic.devices[name], moved, held[name])
            for name, moved in traffic.compressed_by_device.items()
        )
        slowest = max(seconds, default=0.0) if waited is None else waited
        return slowest + server_macs / (speed or 1.0)

    @cached_property
    def _able(self) -> dict[str, tuple[float, float]]:
        return {one.name: (one.speed, one.bandwidth) for one in self.recipe.tiers if one.speed and one.bandwidth}


def build_clock(loaded: LoadedRecipe, method: Method, fleet: Fleet) -> Clock:
    said = loaded.recipe.faults.stragglers
    try:
        return Clock(loaded.recipe, method, instantiate(STRAGGLERS, said)(fleet) if said else {})
    except ValueError as error:
        raise loaded.error(RecipeIssue(("faults", "stragglers"), "RECIPE_VALUE", str(error))) from error

"""Simulated time of a round on the fleet's devices, independent of the machine that simulates.

A device needs its bytes over its bandwidth plus its multiply-adds over its speed. A round takes as long as the slowest
device that the server waits for, plus the server's own work.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..fleet import Device, Fleet, RoundContext
from ..fleet.speed import DeviceSpeed, DeviceSpeeds
from ..methods import Method, training_macs
from ..models import Model
from ..models.cost import log_uncounted
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.schema import Recipe
from ..recipe.validation import instantiate


@dataclass(frozen=True)
class Clock:
    recipe: Recipe
    method: Method
    device_speeds: DeviceSpeeds
    tier_models: Mapping[str, Model]

    def knows(self, tiers: Iterable[str]) -> bool:
        """Whether the recipe gives speed and bandwidth of all these tiers."""
        return all(tier in self._tier_speeds for tier in tiers)

    def seconds(self, device: Device, moved: int, examples: int) -> float:
        """Seconds of one device that moves this many bytes and trains on this many examples as the recipe says."""
        training, (speed, bandwidth) = self.recipe.training, self._tier_speeds[device.tier]
        factor = self.device_speeds.get(device.name, DeviceSpeed())
        steps = training.epochs * -(-examples // training.batch_size)
        macs = training_macs(self.method, device.model, self.tier_models, training.epochs * examples, steps)
        return moved / (bandwidth * factor.bandwidth) + macs / (speed * factor.speed)

    def round_seconds(self, context: RoundContext, waited: float | None = None) -> float | None:
        """Seconds of a round; None unless the speed of every asked tier is known. `waited`: how long the server waited
        for replies, if devices may fail."""
        traffic = context.traffic
        if not self.knows(traffic.devices[name].tier for name in traffic.compressed_by_device):
            return None
        examples = {name: traffic.examples.get(name, 0) for name in traffic.compressed_by_device}
        server_seconds = self.server_seconds(context.fleet.global_model, list(examples.values()))
        if server_seconds is None:
            return None
        seconds = (
            self.seconds(traffic.devices[name], moved, examples[name])
            for name, moved in traffic.compressed_by_device.items()
        )
        slowest = max(seconds, default=0.0) if waited is None else waited
        return slowest + server_seconds

    def server_seconds(self, global_model: Model, examples: Sequence[int]) -> float | None:
        """Seconds of the server's own training; None unless the recipe gives its speed, or it does not train.

        `examples`: the number of examples of each of the round's devices.
        """
        macs, speed = self.method.server_macs(global_model, examples), self.recipe.fleet.server_speed
        return macs / speed if speed else (None if macs else 0.0)

    @cached_property
    def _tier_speeds(self) -> dict[str, tuple[float, float]]:
        return {t.name: (t.speed, t.bandwidth) for t in self.recipe.tiers if t.speed and t.bandwidth}


def build_clock(loaded: LoadedRecipe, registries: Registries, method: Method, fleet: Fleet) -> Clock:
    config = loaded.recipe.faults.stragglers
    timed = {tier.name for tier in loaded.recipe.tiers if tier.speed}
    log_uncounted([tier.model for tier in fleet.active_tiers if tier.name in timed], "simulated seconds")
    try:
        speeds = instantiate(registries.stragglers, config)(fleet) if config else {}
        return Clock(loaded.recipe, method, speeds, fleet.tier_models)
    except ValueError as error:
        raise loaded.error(RecipeIssue(("faults", "stragglers"), "RECIPE_VALUE", str(error))) from error

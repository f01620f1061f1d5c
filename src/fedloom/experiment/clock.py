"""How long a round would take on the fleet's own devices: a figure that does not depend on the machine that simulates.

The slowest device decides: its bytes over its bandwidth, then three passes' worth of multiply-adds for each example it
trains on over its speed; and after that the server.
"""

from ..fleet import Turn
from .assemble import Experiment


def round_seconds(experiment: Experiment, turn: Turn) -> float | None:
    """None unless the recipe says how fast every tier that was asked is."""
    recipe, method = experiment.loaded.recipe, experiment.method
    able = {tier.name: (tier.speed, tier.bandwidth) for tier in recipe.tiers}
    slowest, seen = 0.0, 0
    for name, moved in turn.traffic.moved.items():
        device = turn.traffic.carriers[name]
        speed, bandwidth = able[device.tier]
        if speed is None or bandwidth is None:
            return None
        examples = turn.traffic.examples.get(name, 0)
        steps = recipe.training.epochs * -(-examples // recipe.training.batch_size)
        work = method.device_work(device.model, recipe.training.epochs * examples, steps)
        slowest, seen = max(slowest, moved / bandwidth + work / speed), seen + examples
    extra = method.server_work(experiment.fleet.whole, seen)
    if extra and recipe.fleet.server_speed is None:
        return None
    return slowest + extra / (recipe.fleet.server_speed or 1.0)

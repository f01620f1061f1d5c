"""Combine the devices' updates by a rule of your own: here the mean of the middle half of the values of each weight."""

from dataclasses import dataclass

from torch import Tensor

import fedloom as fl
from fedloom.footprints import Rule


@dataclass(frozen=True)
class MiddleHalf(Rule):
    """The coordinate-wise interquartile mean.

    A rule is applied to each region of the model that the same devices cover, so it works for devices of any size.
    """

    def aggregate(self, old: Tensor, values: Tensor, contributors: object) -> Tensor:
        quarter = len(values) // 4
        return values.sort(0).values[quarter : len(values) - quarter].mean(0)


fl.aggregation.register("middle_half", MiddleHalf)

sim = fl.Simulation(
    dataset="digits",
    devices=8,
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
    aggregation="middle_half",
)
for result in sim.rounds(3):
    print(result)
assert sim.to_recipe()["aggregation"]["rule"] == "middle_half"

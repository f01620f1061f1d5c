"""Divide the data by a rule of your own: here the labels of each device are neighbors."""

import numpy as np

import fedloom as fl
from fedloom.data import Labels, Partition


@fl.partitions.register("neighboring_labels")
def neighboring_labels(
    labels: Labels, devices: int, generator: np.random.Generator, *, labels_per_device: int = 3
) -> Partition:
    """Each device holds examples of `labels_per_device` consecutive labels.

    Parameters
    ----------
    labels_per_device : how many.
    """
    parts = []
    for given in (labels.train, labels.test):
        rows = []
        for device in range(devices):
            first = device * labels.classes // devices
            own = [(first + step) % labels.classes for step in range(labels_per_device)]
            of_device = np.flatnonzero(np.isin(given, own))
            rows.append(np.sort(generator.choice(of_device, len(given) // devices, replace=False)))
        parts.append(tuple(rows))
    return Partition(*parts)


sim = fl.Simulation(
    dataset="digits",
    partition=fl.partitions.neighboring_labels(devices=10, labels_per_device=2),
    tiers=fl.tiers(fl.models.mlp, {"hidden": [64]}, all={"share": 1.0}),
    method="fedavg",
    client=fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3)),
)
for result in sim.rounds(2):
    print(result)
# the name is known to recipes too
assert sim.to_recipe()["data"]["partition"] == {"kind": "neighboring_labels", "labels_per_device": 2}

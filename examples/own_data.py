"""Train on data of your own: arrays, a torch data set, or whatever a function returns."""

import numpy as np
import torch
from torch.utils.data import TensorDataset

import fedloom as fl

draw = np.random.default_rng(0)
y = draw.integers(0, 3, 600)
x = draw.normal(size=(600, 16)).astype(np.float32) + 2 * np.eye(3, 16, dtype=np.float32)[y]

tiers = fl.tiers(fl.models.mlp, {"hidden": [32]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5})
client = fl.ClientConfig(optimizer=fl.optimizers.sgd(lr=0.3))


def accuracy(dataset: object) -> float:
    """Of the small devices' model after three rounds."""
    sim = fl.Simulation(dataset, devices=6, tiers=tiers, method="heterofl", client=client)
    *_, last = sim.rounds(3)
    return last.metrics["small"]["accuracy"]


from_arrays = accuracy((x, y))  # a fifth is held out as the test set
from_parts = accuracy((x[:500], y[:500], x[500:], y[500:]))
from_torch = accuracy(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))

print(f"arrays {from_arrays:.1f} %, with a test set {from_parts:.1f} %, torch {from_torch:.1f} %")
assert min(from_arrays, from_parts, from_torch) > 50
assert from_arrays == from_torch  # the same examples: the same result

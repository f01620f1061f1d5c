"""Train on data of your own: arrays, a torch data set, a data frame, or time series of several users."""

import numpy as np
import pandas
import torch
from torch.utils.data import TensorDataset

import fedloom as fl
from fedloom.data import as_dataset

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
from_frame = accuracy((pandas.DataFrame(x).assign(label=y), "label"))

print(f"arrays {from_arrays:.1f} %, with tests {from_parts:.1f} %, torch {from_torch:.1f} %, frame {from_frame:.1f} %")
assert min(from_arrays, from_parts) > 50
assert from_arrays == from_torch == from_frame  # the same examples: the same result

# Signals of six users, in units of their own: a device for each user, normalized by the training examples.
signals = 40 + 9 * (draw.normal(size=(600, 3, 32)) + y[:, None, None])
users = np.array(["ada", "bob", "cyd", "dan", "eve", "fay"])[np.arange(600) % 6]
data = as_dataset(
    (signals, y), kind="series", groups=users, class_names=["sit", "walk", "run"], normalize=True, name="signals"
)
sim = fl.Simulation(
    data,
    partition=fl.partitions.natural(devices=6),
    tiers=fl.tiers(fl.models.convnet1d, {"hidden": [8, 8]}, large={"share": 0.5}, small={"share": 0.5, "width": 0.5}),
    method="heterofl",
)
*_, last = sim.rounds(3)
print(f"signals of {len(set(users))} users: {last.metrics['small']['accuracy']:.1f} %")
assert last.metrics["small"]["accuracy"] > 50

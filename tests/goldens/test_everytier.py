"""EveryTier compared with plain PyTorch in float64: a net of columns written out, a module per device, full batches.

The reference shares nothing with the package but the data, the sizes of the columns and the initial weights.
"""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.methods.everytier import EveryTier
from fedloom.testing import TinyWorld, largest_difference, tiny_model

LR, STEPS, ROUNDS, CLASSES = 0.1, 2, 3, 4
SIZES = (7, 5, 8, 6, 9, 4)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2], [1, 3]]
COLUMNS = ((3, 4), (2, 3), (2, 2))
HELD = {"a": 3, "b": 2, "c": 1}
pytestmark = pytest.mark.usefixtures("double")


def exits(w: dict[str, Tensor], held: int, x: Tensor, lateral_gradient: bool) -> list[Tensor]:
    maps, layers = [x], len(COLUMNS[0])
    for layer in range(layers):
        if layer:
            maps = [F.max_pool2d(one, 2) for one in maps]
        found = []
        for column in range(held):
            total = torch.zeros(())
            for number, one in enumerate(maps[: column + 1 if layer else 1]):
                own = number == column or layer == 0
                read = one if own or lateral_gradient else one.detach()
                total = total + F.conv2d(read, w[f"columns.{column}.layers.{layer}.convs.{number}.weight"], padding=1)
            found.append(F.relu(total))
        maps = found
    logits: list[Tensor] = []
    for column, one in enumerate(maps):
        own_answer = (
            one.mean((2, 3)) @ w[f"columns.{column}.classifier.weight"].T + w[f"columns.{column}.classifier.bias"]
        )
        logits.append(own_answer if column == 0 else logits[-1].detach() + own_answer)
    return logits


@pytest.mark.parametrize(
    ("calibration", "lateral_gradient", "feddyn", "trained"),
    [
        (1.0, True, 0.0, "all"),
        (0.5, False, 0.0, "all"),
        (0.0, True, 0.0, "all"),
        (1.0, True, 0.2, "all"),
        (1.0, True, 0.0, "own"),
    ],
)
def test_everytier_equals_plain_pytorch(
    calibration: float, lateral_gradient: bool, feddyn: float, trained: Literal["all", "own"]
) -> None:
    settings = {"columns": COLUMNS, "normalization": "none", "lateral_gradient": lateral_gradient}
    models = [(tier, tiny_model("columnnet", **settings, held=held)) for tier, held in HELD.items()]
    sim = TinyWorld.make(models=models, sizes=SIZES, labels=LABELS, schedule=Schedule(1000, STEPS), optimizer=Sgd(LR))
    method = EveryTier(calibration=calibration, feddyn=feddyn, exits=trained)
    made = sim.play(method, sim.engine(method), ROUNDS)["weights"]
    server = dict(sim.fleet.global_model.initial_weights(0))
    h = {name: torch.zeros_like(weight) for name, weight in server.items()}
    own = [{name: torch.zeros_like(server[name]) for name in device.model.shapes()} for device in sim.fleet.devices(1)]
    for number in range(1, ROUNDS + 1):
        totals = {name: torch.zeros_like(weight) for name, weight in server.items()}
        counts = dict.fromkeys(server, 0)
        for index, device in enumerate(sim.fleet.devices(number)):
            rows = torch.from_numpy(np.asarray(sim.partition.train[index]))
            x, y = sim.dataset.preparation(sim.dataset.train.x[rows]), sim.dataset.train.y[rows]
            seen = np.array([(y == label).sum() + 1 for label in range(CLASSES)], dtype=float)
            prior = calibration * torch.tensor(np.log(seen / seen.sum()))
            held = {name: server[name].clone().requires_grad_() for name in device.model.shapes()}
            for _ in range(STEPS):
                found = exits(held, HELD[device.tier], x, lateral_gradient)[0 if trained == "all" else -1 :]
                losses = [F.cross_entropy(logits + prior, y) for logits in found]
                grads = torch.autograd.grad(torch.stack(losses).sum(), list(held.values()), materialize_grads=True)
                with torch.no_grad():
                    for (name, weight), grad in zip(held.items(), grads, strict=True):
                        weight -= LR * (grad - own[index][name] + feddyn * (weight - server[name]))
            for name, weight in held.items():
                totals[name] += len(rows) * weight.detach()
                counts[name] += len(rows)
                own[index][name] = own[index][name] - feddyn * (weight.detach() - server[name])
        mean = {name: total / counts[name] for name, total in totals.items()}
        if feddyn:  # all devices take part, so the mean change is that of all that hold a weight
            h = {name: one - feddyn * (mean[name] - server[name]) for name, one in h.items()}
            mean = {name: one - h[name] / feddyn for name, one in mean.items()}
        server = mean
    assert largest_difference({"weights": made}, {"weights": server}) < 1e-12

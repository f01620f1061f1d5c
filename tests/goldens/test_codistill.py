"""Co-distillation compared with plain PyTorch in float64: a module per net and device, full batches.

The reference shares nothing with the package but the nets, the data and the initial weights.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.methods.codistill import CoDistill
from fedloom.models import Model
from fedloom.testing import TinyWorld, largest_difference, tiny_model

LR, CLIP, STEPS, ROUNDS, STRENGTH = 0.1, 0.5, 2, 3, 0.6
SIZES = (7, 5, 8, 6, 9, 4)
pytestmark = pytest.mark.usefixtures("double")


def models() -> dict[str, Model]:
    """Of two families; each costs less than the one before."""
    narrow = tiny_model("convnet", width=0.5)
    return {"a": tiny_model("preresnet", hidden=(6, 8)), "b": tiny_model("convnet"), "c": narrow}


def logits_of(module: nn.Module, x: Tensor) -> Tensor:
    return list(module(x).exits.values())[-1]


def toward(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    soft = (teacher.detach() / temperature).softmax(1)
    return temperature**2 * F.cross_entropy(logits / temperature, soft)


def loss_of(number: int, outputs: list[Tensor], y: Tensor, strength: float, temperature: float) -> Tensor:
    """The loss of one net, of those from small to large: the labels, and the mean output up to its own."""
    loss = F.cross_entropy(outputs[number], y)
    if number == 0:
        return loss
    return loss + strength * toward(outputs[number], sum(outputs[: number + 1]) / (number + 1), temperature)


def train(modules: list[nn.Module], x: Tensor, y: Tensor, **settings: Any) -> None:
    """Steps of gradient descent, with the gradient of each net clipped on its own."""
    for _ in range(STEPS):
        outputs = [logits_of(module, x) for module in modules]
        losses = [loss_of(number, outputs, y, **settings) for number in range(len(modules))]
        grads = [
            torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
            for loss, module in zip(losses, modules, strict=True)
        ]
        with torch.no_grad():
            for module, of_net in zip(modules, grads, strict=True):
                norm = torch.sqrt(sum(grad.square().sum() for grad in of_net))
                for weight, grad in zip(module.parameters(), of_net, strict=True):
                    weight -= LR * grad * min(1.0, CLIP / (float(norm) + 1e-6))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_codistill_equals_plain_pytorch(temperature: float) -> None:
    nets = models()
    optimizer = Sgd(LR, clip_norm=CLIP)
    sim = TinyWorld.make(models=[*nets.items()], sizes=SIZES, schedule=Schedule(1000, STEPS), optimizer=optimizer)
    method = CoDistill(distillation=STRENGTH, temperature=temperature, warm_up=2)
    made = sim.play(method, sim.engine(method), ROUNDS)["weights"]
    server = {name: dict(net.initial_weights(0)) for name, net in nets.items()}
    for number in range(1, ROUNDS + 1):
        totals = {name: {key: torch.zeros_like(w) for key, w in net.items()} for name, net in server.items()}
        counts = dict.fromkeys(server, 0)
        for index, device in enumerate(sim.fleet.devices(number)):
            rows = torch.from_numpy(np.asarray(sim.partition.train[index]))
            held = [name for name in reversed(nets) if name >= device.tier]  # from small to large
            modules = [nets[name].module().train() for name in held]
            with torch.no_grad():
                for name, module in zip(held, modules, strict=True):
                    for key, weight in module.named_parameters():
                        weight.copy_(server[name][key])
            x, y = sim.dataset.preparation(sim.dataset.train.x[rows]), sim.dataset.train.y[rows]
            strength = STRENGTH * min(1.0, (number - 1) / 2)
            train(modules, x, y, strength=strength, temperature=temperature)
            for name, module in zip(held, modules, strict=True):
                counts[name] += len(rows)
                for key, weight in module.named_parameters():
                    totals[name][key] += len(rows) * weight.detach()
        server = {name: {key: w / counts[name] for key, w in net.items()} for name, net in totals.items()}
    expected = {f"{name}:{key}": weight for name, net in server.items() for key, weight in net.items()}
    assert largest_difference({"weights": made}, {"weights": expected}) < 1e-12

"""DepthFL, ScaleFL, InclusiveFL and FIARSE compared with plain PyTorch in float64: one module per device, full batches.

The references share nothing with the package but the nets, the data and the initial weights.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.methods.depthfl import DepthFL
from fedloom.methods.fiarse import FIARSE
from fedloom.methods.inclusivefl import InclusiveFL
from fedloom.methods.scalefl import ScaleFL
from fedloom.models import Model
from fedloom.settings import FrozenDict
from fedloom.testing import TinyWorld, largest_difference, tiny_model

LR, STEPS, ROUNDS = 0.1, 2, 3
SIZES = (7, 5, 8, 6, 9, 4)
pytestmark = pytest.mark.usefixtures("double")

State = dict[str, Tensor]
Loss = Callable[[list[Tensor], Tensor], Tensor]


def depths(**widths: float) -> list[tuple[str, Model]]:
    """Three depths of a residual net with an exit after every stage, and widths if given."""
    net = {"hidden": (4, 6, 8), "blocks": (1, 1, 1), "exit_after": "every", "exit_pool": "global", "widest": 1.0}
    return [
        (name, tiny_model("preactresnet", **net, stages=stages, width=widths.get(name, 1.0)))
        for name, stages in (("a", 3), ("b", 2), ("c", 1))
    ]


def world(models: list[tuple[str, Model]]) -> TinyWorld:
    return TinyWorld.make(models=models, sizes=SIZES, schedule=Schedule(1000, STEPS), optimizer=Sgd(LR))


def examples(sim: TinyWorld, index: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.asarray(sim.partition.train[index]))
    return sim.dataset.preparation(sim.dataset.train.x[rows]), sim.dataset.train.y[rows]


def descend(module: nn.Module, x: Tensor, loss: Callable[[Any], Tensor], names: set[str] | None = None) -> State:
    """Full-batch steps of plain gradient descent on a loss of the module's outputs."""
    for _ in range(STEPS):
        module.zero_grad()
        loss(module(x)).backward()
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if weight.grad is not None and (names is None or name in names):
                    weight -= LR * weight.grad
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


def corner(large: Tensor, shape: torch.Size) -> Tensor:
    return large[tuple(slice(0, size) for size in shape)]


def loaded(model: Model, server: State) -> nn.Module:
    """A module with its part of the server's weights."""
    module = model.module().train()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(corner(server[name], weight.shape))
    return module


def mean_of(server: State, uploads: list[State], counts: list[float] | None = None) -> tuple[State, State]:
    """The mean of each entry over the uploads that have it, and over how many."""
    new, covered = {}, {}
    for name, old in server.items():
        total, mass = torch.zeros_like(old), torch.zeros_like(old)
        for upload, count in zip(uploads, counts or [1.0] * len(uploads), strict=True):
            if name in upload:
                corner(total, upload[name].shape).add_(count * upload[name])
                corner(mass, upload[name].shape).add_(count)
        new[name], covered[name] = torch.where(mass > 0, total / mass.clamp_min(1e-300), old), mass
    return new, covered


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_depthfl_equals_plain_pytorch(alpha: float) -> None:
    sim, method = world(depths()), DepthFL(distillation=0.8, ramp_up=2, feddyn=alpha)
    made = sim.play(method, sim.engine(method), ROUNDS)
    server = dict(sim.fleet.global_model.initial_weights(0))
    h = {name: torch.zeros_like(weight) for name, weight in server.items()}
    own = {
        device.name: {n: torch.zeros(s) for n, s in device.model.shapes().items()} for device in sim.fleet.devices(1)
    }
    for strength in (0.8 * np.exp(-5), 0.8 * np.exp(-5 / 4), 0.8):
        uploads = []
        for index, device in enumerate(sim.fleet.devices(1)):
            x, y = examples(sim, index)
            module = loaded(device.model, server)
            first = {name: weight.detach().clone() for name, weight in module.named_parameters()}

            def loss(outputs: Any) -> Tensor:
                exits = list(outputs.exits.values())
                total = sum(F.cross_entropy(logits, y) for logits in exits)  # noqa: B023
                for i, student in enumerate(exits):
                    for j, teacher in enumerate(exits):
                        total += strength * kl(student, teacher) / (len(exits) - 1) if i != j else 0  # noqa: B023
                for name, weight in module.named_parameters():  # noqa: B023
                    total -= (own[device.name][name] * weight).sum()  # noqa: B023
                    total += alpha / 2 * (weight - first[name]).square().sum()  # noqa: B023
                return total

            uploads.append(descend(module, x, loss))
            for name, weight in uploads[-1].items():
                own[device.name][name] -= alpha * (weight - first[name])
        mean, count = mean_of(server, uploads)
        if alpha:
            for name, new in mean.items():
                h[name] -= alpha * count[name] / len(SIZES) * (new - server[name])
                mean[name] = new - h[name] / alpha
        server = mean
    assert largest_difference({"weights": made["weights"]}, {"weights": server}) <= 1e-8


def test_scalefl_equals_plain_pytorch() -> None:
    sim, method = world(depths(b=0.75, c=0.5)), ScaleFL(distillation=0.3, temperature=2.0)
    made = sim.play(method, sim.engine(method), ROUNDS)
    server = dict(sim.fleet.global_model.initial_weights(0))
    for _ in range(ROUNDS):
        uploads = []
        for index, device in enumerate(sim.fleet.devices(1)):
            x, y = examples(sim, index)

            def loss(outputs: Any) -> Tensor:
                exits = list(outputs.exits.values())
                weights = torch.arange(1.0, len(exits) + 1) / sum(range(1, len(exits) + 1))
                losses = [F.cross_entropy(logits, y) for logits in exits]  # noqa: B023
                for i, logits in enumerate(exits[:-1]):
                    losses[i] = losses[i] + 0.3 * 4 * kl(logits / 2, exits[-1] / 2)
                return (weights * torch.stack(losses)).sum()

            uploads.append(descend(loaded(device.model, server), x, loss))
        server, _ = mean_of(server, uploads)
    assert largest_difference(made, {"weights": server}) <= 1e-8


def test_inclusivefl_equals_plain_pytorch() -> None:
    """Depths 4 and 2 of a net whose layers after the first are alike: layers 2 to 4 teach the top of depth 2."""
    net = {"hidden": (5, 5, 5, 5), "exit_after": "every", "normalization": "none", "input_shape": (1, 16, 16)}
    models = [("a", tiny_model("convnet", **net)), ("b", tiny_model("convnet", **net, depth=2))]
    sim = TinyWorld.make(
        models=models, sizes=SIZES, schedule=Schedule(1000, STEPS), optimizer=Sgd(LR), input_shape=(1, 16, 16)
    )
    method, beta = InclusiveFL(momentum=0.3), 0.3
    made = sim.play(method, sim.engine(method), ROUNDS)
    server = dict(sim.fleet.global_model.initial_weights(0))
    top = {key: server[f"blocks.1.0.{key}"] for key in ("weight", "bias")}
    momentum = {key: torch.zeros_like(weight) for key, weight in top.items()}
    for _ in range(ROUNDS):
        uploads, tops, larger, counts = [], [], [], {"a": [], "b": []}
        for index, device in enumerate(sim.fleet.devices(1)):
            x, y = examples(sim, index)
            own = {f"blocks.1.0.{key}": weight for key, weight in top.items()} if device.tier == "b" else {}
            module = loaded(device.model, {**server, **own})
            last = "exits.3" if device.tier == "a" else "exits.1"
            trained = {n for n, _ in module.named_parameters() if "exits" not in n or last in n}
            done = descend(module, x, lambda outputs: F.cross_entropy(outputs.logits, y), trained)  # noqa: B023
            done = {name: weight for name, weight in done.items() if name in trained}
            counts[device.tier].append(len(y))
            if device.tier == "a":
                larger.append(done)
            else:
                tops.append({key: done.pop(f"blocks.1.0.{key}") for key in top})
            uploads.append(done)
        mean, _ = mean_of(server, uploads, [float(size) for size in SIZES])
        small, _ = mean_of(top, tops, counts["b"])
        large, _ = mean_of(server, larger, counts["a"])
        top = {k: w + (1 - beta) * (small[k] - w) + beta * momentum[k] for k, w in top.items()}
        changes = {k: [large[f"blocks.{n}.0.{k}"] - server[f"blocks.{n}.0.{k}"] for n in (1, 2, 3)] for k in top}
        momentum, server = {key: sum(each) / 3 for key, each in changes.items()}, mean
    assert largest_difference({"weights": made["weights"]}, {"weights": server}) <= 1e-8
    own = {f"blocks.1.0.{key}": weight for key, weight in top.items()}
    found = method.eval_targets(made)["server"].weights(sim.fleet.tiers[1])  # type: ignore[union-attr, call-arg]
    assert largest_difference({"t": {name: found[name] for name in own}}, {"t": own}) <= 1e-8
    moved = {f"blocks.1.0.{key}": weight for key, weight in momentum.items()}
    assert largest_difference({"m": made["momentum:2"]}, {"m": moved}) <= 1e-8


def test_fiarse_equals_plain_pytorch() -> None:
    """The threshold's gradient comes from autograd, through a mask whose derivative is 2 t / (|w| + t)^2."""
    model = tiny_model("mlp", hidden=(6, 5))
    sim = world([("a", model), ("b", model), ("c", model)])
    sizes = {"a": 1.0, "b": 0.4, "c": 0.1}
    method = FIARSE(FrozenDict(sizes))
    made = sim.play(method, sim.engine(method), ROUNDS)
    server = dict(model.initial_weights(0))
    matrices = [name for name, weight in server.items() if weight.dim() == 2]
    for _ in range(ROUNDS):
        everything = torch.cat([server[name].abs().flatten() for name in matrices]).sort(descending=True).values
        total = {name: torch.zeros_like(weight) for name, weight in server.items()}
        count = {name: torch.zeros_like(weight) for name, weight in server.items()}
        for index, device in enumerate(sim.fleet.devices(1)):
            x, y = examples(sim, index)
            at = everything[int(sizes[device.tier] * len(everything)) - 1] if device.tier != "a" else torch.tensor(0.0)
            mask = {
                name: server[name].abs() >= at if name in matrices else server[name] == server[name] for name in server
            }
            weights = {name: (server[name] * mask[name]).requires_grad_() for name in server}
            for _ in range(STEPS):
                effective = dict(weights)
                for name in matrices if device.tier != "a" else []:
                    w = weights[name]
                    soft = -2 * at / (w.abs() + at)
                    effective[name] = w * (w.abs() >= at) * (1 + soft - soft.detach())
                loss = F.cross_entropy(torch.func.functional_call(model.module(), effective, (x,)).logits, y)
                grads = torch.autograd.grad(loss, list(weights.values()))
                weights = {
                    name: (weight - LR * grad).detach().requires_grad_()
                    for (name, weight), grad in zip(weights.items(), grads, strict=True)
                }
            for name in server:
                total[name] += weights[name].detach() * mask[name]
                count[name] += mask[name]
        server = {n: torch.where(count[n] > 0, total[n] / count[n].clamp_min(1), old) for n, old in server.items()}
    assert largest_difference({"weights": made["weights"]}, {"weights": server}) <= 1e-8
    assert largest_difference({"weights": server}, {"weights": model.initial_weights(0)}) > 1e-2

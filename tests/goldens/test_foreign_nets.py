"""FD, FedProto, FML, FedKD, FedGH and FedTGP compared with their papers' algorithms in plain torch and numpy.

Two rounds in float64 on four devices with two architectures, unequal sizes and labels. The reference knows nothing of
fedloom but the initial weights and the data: no blocks, no footprints, no `fit`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.methods import Method
from fedloom.methods.fd import FD
from fedloom.methods.fedgh import FedGH
from fedloom.methods.fedkd import FedKD
from fedloom.methods.fedproto import FedProto
from fedloom.methods.fedtgp import FedTGP
from fedloom.methods.fml import FML
from fedloom.models import Model
from fedloom.testing import TinyWorld, tiny_model
from fedloom.testing.doubles import committed_states

pytestmark = pytest.mark.usefixtures("double")

LR, STEPS, ROUNDS, CLASSES = 0.3, 2, 2, 4
LABELS = [[0, 1], [1, 2], [0, 1, 3], [1, 2]]  # 0 and 3 are on few devices, 1 on all
Weights = dict[str, Tensor]


@dataclass
class Net:
    """One device's net and data, in plain torch."""

    module: nn.Module
    x: Tensor
    y: Tensor
    weights: Weights

    def __call__(self, weights: Weights) -> tuple[Tensor, Tensor]:
        """Logits and what the last layer receives."""
        seen: list[Tensor] = []
        last = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)][-1]
        hook = last.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
        outputs: Any = functional_call(self.module, weights, (self.x,))
        hook.remove()
        return getattr(outputs, "logits", outputs), seen[0]

    @property
    def head(self) -> tuple[str, str]:
        weight, bias = list(self.weights)[-2:]
        return weight, bias

    def of_class(self, rows: Tensor) -> dict[int, Tensor]:
        """The mean of these rows for each class."""
        return {int(label): rows[self.y == label].mean(0) for label in self.y.unique()}


def descend(weights: Weights, loss: Callable[[Weights], Tensor], lr: float = LR) -> Weights:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    grads = torch.autograd.grad(loss(leaves), list(leaves.values()), allow_unused=True)
    return {n: w - lr * g if g is not None else w for (n, w), g in zip(weights.items(), grads, strict=True)}


def small(width: int) -> Model:
    return tiny_model("mlp", hidden=(width, 5))


@pytest.fixture
def world() -> TinyWorld:
    """Every step is SGD with all of a device's examples."""
    return TinyWorld.make(
        models=[("a", small(6)), ("b", small(4))],
        sizes=(8, 5, 6, 7),
        labels=LABELS,
        schedule=Schedule(batch_size=50, epochs=STEPS),
        optimizer=Sgd(LR),
    )


@pytest.fixture
def nets(world: TinyWorld) -> dict[str, Net]:
    found = {}
    for device in world.fleet.devices(1):
        rows = torch.from_numpy(world.partition.train[int(device.name)])
        x, y = world.dataset.preparation(world.dataset.train.x[rows]), world.dataset.train.y[rows]
        found[device.name] = Net(device.model.module(), x, y, device.model.initial_weights(world.seed))
    return found


def play(world: TinyWorld, method: Method) -> tuple[Any, dict[str, Any]]:
    engine = world.engine(method)
    server = world.play(method, engine, ROUNDS)
    assert world.refusals == []
    return server, committed_states(engine)


def assert_close(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)


def assert_nets(states: dict[str, Any], nets: dict[str, Net]) -> None:
    assert states.keys() == nets.keys()
    for name, net in nets.items():
        assert_close(states[name]["weights"], net.weights)


def test_fd_two_rounds_equal_algorithm_of_paper(world: TinyWorld, nets: dict[str, Net]) -> None:
    target: dict[str, dict[int, Tensor]] = {name: {} for name in nets}
    for _ in range(ROUNDS):
        local: dict[str, dict[int, Tensor]] = {}
        for name, net in nets.items():
            outputs: list[Tensor] = []

            def loss(weights: Weights, net: Net = net, known: Any = target[name], outputs: Any = outputs) -> Tensor:
                logits, _ = net(weights)
                outputs.append(logits.detach().softmax(1))
                total = F.cross_entropy(logits, net.y)
                for row, label in zip(logits, net.y.tolist(), strict=True):
                    if label in known:
                        total = total - 0.7 * (known[label] * row.log_softmax(0)).sum() / len(net.y)
                return total

            for _ in range(STEPS):
                net.weights = descend(net.weights, loss)
            local[name] = net.of_class(torch.stack(outputs).mean(0))
        for name in nets:
            for label in range(CLASSES):
                others = [means[label] for other, means in local.items() if other != name and label in means]
                if others:
                    target[name][label] = torch.stack(others).mean(0)
    server, states = play(world, FD(strength=0.7))
    assert_nets(states, nets)
    for name in nets:
        assert {label for label in range(CLASSES) if server["known"][name][label]} == set(target[name])
        for label, mean in target[name].items():
            torch.testing.assert_close(server["mean"][name][label], mean, rtol=0, atol=1e-10)
    assert 3 not in target["2"] and 3 in target["0"]  # its only holder learns nothing from others


def pull(features: Tensor, net: Net, known: dict[int, Tensor], distance: str) -> list[Tensor]:
    if distance == "features":
        errors = [(f - known[int(y)]).pow(2).mean() for f, y in zip(features, net.y, strict=True) if int(y) in known]
        return [torch.stack(errors).sum() / len(net.y)] if errors else []
    return [(mean - known[label]).norm() for label, mean in net.of_class(features).items() if label in known]


@pytest.mark.parametrize("distance", ["prototypes", "features"])
def test_fedproto_two_rounds_equal_algorithm_of_paper(distance: Any, world: TinyWorld, nets: dict[str, Net]) -> None:
    known: dict[int, Tensor] = {}
    for _ in range(ROUNDS):
        features: dict[int, list[Tensor]] = {}
        for net in nets.values():

            def loss(weights: Weights, net: Net = net, known: Any = known) -> Tensor:
                logits, features = net(weights)
                return F.cross_entropy(logits, net.y) + 0.7 * sum(pull(features, net, known, distance), torch.zeros(()))

            for _ in range(STEPS):
                net.weights = descend(net.weights, loss)
            for row, label in zip(net(net.weights)[1], net.y.tolist(), strict=True):
                features.setdefault(label, []).append(row)
        known = {label: torch.stack(rows).mean(0) for label, rows in features.items()}  # over all devices' examples
    server, states = play(world, FedProto(strength=0.7, distance=distance))
    assert_nets(states, nets)
    for label, mean in known.items():
        torch.testing.assert_close(server["prototypes"]["mean"][label], mean, rtol=0, atol=1e-10)
        assert server["prototypes"]["count"][label] == len(features[label])


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.detach().softmax(1), reduction="batchmean")


def test_fml_two_rounds_equal_algorithm_of_paper(world: TinyWorld, nets: dict[str, Net]) -> None:
    alpha, beta = 0.6, 0.3
    meme_module, meme = small(4).module(), small(4).initial_weights(world.seed)
    for _ in range(ROUNDS):
        forks = []
        for net in nets.values():
            fork = Net(meme_module, net.x, net.y, meme)
            for _ in range(STEPS):
                local, shared = net(net.weights)[0], fork(fork.weights)[0]
                net.weights, fork.weights = (
                    descend(
                        one.weights,
                        lambda w, one=one, other=other, share=share: (
                            share * F.cross_entropy(one(w)[0], one.y) + (1 - share) * kl(one(w)[0], other)
                        ),
                    )
                    for one, other, share in ((net, shared, alpha), (fork, local, beta))
                )
            forks.append(fork.weights)
        meme = {name: torch.stack([fork[name] for fork in forks]).mean(0) for name in meme}
    server, states = play(world, FML(alpha=alpha, beta=beta))
    assert_nets(states, nets)
    assert_close(server["weights"], meme)


def main_part(change: Tensor, energy: float) -> Tensor:
    if change.dim() < 2:
        return change
    u, sigma, v = np.linalg.svd(change.flatten(1).numpy(), full_matrices=False)
    count = next(
        n for n in range(1, len(sigma) + 1) if n == len(sigma) or (sigma[:n] ** 2).sum() > energy * (sigma**2).sum()
    )
    return torch.from_numpy(u[:, :count] @ np.diag(sigma[:count]) @ v[:count]).view_as(change)


def adaptive(weights: Weights, net: Net, logits: Tensor, hidden: Tensor, other: Tensor) -> Tensor:
    """A net's loss; what the other net computes is constant."""
    own, features = net({name: weight for name, weight in weights.items() if name != "W"})
    features = features @ weights["W"] if "W" in weights else features
    labels = F.cross_entropy(own, net.y)
    return labels + (kl(own, logits) + F.mse_loss(features, hidden.detach())) / (labels + other.detach())


def test_fedkd_two_rounds_equal_algorithm_of_paper(world: TinyWorld, nets: dict[str, Net]) -> None:
    module, mentee = small(4).module(), small(4).initial_weights(world.seed)
    projections = {name: torch.eye(5) for name in nets}
    kept = []
    for number in range(1, ROUNDS + 1):
        energy, updates = 0.5 + number / 4 * (0.9 - 0.5), []
        for name, net in nets.items():
            student = Net(module, net.x, net.y, {**mentee, "W": projections[name]})
            for _ in range(STEPS):
                (z_t, h_t), (z_s, h_s) = net(net.weights), student({n: student.weights[n] for n in mentee})
                ce_t, ce_s = F.cross_entropy(z_t, net.y), F.cross_entropy(z_s, net.y)

                mentor = partial(adaptive, net=net, logits=z_s, hidden=h_s @ student.weights["W"], other=ce_s)
                pupil = partial(adaptive, net=student, logits=z_t, hidden=h_t, other=ce_t)
                net.weights, student.weights = descend(net.weights, mentor), descend(student.weights, pupil)
            projections[name] = student.weights["W"]
            updates.append({n: main_part(student.weights[n] - mentee[n], energy) for n in mentee})
        mean = {n: torch.stack([update[n] for update in updates]).mean(0) for n in mentee}
        kept.append({n: torch.linalg.matrix_rank(main_part(m, energy)).item() for n, m in mean.items() if m.dim() > 1})
        mentee = {n: w + main_part(mean[n], energy) for n, w in mentee.items()}
    method = FedKD(energy_start=0.5, energy_end=0.9, energy_rounds=4)
    server, states = play(world, method)
    assert_nets(states, nets)
    assert_close(server["weights"], mentee)
    for name, projection in projections.items():
        torch.testing.assert_close(states[name]["projection"]["weight"], projection, rtol=0, atol=1e-10)
    assert all(1 <= rank < 4 for ranks in kept for rank in ranks.values())  # something is cut, and not all


def class_means(nets: dict[str, Net]) -> tuple[Tensor, Tensor]:
    """Of every device and class, with their classes."""
    pairs = [(mean, label) for net in nets.values() for label, mean in net.of_class(net(net.weights)[1]).items()]
    return torch.stack([mean for mean, _ in pairs]), torch.tensor([label for _, label in pairs])


def test_fedgh_two_rounds_equal_algorithm_of_paper(world: TinyWorld, nets: dict[str, Net]) -> None:
    """The server takes three steps with all class means, so that their order does not matter."""
    first = nets["0"]
    header = dict(zip(("weight", "bias"), (first.weights[name] for name in first.head), strict=True))
    for _ in range(ROUNDS):
        for net in nets.values():
            net.weights = {**net.weights, net.head[0]: header["weight"], net.head[1]: header["bias"]}
            for _ in range(STEPS):
                net.weights = descend(net.weights, lambda w, net=net: F.cross_entropy(net(w)[0], net.y))
        x, y = class_means(nets)
        for _ in range(3):
            header = descend(header, lambda w, x=x, y=y: F.cross_entropy(x @ w["weight"].T + w["bias"], y), 0.2)
    server, states = play(world, FedGH(server_rate=0.2, server_batch=100, server_epochs=3))
    assert_nets(states, nets)
    assert_close(server["header"], header)


@pytest.mark.parametrize("max_margin", [100.0, 0.01])
def test_fedtgp_two_rounds_equal_algorithm_of_paper(max_margin: float, world: TinyWorld, nets: dict[str, Net]) -> None:
    method = FedTGP(strength=0.7, max_margin=max_margin, server_epochs=3, server_batch=100, server_rate=0.2)
    generator = dict(method.start(world.fleet, world.seed)["generator"])
    vectors, *layers = generator
    known: dict[int, Tensor] = {}

    def generate(weights: Weights) -> Tensor:
        hidden = (weights[vectors].T @ weights[layers[0]].T + weights[layers[1]]).relu()
        return hidden @ weights[layers[2]].T + weights[layers[3]]

    for _ in range(ROUNDS):
        for net in nets.values():

            def loss(weights: Weights, net: Net = net, known: Any = known) -> Tensor:
                logits, features = net(weights)
                distances = pull(features, net, known, "prototypes")
                return F.cross_entropy(logits, net.y) + (0.7 * torch.stack(distances).mean() if distances else 0)

            for _ in range(STEPS):
                net.weights = descend(net.weights, loss)
        x, y = class_means(nets)
        centers = [x[y == label].mean(0) for label in y.unique()]
        margin = min(max(float((a - b).norm()) for a in centers for b in centers), max_margin)

        def contrast(weights: Weights, x: Tensor = x, y: Tensor = y, margin: float = margin) -> Tensor:
            prototypes, total = generate(weights), torch.zeros(())
            for row, label in zip(x, y.tolist(), strict=True):
                near = torch.stack([(row - p).norm() + (margin if c == label else 0) for c, p in enumerate(prototypes)])
                total = total - ((-near[label]).exp() / (-near).exp().sum()).log() / len(y)
            return total

        for _ in range(3):
            generator = descend(generator, contrast, 0.2)
        known = dict(enumerate(generate(generator)))
    server, states = play(world, method)
    assert_nets(states, nets)
    assert_close(server["generator"], generator)
    torch.testing.assert_close(server["prototypes"]["mean"], generate(generator), rtol=0, atol=1e-10)

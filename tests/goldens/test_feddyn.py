"""FedDyn compared with Algorithm 1, written out in plain torch for one model and for nested ones."""

from typing import Any

import pytest
import torch

from fedloom.methods.fedavg import FedAvg
from fedloom.methods.feddyn import FedDyn
from fedloom.testing import InterceptingEngine, TinyWorld, same_bits, same_parcel
from fedloom.testing.doubles import committed_states
from tests.goldens.reference import Weights, corner, descend, full_batch_world, holders, label_gradient, total


def algorithm(
    world: TinyWorld, alpha: float, steps: int, cohorts: list[list[int]]
) -> tuple[Weights, Weights, list[Weights]]:
    """The model, the server's h and the devices' gradients after these rounds."""
    theta = world.fleet.global_model.initial_weights(0)
    h = {n: torch.zeros_like(w) for n, w in theta.items()}
    everyone = list(range(world.fleet.size))
    grads = [corner(world, k, h) for k in everyone]
    for cohort in cohorts:
        trained, moved = [], []
        for k in cohort:
            start, own = corner(world, k, theta), grads[k]

            def regularized(w: Weights, k: int = k, own: Any = own, start: Any = start) -> Weights:
                g = label_gradient(world, k, w)
                return {n: g[n] - own[n] + alpha * (w[n] - start[n]) for n in w}

            theta_k = descend(start, steps, regularized)
            grads[k] = {n: own[n] - alpha * (theta_k[n] - start[n]) for n in start}
            trained.append(theta_k)
            moved.append({n: theta_k[n] - start[n] for n in start})
        replied, devices = holders(world, cohort, theta), holders(world, everyone, theta)
        sums, changes = total(trained, theta), total(moved, theta)
        h = {n: v - alpha * changes[n] / devices[n] for n, v in h.items()}
        mean = {n: sums[n] / replied[n].clamp_min(1) for n in theta}
        theta = {n: torch.where(replied[n] > 0, mean[n] - h[n] / alpha, w) for n, w in theta.items()}
    return theta, h, grads


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("widths", "participation"), [((1.0, 0.5), 0.5), ((1.0, 0.5), 1.0), ((1.0,), 0.75)])
def test_feddyn_rounds_equal_algorithm_of_paper(widths: tuple[float, ...], participation: float) -> None:
    method, steps, rounds = FedDyn(alpha=0.2), 3, 3
    world = full_batch_world(steps, widths=widths)
    engine = world.engine(method)
    contexts = [world.context(engine, number, participation) for number in range(1, rounds + 1)]
    cohorts = [[int(device.name) for device in context.cohort] for context in contexts]
    server = world.play(method, engine, rounds, participation)
    theta, h, grads = algorithm(world, 0.2, steps, cohorts)
    for n in theta:
        torch.testing.assert_close(server["weights"][n], theta[n], rtol=0, atol=1e-10)
        torch.testing.assert_close(server["h"][n], h[n], rtol=0, atol=1e-10)
    for device, state in committed_states(engine).items():
        for n, value in state["gradient"].items():
            torch.testing.assert_close(value, grads[int(device)][n], rtol=0, atol=1e-10)


def test_feddyn_alpha_zero_is_fedavg_bit_for_bit() -> None:
    world = full_batch_world(2, widths=(1.0,))
    made = [world.play(method, world.engine(method), rounds=3) for method in (FedDyn(alpha=0.0), FedAvg("uniform"))]
    assert same_parcel({"weights": made[0]["weights"]}, made[1])


@pytest.mark.usefixtures("double")
def test_feddyn_alpha_to_zero_devices_train_as_in_fedavg() -> None:
    """In the first round, and by less and less; but the server's correction does not vanish: it goes twice as far."""
    world = full_batch_world(2, widths=(1.0,))
    plain = InterceptingEngine(world.engine(FedAvg("uniform")))
    start = FedAvg().start(world.fleet, 0)["weights"]
    mean = world.play(FedAvg("uniform"), plain, rounds=1)["weights"]
    for alpha in (1e-3, 1e-6, 1e-9):
        engine = InterceptingEngine(world.engine(FedDyn(alpha)))
        server = world.play(FedDyn(alpha), engine, rounds=1)["weights"]
        for one, other in zip(engine.delivered, plain.delivered, strict=True):
            for n, weight in one.upload["weights"].items():
                torch.testing.assert_close(weight, other.upload["weights"][n], rtol=0, atol=2 * alpha)
        for n, weight in server.items():
            torch.testing.assert_close(weight, start[n] + 2 * (mean[n] - start[n]), rtol=0, atol=4 * alpha)


def test_feddyn_entries_without_reply_keep_bits() -> None:
    world, method = full_batch_world(2), FedDyn(alpha=0.1)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    context = world.context(engine, 2)
    narrow = [device for device in context.cohort if device.tier == "b"]
    context.cohort[:] = narrow
    after = method.round(server, context)
    for bundle in ("weights", "h"):
        restored = narrow[0].footprint.write(after[bundle], narrow[0].footprint.read(server[bundle]))
        assert same_parcel({bundle: restored}, {bundle: server[bundle]})
    name = next(iter(server["h"]))
    assert not same_bits(after["h"][name], server["h"][name])

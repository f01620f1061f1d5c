"""SCAFFOLD compared with Algorithm 1, written out in plain torch for one model and for nested ones."""

from typing import Any, Literal

import pytest
import torch

from fedloom.footprints import ClientUpdate, coverage_mean
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.scaffold import Scaffold
from fedloom.testing import TinyWorld, largest_difference, same_parcel
from fedloom.testing.doubles import committed_states
from tests.goldens.reference import LR, Weights, corner, descend, full_batch_world, holders, label_gradient, total


def algorithm(
    world: TinyWorld, option: str, steps: int, global_lr: float, cohorts: list[list[int]]
) -> tuple[Weights, Weights, list[Weights]]:
    """Lines 4 to 17 for every round: the model, the server's control variate and the devices'."""
    x = world.fleet.global_model.initial_weights(0)
    c = {n: torch.zeros_like(w) for n, w in x.items()}
    everyone = list(range(world.fleet.size))
    c_of = [corner(world, k, c) for k in everyone]
    for cohort in cohorts:
        dy, dc = [], []
        for k in cohort:
            start, own, c_k = corner(world, k, x), c_of[k], corner(world, k, c)

            def corrected(y: Weights, k: int = k, own: Any = own, c_k: Any = c_k) -> Weights:
                g = label_gradient(world, k, y)
                return {n: g[n] - own[n] + c_k[n] for n in y}

            y = descend(start, steps, corrected)
            new = label_gradient(world, k, start)
            if option == "II":
                new = {n: own[n] - c_k[n] + (start[n] - y[n]) / (steps * LR) for n in y}
            dy.append({n: y[n] - start[n] for n in y})
            dc.append({n: new[n] - own[n] for n in y})
            c_of[k] = new
        replied, devices = holders(world, cohort, x), holders(world, everyone, x)
        sums, changes = total(dy, x), total(dc, x)
        x = {n: w + global_lr * sums[n] / replied[n].clamp_min(1) for n, w in x.items()}
        c = {n: v + changes[n] / devices[n].clamp_min(1) for n, v in c.items()}
    return x, c, c_of


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("option", "widths", "participation"), [("II", (1.0, 0.5), 0.5), ("I", (1.0, 0.5), 1.0), ("II", (1.0,), 0.75)]
)
def test_scaffold_rounds_equal_algorithm_of_paper(
    option: Literal["I", "II"], widths: tuple[float, ...], participation: float
) -> None:
    method, steps, rounds = Scaffold(option, global_lr=0.7), 3, 3
    world = full_batch_world(steps, widths=widths)
    engine = world.engine(method)
    contexts = [world.context(engine, number, participation) for number in range(1, rounds + 1)]
    cohorts = [[int(device.name) for device in context.cohort] for context in contexts]
    server = world.play(method, engine, rounds, participation)
    x, c, c_of = algorithm(world, option, steps, 0.7, cohorts)
    for n in x:
        torch.testing.assert_close(server["weights"][n], x[n], rtol=0, atol=1e-10)
        torch.testing.assert_close(server["control"][n], c[n], rtol=0, atol=1e-10)
    for device, state in committed_states(engine).items():
        for n, value in state["control"].items():
            torch.testing.assert_close(value, c_of[int(device)][n], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("double")
def test_scaffold_server_control_is_mean_of_holders() -> None:
    """Of every entry over the devices that have it, whoever took part; a device that has it alone is not corrected."""
    method = Scaffold()
    world = full_batch_world(2)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=4, participation=0.5)
    kept = committed_states(engine)
    states = {d.name: kept.get(d.name) or method.init_client(d, 0) for d in world.fleet.devices(1)}
    updates = [ClientUpdate(d.footprint, states[d.name]["control"], 1.0) for d in world.fleet.devices(1)]
    mean = coverage_mean({n: torch.zeros_like(w) for n, w in server["control"].items()}, updates)
    for n, value in server["control"].items():
        torch.testing.assert_close(value, mean[n], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_one_step_of_everyone_is_sgd(option: Literal["I", "II"]) -> None:
    """The corrections of all devices cancel, on nested models too."""
    world = full_batch_world(1)
    server = world.play(Scaffold(option), world.engine(Scaffold()), rounds=3)
    x = world.fleet.global_model.initial_weights(0)
    everyone = list(range(world.fleet.size))
    for _ in range(3):
        sums = total([label_gradient(world, k, corner(world, k, x)) for k in everyone], x)
        x = {n: w - LR * sums[n] / holders(world, everyone, x)[n] for n, w in x.items()}
    for n, weight in x.items():
        torch.testing.assert_close(server["weights"][n], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_first_round_of_one_model_is_fedavg_bit_for_bit(option: Literal["I", "II"]) -> None:
    """All control variates are zero yet."""
    world = full_batch_world(3, widths=(1.0,))
    scaffold, fedavg = Scaffold(option), FedAvg("uniform")
    made, expected = (world.play(method, world.engine(method), rounds=1) for method in (scaffold, fedavg))
    assert same_parcel({"weights": made["weights"]}, expected)
    later, without = (world.play(method, world.engine(method), rounds=2) for method in (scaffold, fedavg))
    assert not same_parcel({"weights": later["weights"]}, without)


@pytest.mark.usefixtures("double")
def test_scaffold_of_one_device_is_fedavg() -> None:
    """Its control variate is the server's, so that nothing is corrected."""
    world = full_batch_world(3, sizes=(8,), widths=(1.0,))
    made, expected = (world.play(method, world.engine(method), rounds=3) for method in (Scaffold(), FedAvg("uniform")))
    assert largest_difference({"weights": made["weights"]}, expected) <= 1e-12
    assert all(bool(control.any()) for control in made["control"].values())


def test_scaffold_entries_without_reply_keep_bits() -> None:
    """Only narrow devices reply: what the wide ones have alone stays, in the model and in the control variate."""
    world, method = full_batch_world(2), Scaffold(global_lr=0.5)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    context = world.context(engine, 2)
    narrow = [device for device in context.cohort if device.tier == "b"]
    context.cohort[:] = narrow
    after = method.round(server, context)
    for bundle in ("weights", "control"):
        inside = narrow[0].footprint.read(after[bundle])
        restored = narrow[0].footprint.write(after[bundle], narrow[0].footprint.read(server[bundle]))
        assert same_parcel({bundle: restored}, {bundle: server[bundle]})
        assert not same_parcel({bundle: inside}, {bundle: narrow[0].footprint.read(server[bundle])})

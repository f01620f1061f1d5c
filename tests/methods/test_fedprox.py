"""FedProx: the proximal term applies to every weight, and the server averages like FedAvg."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedloom.client import Schedule, Sgd
from fedloom.methods import fleet_problem
from fedloom.methods.fedprox import FedProx


@pytest.mark.usefixtures("double")
def test_fedprox_gradient_includes_proximal_term(world: Callable[..., Any], meddling: Callable[..., Any]) -> None:
    """The second of two steps on the same batch, compared with autograd; includes norms and biases."""
    sim = world(sizes=(8,), schedule=Schedule(100, 2), optimizer=Sgd(0.1), normalization="group")
    once = replace(sim, schedule=Schedule(100, 1))
    sent = []
    for one, mu in ((once, 0.7), (once, 0.0), (sim, 0.0), (sim, 0.7)):
        engine = meddling(one.engine(FedProx(mu), devices_per_block=1), list)
        FedProx(mu).round(FedProx(mu).start(one.fleet, 0), one.context(engine))
        sent.append(engine.delivered[0].upload["weights"])
    start, moved = sim.fleet.global_model.initial_weights(0), set()
    for name, weight in start.items():
        after_one, again, without, pulled = (made[name] for made in sent)
        assert torch.equal(after_one, again)  # the proximal term is zero at the start
        assert torch.allclose(pulled, without - 0.1 * 0.7 * (after_one - weight), atol=1e-12)
        moved |= {weight.dim()} if not torch.equal(pulled, without) else set()
    assert moved == {1, 2, 4}


def test_fedprox_large_mu_stays_near_global_model(world: Callable[..., Any], difference: Callable[..., float]) -> None:
    sim = world(sizes=(8, 8), schedule=Schedule(4, 4), optimizer=Sgd(0.1))
    moved = []
    for mu in (0.0, 1.0, 5.0):
        method = FedProx(mu)
        moved.append(difference(method.start(sim.fleet, 0), sim.play(method, sim.engine(method), rounds=1)))
    assert moved[0] > moved[1] > moved[2] > 0


def test_fedprox_several_tiers_are_refused(world: Callable[..., Any]) -> None:
    assert fleet_problem(FedProx(), world().fleet) is None
    assert "fedprox" in str(fleet_problem(FedProx(), world(widths=(1.0, 0.5)).fleet))

"""Server optimizers on nested models compared with Algorithm 2 entry by entry, written out in plain torch.

Every entry has moments of its own, which move in those rounds alone in which some device that has the entry replies.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.footprints import SERVER_OPTIMIZERS, ServerStep, coverage_mean, split_moments
from fedloom.footprints.server_optimizer import MOMENTS
from fedloom.methods.heterofl import HeteroFL
from fedloom.testing import TinyWorld
from tests.goldens.reference import Weights, corner, descend, full_batch_world, holders, label_gradient, total

SETTINGS: dict[str, dict[str, float]] = {
    "momentum": {"lr": 0.7, "momentum": 0.8},
    "adagrad": {"lr": 0.1, "beta1": 0.4, "tau": 0.05},
    "adam": {"lr": 0.1, "beta1": 0.6, "beta2": 0.9, "tau": 0.05},
    "yogi": {"lr": 0.1, "beta1": 0.6, "beta2": 0.9, "tau": 0.05},
}


def step(kind: str, d: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How far a change leads, and the moments after it."""
    s = SETTINGS[kind]
    if kind == "momentum":
        m = s["momentum"] * m + d
        return s["lr"] * m, m, v
    m = s["beta1"] * m + (1 - s["beta1"]) * d
    if kind == "adagrad":
        v = v + d**2
    elif kind == "adam":
        v = s["beta2"] * v + (1 - s["beta2"]) * d**2
    else:
        v = v - (1 - s["beta2"]) * d**2 * torch.sign(v - d**2)
    return s["lr"] * m / (v.sqrt() + s["tau"]), m, v


def algorithm(world: TinyWorld, kind: str, steps: int, cohorts: list[list[int]]) -> tuple[Weights, Weights, Weights]:
    """The model and both moments after these rounds."""
    x = world.fleet.global_model.initial_weights(0)
    m = {n: torch.zeros_like(w) for n, w in x.items()}
    v = {n: torch.full_like(w, SETTINGS[kind].get("tau", 0.0) ** 2) for n, w in x.items()}
    for cohort in cohorts:
        trained = [
            descend(corner(world, k, x), steps, lambda w, k=k: label_gradient(world, k, w))  # type: ignore[misc]
            for k in cohort
        ]
        replied, sums = holders(world, cohort, x), total(trained, x)
        for n, w in x.items():
            far, m_new, v_new = step(kind, sums[n] / replied[n].clamp_min(1) - w, m[n], v[n])
            covered = replied[n] > 0
            x[n], m[n], v[n] = (
                torch.where(covered, new, old) for new, old in ((w + far, w), (m_new, m[n]), (v_new, v[n]))
            )
    return x, m, v


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_server_optimizer_on_nested_models_equals_algorithm_of_paper(kind: str) -> None:
    method, steps = HeteroFL(mask_unseen_labels=False, only_seen_rows=False), 2
    world = full_batch_world(steps)
    engine, optimizer = world.engine(method), SERVER_OPTIMIZERS[kind](**SETTINGS[kind])
    server: Any = method.start(world.fleet, 0)
    cohorts = [[0, 2], [2, 3], [1, 3], [0, 1]]  # 0 and 1 are wide; nobody in the second round is
    for number, cohort in enumerate(cohorts, 1):
        own, moments = split_moments(server)
        aggregate = ServerStep(optimizer, coverage_mean, own, moments)
        devices = [world.fleet.device(index, number) for index in cohort]
        context = replace(world.context(engine, number), cohort=devices, aggregate=aggregate)
        server = {**method.round(own, context), **aggregate.moments}
        engine.commit(number)
    x, m, v = algorithm(world, kind, steps, cohorts)
    kept = {"weights": x} | ({"velocity": m} if kind == "momentum" else {"mean": m, "square": v})
    for bundle, expected in kept.items():
        found = server[bundle if bundle == "weights" else f"{MOMENTS}{bundle}:weights"]
        for n, value in expected.items():
            torch.testing.assert_close(found[n], value, rtol=0, atol=1e-10)
    wide = holders(world, [2, 3], x)
    assert any(bool((count == 0).any()) for count in wide.values())

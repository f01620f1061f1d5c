"""A recipe's server optimizer: the same averages go in, its moments are part of the run, and it is refused by name."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom.api.run import Run
from fedloom.footprints.server_optimizer import MOMENTS, FedAdam
from fedloom.methods.fedavg import FedAvg
from fedloom.recipe.errors import RecipeError
from fedloom.runs.checkpoint import FOLDER, Checkpoints
from fedloom.runs.folder import read_manifest
from fedloom.tensors import Tensors

MLP = {"model": {"family": "mlp", "hidden": [6]}, "data": {"dataset": "digits", "devices": 4, "max_examples": 20}}
DEPTHS = {
    "model": {"family": "convnet", "hidden": [4, 4], "exit_after": "every"},
    "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "depth": 1}],
}
ADAM = {"server_optimizer": {"kind": "adam", "lr": 0.05}}


def sha(run: Run) -> str:
    return str(read_manifest(run.folder)["sha256"])


def weights_of(run: Run) -> dict[str, Any]:
    checkpoint = Checkpoints(run.folder / FOLDER).read_newest()
    assert checkpoint is not None
    return dict(checkpoint.server)


def test_run_with_server_optimizer_keeps_moments_beside_weights(run: Callable[..., Run]) -> None:
    plain, made = run("plain", **MLP), run("adam", aggregation=ADAM, **MLP)
    bundles = weights_of(made)
    assert bundles.keys() == {"weights", f"{MOMENTS}mean:weights", f"{MOMENTS}square:weights"}
    assert weights_of(plain).keys() == {"weights"}
    assert sha(plain) != sha(made)
    shapes = [{name: one.shape for name, one in tensors.items()} for tensors in bundles.values()]
    assert shapes[0] == shapes[1] == shapes[2]
    moved = [sum(row.value for row in one.rows() if row.metric == "bytes_down") for one in (plain, made)]
    assert moved[0] == moved[1]  # moments are not sent
    assert (made.folder / "models" / "small.safetensors").is_file()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": {"rule": "median", "min_contributors": 2}},
        {"method": {"name": "decouple"}},
        pytest.param({"faults": {"dropout": 0.4, "min_coverage": 2}}, marks=pytest.mark.slow),
        pytest.param({"method": {"name": "fedrolex"}}, marks=pytest.mark.slow),
        pytest.param({"method": {"name": "fml"}}, marks=pytest.mark.slow),
        pytest.param({"method": {"name": "depthfl", "ramp_up": 0}, **DEPTHS}, marks=pytest.mark.slow),
        pytest.param({"method": {"name": "scalefl"}, **DEPTHS}, marks=pytest.mark.slow),
        pytest.param(
            {
                "method": {"name": "heterofl", "only_seen_rows": False},
                "fleet": {"sampling": "poisson", "participation": 0.9},
                "privacy": {"clip": 1.0, "noise": 0.5},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["heterofl", "median", "decouple", "faults", "fedrolex", "fml", "depthfl", "scalefl", "privacy"],
)
def test_run_with_momentum_zero_and_rate_one_is_plain_bit_for_bit(run: Callable[..., Run], changes: Any) -> None:
    identity = {"server_optimizer": {"kind": "momentum", "lr": 1.0, "momentum": 0.0}}
    sections = {**MLP, **changes}
    plain = run("plain", **sections)
    made = run("identity", **{**sections, "aggregation": {**sections.get("aggregation", {}), **identity}})
    assert [repr(row) for row in plain.rows()] == [repr(row) for row in made.rows()]
    moved = run("moved", **{**sections, "aggregation": {**sections.get("aggregation", {}), **ADAM}})
    assert [repr(row) for row in moved.rows()] != [repr(row) for row in made.rows()]


@pytest.mark.parametrize("kind", ["yogi", *(pytest.param(k, marks=pytest.mark.slow) for k in ("momentum", "adagrad"))])
def test_run_with_server_optimizer_resumed_gives_same_bits(
    kind: str, document: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    recipe = document(rounds=4, aggregation={"server_optimizer": {"kind": kind}}, **MLP)
    whole = fedloom.run(recipe, out=tmp_path / "whole")
    simulation = fedloom.Simulation.from_recipe(recipe)
    for count in (1, 2, 1):
        for _ in simulation.rounds(count):
            pass
    assert sha(simulation.save(tmp_path / "parts")) == sha(whole)
    assert fedloom.verify(whole.folder, rounds=2).differences == ()


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "standalone"}, "standalone averages nothing"),
        ({"name": "scaffold"}, "scaffold has a server step of its own, method.global_lr"),
        ({"name": "feddyn"}, "feddyn corrects the average by a state of its own"),
        ({"name": "depthfl", "feddyn": 0.1}, "depthfl corrects the average by FedDyn's state, method.feddyn"),
        ({"name": "inclusivefl"}, "inclusivefl averages something else than its server state"),
        ({"name": "fiarse"}, "fiarse averages something else than its server state"),
        ({"name": "centralized"}, "centralized trains in one place and has nothing to average"),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_check_server_optimizer_that_makes_no_sense_is_refused_by_name(
    method: dict[str, Any], reason: str, document: Callable[..., dict[str, Any]]
) -> None:
    one_tier = {"tiers": [{"name": "all", "share": 1.0}]}
    net = {"family": "convnet", "hidden": [4, 4], "exit_after": "every"}
    with pytest.raises(RecipeError, match=f"{reason}; aggregation.server_optimizer has no effect"):
        fedloom.check(document(method=method, aggregation=ADAM, **{**MLP, "model": net}, **one_tier))


def test_check_server_optimizer_of_depthfl_without_feddyn_is_admitted(
    document: Callable[..., dict[str, Any]],
) -> None:
    net = {"family": "convnet", "hidden": [4, 4], "exit_after": "every"}
    sections = {**MLP, "model": net, "tiers": [{"name": "all", "share": 1.0}]}
    assert fedloom.check(document(method={"name": "depthfl"}, aggregation=ADAM, **sections)) is None  # it would raise


@pytest.mark.parametrize(
    ("optimizer", "key", "code"),
    [
        ({"kind": "adamw"}, "aggregation.server_optimizer.kind", "RECIPE_NAME"),
        ({"kind": "adam", "momentum": 0.9}, "aggregation.server_optimizer.momentum", "RECIPE_KEY"),
        ({"kind": "yogi", "lr": 0.0}, "aggregation.server_optimizer.lr", "RECIPE_RANGE"),
        ({"lr": 0.1}, "aggregation.server_optimizer.kind", "RECIPE_MISSING"),
    ],
)
def test_check_server_optimizer_bad_settings_are_located(
    optimizer: Any, key: str, code: str, document: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(RecipeError) as refused:
        fedloom.check(document(aggregation={"server_optimizer": optimizer}))
    (issue,) = refused.value.issues
    assert (".".join(map(str, issue.key_path)), issue.code) == (key, code)


def test_simulation_takes_server_optimizer_by_name_or_object() -> None:
    tiers = fedloom.tiers("mlp", {"hidden": [4]}, all={"share": 1.0})
    for chosen in ({"kind": "adam", "lr": 0.1}, fedloom.server_optimizers.adam(lr=0.1), FedAdam(lr=0.1)):
        simulation = fedloom.Simulation(
            "digits", tiers=tiers, method="fedavg", devices=4, aggregation={"server_optimizer": chosen}
        )
        assert simulation.recipe["aggregation"]["server_optimizer"] == {"kind": "adam", "lr": 0.1}


@dataclass(frozen=True)
class SignStep:
    """A step of one size in the direction of the change, without moments."""

    lr: float = 0.01

    def start(self, weight: Tensor) -> dict[str, Tensor]:
        return {}

    def move(self, change: Tensor, moments: Tensors) -> tuple[Tensor, Tensors]:
        return self.lr * change.sign(), {}


def test_simulation_with_server_optimizer_of_its_own_steps_by_it(tmp_path: Path) -> None:
    simulation = fedloom.Simulation(
        "digits",
        tiers=fedloom.tiers("mlp", {"hidden": [4]}, all={"share": 1.0}),
        method="fedavg",
        devices=4,
        aggregation={"server_optimizer": SignStep(lr=0.25)},
    )
    (result,) = simulation.rounds(1)
    start = FedAvg().start(simulation._assemble(simulation._loaded, simulation.registries).fleet, 0)["weights"]
    assert result.server.keys() == {"weights"}
    for name, weight in result.server["weights"].items():
        steps = ((weight - start[name]) / 0.25).abs()
        assert torch.all((steps - steps.round()).abs() < 1e-5) and float(steps.max()) == pytest.approx(1, abs=1e-5)
    run = simulation.save(tmp_path / "own")
    assert read_manifest(run.folder)["own_names"] == {"server_optimizers": ["signstep"]}

"""Methods train tiers that slice axes on which several things are stacked."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.fleet import ServerModel
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.mixed import MethodPart, Mixed
from fedloom.models import StepSeeds, build_model
from fedloom.settings import FrozenDict
from fedloom.testing import TinyWorld

INPUTS = (1, 6, 6)


class Rows(nn.Module):
    """An LSTM, or attention, over the rows of an image."""

    def __init__(self, size: int, classes: int, attends: bool):
        super().__init__()
        self.stem = nn.Linear(INPUTS[-1], size) if attends else None
        self.attention = nn.MultiheadAttention(size, 2, batch_first=True) if attends else None
        self.lstm = None if attends else nn.LSTM(INPUTS[-1], size, batch_first=True)
        self.classifier = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        if self.stem is not None and self.attention is not None:
            x = self.stem(x)
            x = x + self.attention(x, x, x, need_weights=False)[0]
        elif self.lstm is not None:
            x = self.lstm(x)[0]
        return self.classifier(x.mean(1))  # type: ignore[no-any-return]


def rows(size: int, classes: int = 4, attends: bool = False) -> nn.Module:
    return Rows(size, classes, attends)


def world_of(*sizes: int, attends: bool = False) -> TinyWorld:
    models = [(f"t{size}", build_model("rows", rows, {"size": size, "attends": attends}, INPUTS, 4)) for size in sizes]
    return TinyWorld.make(models=models, sizes=(8, 8, 8, 8))


@pytest.mark.parametrize("attends", [False, True], ids=["lstm", "attention"])
@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "fjord"])
def test_method_trains_stacked_tiers(name: str, attends: bool) -> None:
    world, method = world_of(8, 4, attends=attends), METHODS[name]()
    assert fleet_problem(method, world.fleet) is None
    server = world.play(method, world.engine(method), rounds=2)
    (target,) = method.eval_targets(server).values()
    assert isinstance(target, ServerModel) and not world.refusals
    for tier in world.fleet.tiers:
        expected, found = tier.footprint.read(server["weights"]), target.weights(tier)
        assert found.keys() == tier.model.shapes().keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    start = method.start(world.fleet, world.seed)["weights"]
    assert all(not torch.equal(tensor, start[name]) for name, tensor in server["weights"].items())


def test_heterofl_small_lstm_trains_only_its_part_of_every_gate() -> None:
    world = world_of(8, 4)
    world = replace(world, fleet=replace(world.fleet, device_tiers=("t4",) * 4))
    method = HeteroFL()
    before = method.start(world.fleet, world.seed)["weights"]
    after = world.play(method, world.engine(method), rounds=1)["weights"]
    changed = (before["lstm.weight_ih_l0"] != after["lstm.weight_ih_l0"]).any(1).view(4, 8)
    assert changed[:, :4].all() and not changed[:, 4:].any()


@pytest.mark.usefixtures("double")
def test_heterofl_server_slice_of_lstm_computes_what_masked_global_model_does() -> None:
    """The small tier's net is the large one with all other units silent."""
    world, x = world_of(8, 4), torch.randn(1, 5, *INPUTS)
    large, small = world.fleet.tiers
    weights = small.footprint.read(large.model.initial_weights(0))
    silent = small.footprint.write({name: torch.zeros(shape) for name, shape in large.model.shapes().items()}, weights)
    outputs = [
        tier.model({name: tensor.unsqueeze(0) for name, tensor in each.items()}, x, StepSeeds((0,))).logits
        for tier, each in ((small, weights), (large, silent))
    ]
    assert torch.allclose(*outputs, rtol=1e-12, atol=1e-12)


def test_fedrolex_fewer_heads_are_refused_by_name() -> None:
    models = [(f"t{size}", build_model("heads", fewer_heads, {"size": size}, INPUTS, 4)) for size in (8, 4)]
    world = TinyWorld.make(models=models, sizes=(8, 8))
    assert fleet_problem(METHODS["heterofl"](), world.fleet) is None
    problem = fleet_problem(METHODS["fedrolex"](), world.fleet)
    assert problem == "fedrolex cannot roll attention.in_proj_weight, of which smaller tiers have fewer heads or parts"


def fewer_heads(size: int, classes: int = 4) -> nn.Module:
    net = Rows(size, classes, attends=True)
    net.attention = nn.MultiheadAttention(size, size // 2, batch_first=True)
    return net


def test_mixed_part_without_largest_tier_is_refused_if_it_slices_stacked_axes() -> None:
    fleet, method = world_of(8, 6, 4).fleet, HeteroFL()
    standalone = METHODS["standalone"]()
    apart = Mixed(parts=(MethodPart(("t8",), standalone), MethodPart(("t6", "t4"), method)))
    problem = fleet_problem(apart, fleet)
    assert problem is not None and problem.startswith("the tier 't4' has a part of lstm.weight_ih_l0")
    together = Mixed(parts=(MethodPart(("t8", "t6"), method), MethodPart(("t4",), standalone)))
    assert fleet_problem(together, fleet) is None


@pytest.mark.parametrize("build", [METHODS["decouple"]])
def test_report_of_last_uploads_is_refused_if_tiers_slice_stacked_axes(build: Callable[..., Method]) -> None:
    fleet: Any = world_of(8, 4).fleet
    problem = fleet_problem(build(report=True), fleet)
    assert problem is not None and "cannot report on parts of lstm.weight_ih_l0" in problem
    assert fleet_problem(build(), fleet) is None


class Gated(nn.Module):
    """What is packed is not declared."""

    def __init__(self, size: int, classes: int):
        super().__init__()
        self.joint, self.last = nn.Linear(36, 2 * size), nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.glu(self.joint(x.flatten(1)), 1))  # type: ignore[no-any-return]


def gated(classes: int, width: float = 1.0) -> nn.Module:
    return Gated(int(8 * width), classes)


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fjord", {"widths": (0.5, 1.0)}), ("fedsup", {"space": FrozenDict(width=(0.5, 1.0))})],
)
def test_method_subnets_that_are_no_smaller_nets_are_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    """Although there is one tier only, of full size."""
    world, method = TinyWorld.make(gated), METHODS[name](**settings)
    problem = fleet_problem(method, world.fleet)
    assert problem is not None and "last (Linear) receives something else" in problem

"""FedHeN compared with values worked out by hand, on models of two or three weights."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Sgd, Step
from fedloom.data import Examples
from fedloom.engines.gate import refuse
from fedloom.fleet import Device, Fleet, Reply, RoundContext, ServerModel, make_nested_tiers
from fedloom.methods import Method
from fedloom.methods.decouple import Decouple
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.noside import NoSide
from fedloom.models import Model, Outputs, StepSeeds, build_model
from fedloom.tensors import Parcel


class Exits(nn.Module):
    """Two exits that are sums of weights times slopes, with a squared loss."""

    def __init__(self, kind: str, head: bool, slopes: tuple[float, float, float], offsets: tuple[float, float]):
        super().__init__()
        self.shared = nn.Parameter(torch.zeros(1))
        self.head = nn.Parameter(torch.zeros(1)) if head else None
        self.own = nn.Parameter(torch.zeros(1)) if kind == "complex" else None
        self.slopes, self.offsets = slopes, offsets

    def forward(self, x: Tensor) -> Outputs:
        nothing, (exit_slope, full_slope, own_slope) = x * 0, self.slopes
        exits = {"exit": nothing + exit_slope * self.shared + (0 if self.head is None else self.head) + self.offsets[0]}
        if self.own is not None:
            exits["full"] = nothing + full_slope * self.shared + own_slope * self.own + self.offsets[1]
        return Outputs(exits, {})


def net(
    kind: str,
    head: bool = False,
    slopes: tuple[float, float, float] = (1.0, 1.0, 1.0),
    offsets: tuple[float, float] = (-2.0, -1.0),
) -> Model:
    settings = {"kind": kind, "head": head, "slopes": slopes, "offsets": offsets}
    return build_model("exits", Exits, settings, (1,), 1)


def half_a_square(logits: Tensor, batch: Batch) -> Tensor:
    return logits.square().sum(-1).mean(1) / 2


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the square of the only logit replaces the cross entropy."""
    for module in ("fedloom.methods.fedhen", "fedloom.client.losses"):
        monkeypatch.setattr(import_module(module), "supervised_loss", half_a_square)


def step_of(method: Any, whole: Model, optimizer: Sgd, client_for: Callable[..., Any]) -> dict[str, float]:
    """The weights after one step from zero."""
    one = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    examples = Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    start = {name: torch.zeros(1, *shape) for name, shape in whole.shapes().items()}
    made = method.train.run(client_for(whole, examples, [one], optimizer), {"weights": start}).upload["weights"]
    return {name: float(weight) for name, weight in made.items()}


Uploads = Mapping[str, Mapping[str, float]]


def one_round(method: Method, uploads: Uploads, head: bool, scripted: Callable[..., Any]) -> Callable[[str], Any]:
    """Devices 0, 1, … upload the given weights; a device with an `own` weight is complex."""
    kinds = ["complex" if "own" in upload else "simple" for upload in uploads.values()]
    shares = tuple(kinds.count(kind) / len(kinds) for kind in ("simple", "complex"))
    tiers = make_nested_tiers([(kind, net(kind, head)) for kind in ("simple", "complex")])
    fleet = Fleet(tiers, shares, len(kinds), seed=0)

    def answer(device: Device, inbox: Parcel) -> Reply | None:
        sent = {name: torch.tensor([value]) for name, value in uploads[device.name].items()}
        reply = Reply(device, 1, {"weights": sent})
        return None if refuse(reply, method.train, inbox) else reply  # type: ignore[attr-defined]

    zeros = {name: torch.zeros(shape) for name, shape in fleet.global_model.shapes().items()}
    server = method.round(method.start(fleet, 0, zeros), RoundContext(1, fleet.devices(1), fleet, scripted(answer)))
    candidate = method.eval_targets(server)["server"]
    assert isinstance(candidate, ServerModel)
    found = {tier.name: candidate.weights(tier) for tier in fleet.tiers}
    return lambda tier: {name: float(weight) for name, weight in found[tier].items()}


UPLOADS = {"0": {"shared": 5.0}, "1": {"shared": 1.0, "own": 10.0}, "2": {"shared": 6.0, "own": 20.0}}


@pytest.mark.parametrize("method", [FedHeN(), NoSide(), NoSide("trained_only")])
def test_fedhen_shared_weights_are_averaged_over_all(method: Method, scripted: Callable[..., Any]) -> None:
    made = one_round(method, UPLOADS, False, scripted)
    assert made("simple") == {"shared": 4.0}
    assert made("complex") == {"shared": 4.0, "own": 15.0}


def test_decouple_tiers_are_averaged_separately(scripted: Callable[..., Any]) -> None:
    made = one_round(Decouple(), UPLOADS, False, scripted)
    assert made("simple") == {"shared": 5.0}
    assert made("complex") == {"shared": 3.5, "own": 15.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["shared", "own"])
@pytest.mark.parametrize("method", [FedHeN(), NoSide()])
def test_fedhen_nonfinite_device_is_left_out(
    method: Method, where: str, bad: float, scripted: Callable[..., Any]
) -> None:
    made = one_round(method, {**UPLOADS, "2": {**UPLOADS["2"], where: bad}}, False, scripted)
    assert made("simple") == {"shared": 3.0}
    assert made("complex") == {"shared": 3.0, "own": 10.0}


@pytest.mark.usefixtures("squares")
@pytest.mark.parametrize(("method", "shared"), [(FedHeN(), 0.3), (NoSide(), 0.1)])
def test_fedhen_side_objective_adds_gradient(method: Method, shared: float, client_for: Callable[..., Any]) -> None:
    made = step_of(method, net("complex"), Sgd(0.1), client_for)
    assert made == pytest.approx({"shared": shared, "own": 0.1}, abs=1e-7)


@pytest.mark.usefixtures("squares")
def test_fedhen_summed_gradient_is_clipped_once(client_for: Callable[..., Any]) -> None:
    """The exit's gradient is (20, 0), the full model's (10, 40): their sum has norm 50 and is clipped to 10."""
    whole = net("complex", slopes=(-20.0, -10.0, -40.0), offsets=(-1.0, -1.0))
    made = step_of(FedHeN(), whole, Sgd(1.0, clip_norm=10.0), client_for)
    assert made == pytest.approx({"shared": -6.0, "own": -8.0}, abs=1e-5)


@pytest.mark.parametrize(("exit_head", "head"), [("all", 0.5), ("trained_only", 1.0)])
def test_noside_exit_head_setting_decides_average(exit_head: Any, head: float, scripted: Callable[..., Any]) -> None:
    uploads = {"0": {"shared": 0.0, "head": 1.0}, "1": {"shared": 4.0, "head": 0.0, "own": 3.0}}
    made = one_round(NoSide(exit_head), uploads, True, scripted)
    assert made("simple") == {"shared": 2.0, "head": head}
    assert made("complex") == {"shared": 2.0, "head": head, "own": 3.0}

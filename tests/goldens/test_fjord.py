"""FjORD and FedProx compared with values worked out by hand."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Step
from fedloom.data import Examples
from fedloom.fleet import Device, Fleet, Reply, RoundContext, make_nested_tiers
from fedloom.methods.fedprox import FedProx
from fedloom.methods.fjord import FjORD
from fedloom.models import StepSeeds, build_model
from fedloom.tensors import Parcel, Tensors


def square(size: int) -> nn.Module:
    return nn.Linear(size, size, bias=False)


@pytest.mark.parametrize(("counts", "corner"), [({"wide": 10, "half": 30}, 4.0), ({"wide": 7, "half": 7}, 3.0)])
def test_fjord_regions_are_weighted_by_examples(
    counts: dict[str, int], corner: float, scripted: Callable[..., object]
) -> None:
    """With equal counts this would be HeteroFL's average."""
    tiers = make_nested_tiers(
        [(name, build_model("square", square, {"size": size}, (size,), size)) for name, size in SIZES.items()]
    )
    fleet = Fleet(tiers, (0.5, 0.5), 2, seed=0)

    def answer(device: Device, inbox: Parcel) -> Reply:
        return Reply(device, counts[device.tier], {"weights": {"weight": torch.tensor(SAID[device.tier])}})

    context = RoundContext(1, fleet.devices(1), fleet, scripted(answer))  # type: ignore[arg-type]
    made = FjORD().round({"weights": {"weight": torch.zeros(2, 2)}}, context)["weights"]["weight"]
    assert made.tolist() == [[corner, 2.0], [3.0, 4.0]]


SIZES = {"wide": 2, "half": 1}
SAID = {"wide": [[1.0, 2.0], [3.0, 4.0]], "half": [[5.0]]}


def test_fjord_uncovered_region_is_unchanged(scripted: Callable[..., object]) -> None:
    tiers = make_nested_tiers(
        [(name, build_model("square", square, {"size": size}, (size,), size)) for name, size in SIZES.items()]
    )
    fleet = Fleet(tiers, (0.5, 0.5), 2, seed=0)
    half = [device for device in fleet.devices(1) if device.tier == "half"]
    engine = scripted(lambda device, inbox: Reply(device, 30, {"weights": {"weight": torch.tensor([[5.0]])}}))
    old = torch.tensor([[9.0, 8.0], [7.0, 6.0]])
    made = FjORD().round({"weights": {"weight": old}}, RoundContext(1, half, fleet, engine))  # type: ignore[arg-type]
    assert made["weights"]["weight"].tolist() == [[5.0, 8.0], [7.0, 6.0]]


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + self.weight


class ToTwoThenDescend:
    """Sets the weight to 2, then takes one step of rate 0.1."""

    lr = 0.1

    def start(self, weights: Tensors) -> Parcel:
        return {"past": {"steps": torch.zeros(1)}}

    def step(self, weights: Tensors, gradient: Tensors, state: Parcel, active: Tensor) -> None:
        descended = weights["weight"] - 0.1 * gradient["weight"]
        weights["weight"].copy_(descended if state["past"]["steps"] > 0 else torch.full_like(descended, 2.0))
        state["past"]["steps"].add_(1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("mu", "expected"), [(0.5, 2.05), (0.0, 2.1), (2.0, 1.9)])
def test_fedprox_proximal_term_matches_hand_value(
    mu: float, expected: float, monkeypatch: pytest.MonkeyPatch, client_for: Callable[..., object]
) -> None:
    """f = (w - 3)²/2, broadcast 1, now at 2."""

    def half_a_square(logits: Tensor, batch: Batch) -> Tensor:
        return (logits - 3).square().sum(-1).mean(1) / 2

    monkeypatch.setattr(import_module("fedloom.client.losses"), "supervised_loss", half_a_square)
    step = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    examples = Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    client = client_for(build_model("number", Number, {}, (1,), 1), examples, [step, step], ToTwoThenDescend())
    made = FedProx(mu).train.run(client, {"weights": {"weight": torch.ones(1, 1)}}).upload["weights"]["weight"]  # type: ignore[arg-type]
    assert float(made) == pytest.approx(expected, abs=1e-12)

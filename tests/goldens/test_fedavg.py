"""FedAvg compared with values worked out by hand."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from fedloom.fleet import Device, Fleet, Reply, RoundContext, make_nested_tiers
from fedloom.methods.fedavg import FedAvg
from fedloom.models import build_model
from fedloom.tensors import Parcel


def one_number() -> nn.Module:
    return nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(("weighting", "expected"), [("examples", 5.0), ("uniform", 4.0)])
def test_fedavg_two_devices_are_averaged(
    weighting: Literal["examples", "uniform"], expected: float, scripted: Callable[..., Any]
) -> None:
    """n = (1, 3), w = (2, 6)."""
    fleet = Fleet(make_nested_tiers([("a", build_model("one_number", one_number, {}, (1,), 1))]), (1.0,), 2, seed=0)

    def answer(device: Device, inbox: Parcel) -> Reply:
        examples, value = {"0": (1, 2.0), "1": (3, 6.0)}[device.name]
        return Reply(device, examples, {"weights": {"weight": torch.tensor([[value]])}})

    context = RoundContext(1, fleet.devices(1), fleet, scripted(answer))
    made = FedAvg(weighting=weighting).round({"weights": {"weight": torch.tensor([[-1.0]])}}, context)
    assert made["weights"]["weight"].tolist() == [[expected]]


def test_fedavg_default_weights_by_examples() -> None:
    assert FedAvg().weighting == "examples"

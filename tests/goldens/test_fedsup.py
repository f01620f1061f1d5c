"""FedSup and E-FedSup compared with values worked out by hand, on models of one or two weights."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Sgd, Step, soft_cross_entropy
from fedloom.data import Examples
from fedloom.fleet import Device, Fleet, Reply, RoundContext, make_nested_tiers
from fedloom.footprints import find_footprint
from fedloom.methods import Method
from fedloom.methods.efedsup import EFedSup
from fedloom.methods.fedsup import FedSup
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import Model, StepSeeds, build_model
from fedloom.tensors import Parcel


class Line(nn.Module):
    """Its logit is its weights times slopes; subnets have their own slopes."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.slopes = (0.9,) if size == 1 else (0.4, -0.2)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x * 0 + sum(slope * self.weight[n] for n, slope in enumerate(self.slopes))
        return total


def line(size: int) -> Model:
    return build_model("line", Line, {"size": size}, (1,), 1)


def the_logit(logits: Tensor, batch: Batch) -> Tensor:
    return logits.squeeze(-1).mean(1)


@pytest.mark.parametrize(
    ("method", "limit", "expected"),
    [
        (FedSup(subnets=2, distillation=False, space={"size": (1,)}), 1.0, [-1.0, 0.2]),
        (FedSup(subnets=2, distillation=False, space={"size": (1,)}), None, [-1.3, 0.2]),
        (FedSup(subnets=1), 1.0, [-0.4, 0.2]),
    ],
)
def test_fedsup_gradients_are_summed_then_clipped_once(
    method: Any,
    limit: float | None,
    expected: list[float],
    monkeypatch: pytest.MonkeyPatch,
    client_for: Callable[..., Any],
) -> None:
    monkeypatch.setattr(import_module("fedloom.methods.fedsup"), "supervised_loss", the_logit)
    one = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    examples = Examples(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    client = client_for(line(2), examples, [one], Sgd(1.0, clip_value=limit), tier_models={"a": line(2), "b": line(1)})
    made = method.train.run(client, {"weights": {"weight": torch.zeros(1, 2)}}).upload["weights"]["weight"]
    assert made[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_efedsup_missing_weights_are_filled_with_broadcast(scripted: Callable[..., Any]) -> None:
    """The large device samples the whole supernet, the small one its half."""
    made: dict[str, list[float]] = {}
    methods = {
        "padding": EFedSup(),
        "holders": EFedSup(aggregation="holders"),
        "heterofl": HeteroFL(only_seen_rows=False),
    }
    for name, method in methods.items():
        for seed in range(20):
            fleet = Fleet(make_nested_tiers([("full", line(2)), ("half", line(1))]), (0.5, 0.5), 2, seed)
            engine = scripted(answer_by_size)
            context = RoundContext(1, fleet.devices(1), fleet, engine)
            weights = method.round({"weights": {"weight": torch.zeros(2)}}, context)["weights"]["weight"]
            if [device.model for device in engine.asked[0][1]] == [line(2), line(1)]:
                made[name] = weights.tolist()
    assert made == {"padding": [4.0, 2.0], "holders": [4.0, 4.0], "heterofl": [4.0, 4.0]}


def answer_by_size(device: Device, inbox: Parcel) -> Reply:
    sent = {1: [6.0], 2: [2.0, 4.0]}[len(inbox["weights"]["weight"])]
    labels = {"seen": torch.ones(1, dtype=torch.bool)}
    return Reply(device, 10, {"weights": {"weight": torch.tensor(sent)}, "labels": labels})


@pytest.mark.parametrize("method", [FedSup(), EFedSup()])
def test_fedsup_devices_are_weighted_by_examples(method: Method, scripted: Callable[..., Any]) -> None:
    """One tier: 2 from 10 examples and 6 from 30."""
    fleet = Fleet(make_nested_tiers([("one", line(1))]), (1.0,), 2, seed=0)
    values = {"0": (10, 2.0), "1": (30, 6.0)}

    def answer(device: Device, inbox: Parcel) -> Reply:
        examples, value = values[device.name]
        return Reply(device, examples, {"weights": {"weight": torch.tensor([value])}})

    context = RoundContext(1, fleet.devices(1), fleet, scripted(answer))
    assert method.round({"weights": {"weight": torch.zeros(1)}}, context)["weights"]["weight"].tolist() == [5.0]


@pytest.mark.usefixtures("double")
def test_soft_cross_entropy_matches_hand_value() -> None:
    teacher, student = torch.tensor([[[2.0, 0.0]]]), torch.zeros(1, 1, 2)
    loss = float(soft_cross_entropy(student, teacher))
    entropy = float(soft_cross_entropy(teacher, teacher))
    assert loss == pytest.approx(0.693147, abs=1e-6)
    assert loss - entropy == pytest.approx(0.327813, abs=1e-6)


@pytest.mark.parametrize(("side", "first"), [(3, 16), (5, 8), (7, 0)])
def test_smaller_kernel_is_center_crop(side: int, first: int) -> None:
    kernel = torch.arange(49).view(1, 1, 7, 7)
    cut = find_footprint({"w": torch.Size([1, 1, side, side])}, {"w": kernel.shape}).read({"w": kernel})["w"][0, 0]
    assert cut.tolist() == [[first + 7 * row + column for column in range(side)] for row in range(side)]

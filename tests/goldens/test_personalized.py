"""Ditto, LG-FedAvg, Per-FedAvg, FedRep and FedProx compared with values worked out by hand."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Client, ClientResult, Sgd, Step
from fedloom.data import Examples
from fedloom.fleet import Fleet, Reply, RoundContext, make_tiers
from fedloom.methods.ditto import Ditto
from fedloom.methods.fedprox import FedProx
from fedloom.methods.fedrep import FedRep
from fedloom.methods.lgfedavg import LGFedAvg
from fedloom.methods.perfedavg import PerFedAvg
from fedloom.models import Model, StepSeeds, build_model


class Off(nn.Module):
    """The error is the distance of its only weight from three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * 0 + self.weight - 3


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Product(nn.Module):
    """The error is the distance of the product of its weights from two."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Times(), Times()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.body(x)) - 2
        return made


OFF, PRODUCT = (build_model(kind.__name__, kind, {}, (1,), 1) for kind in (Off, Product))
LR = 0.1


def half_a_square(logits: Tensor, batch: Batch) -> Tensor:
    return logits.square().sum(-1).mean(1) / 2


@pytest.fixture(autouse=True)
def _squares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("fedloom.client.losses"), "supervised_loss", half_a_square)


@pytest.fixture
def train(client_for: Callable[..., Client]) -> Callable[..., ClientResult]:
    """One device that sees a one in each of `steps` steps."""

    def run(method: Any, whole: Model, given: dict[str, float], own: dict[str, float], steps: int = 1) -> ClientResult:
        held, examples = {"weights": block(own)}, Examples(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
        plan = [
            Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)), number=n)
            for n in range(steps)
        ]
        made: ClientResult = method.train.run(
            client_for(whole, examples, plan, Sgd(LR), state=held), {"weights": block(given)}
        )
        return made

    return run


def block(numbers: dict[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor([[number]]) for name, number in numbers.items()}


def numbers(tensors: Any) -> Any:
    return pytest.approx({name: float(tensor) for name, tensor in tensors.items()}, abs=1e-6)


def test_ditto_step_matches_hand_value(train: Callable[..., ClientResult]) -> None:
    """The global model is trained as in FedAvg: 1 + 0.1 · 2."""
    made = train(Ditto(), OFF, {"weight": 1.0}, {"weight": 0.0})
    assert made.state is not None
    assert numbers(made.state["weights"]) == {"weight": 0.375}
    assert numbers(made.upload["weights"]) == {"weight": 1.2}


def test_ditto_fedbabu_compat_matches_hand_value(train: Callable[..., ClientResult]) -> None:
    """From the received 1, kept close to its trained copy 1.2: 1 + 0.1 (2 + 0.75 · 0.2). The old state is dropped."""
    made = train(Ditto(fedbabu_compat=True), OFF, {"weight": 1.0}, {"weight": 0.0})
    assert made.state is not None
    assert numbers(made.state["weights"]) == {"weight": 1.215}
    assert numbers(made.upload["weights"]) == {"weight": 1.215}


@pytest.mark.parametrize("steps", [1, 2])
def test_perfedavg_steps_match_hand_value(steps: int, train: Callable[..., ClientResult]) -> None:
    """First order: the full derivative would give 0.243. One batch is used twice."""
    made = train(PerFedAvg(), OFF, {"weight": 0.0}, {}, steps)
    assert numbers(made.upload["weights"]) == {"weight": 0.27}


@pytest.mark.parametrize(("rate", "weight"), [(0.0, 0.3), (0.5, 0.15), (1.0, 0.0)])
def test_perfedavg_adaptation_rate_matches_hand_value(
    rate: float, weight: float, train: Callable[..., ClientResult]
) -> None:
    made = train(PerFedAvg(rate), OFF, {"weight": 0.0}, {})
    assert numbers(made.upload["weights"]) == {"weight": weight}


def test_fedrep_step_matches_hand_value(train: Callable[..., ClientResult]) -> None:
    made = train(FedRep(), PRODUCT, {"body.weight": 1.0}, {"head.weight": 1.0})
    assert made.state is not None
    assert numbers(made.state["weights"]) == {"head.weight": 1.1}
    assert numbers(made.upload["weights"]) == {"body.weight": 1.099}


@pytest.mark.parametrize(
    ("shared", "name"), [("head", "head.weight"), ("body", "body.weight"), (("body",), "body.weight")]
)
def test_lgfedavg_step_matches_hand_value(shared: Any, name: str, train: Callable[..., ClientResult]) -> None:
    other = {"head.weight": "body.weight", "body.weight": "head.weight"}[name]
    made = train(LGFedAvg(shared), PRODUCT, {name: 1.0}, {other: 1.0})
    assert made.state is not None
    assert numbers(made.upload["weights"]) == {name: 1.1}
    assert numbers(made.state["weights"]) == {other: 1.1}


def test_lgfedavg_shared_layers_are_weighted_by_examples(scripted: Callable[..., Any]) -> None:
    fleet, method = Fleet(make_tiers([("a", PRODUCT)]), (1.0,), 2, seed=0), LGFedAvg()
    uploads = {"0": (2.0, 1), "1": (6.0, 3)}
    engine = scripted(
        lambda device, inbox: Reply(
            device, uploads[device.name][1], {"weights": {"head.weight": torch.tensor([uploads[device.name][0]])}}
        )
    )
    server = method.round(method.start(fleet, 0), RoundContext(1, fleet.devices(1), fleet, engine))
    assert numbers(server["weights"]) == {"head.weight": 5.0}
    assert all(box["weights"].keys() == {"head.weight"} for _, boxes in engine.asked for box in boxes.values())


def test_fedprox_two_steps_match_hand_value(train: Callable[..., ClientResult]) -> None:
    """From 1 to 1.2; then the proximal term is half of 0.2 and the loss gradient 1.8."""
    made = train(FedProx(0.5), OFF, {"weight": 1.0}, {}, steps=2)
    assert numbers(made.upload["weights"]) == {"weight": 1.37}

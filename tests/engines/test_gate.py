"""Every reply passes the one gate, and each fault has its code."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.client import Client, ClientResult, Task, like, shaped
from fedloom.engines import refuse
from fedloom.fleet import Device, Reply, Request, make_nested_tiers
from fedloom.models import build_model
from fedloom.tensors import Parcel


def tiny() -> nn.Module:
    return nn.Linear(2, 3)


def run(client: Client, inbox: Parcel) -> ClientResult:
    return ClientResult({})


TASK = Task("train", run, {"weights": like("weights"), "labels": shaped(seen=(("classes",), torch.bool))})
INBOX = {"weights": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}}


def device() -> Device:
    tier = make_nested_tiers([("a", build_model("tiny", tiny, {}, (2,), 3))])[0]
    return Device("07", "a", tier.model, tier.footprint)


def good() -> dict[str, dict[str, Any]]:
    return {
        "weights": {"weight": torch.ones(3, 2), "bias": torch.ones(3)},
        "labels": {"seen": torch.tensor([True, False, True])},
    }


def changed(bundle: str, name: str, tensor: Any) -> dict[str, dict[str, Any]]:
    return {**good(), bundle: {**good()[bundle], name: tensor}}


def without(bundle: str, name: str) -> dict[str, dict[str, Any]]:
    return {**good(), bundle: {key: value for key, value in good()[bundle].items() if key != name}}


def test_refuse_good_reply_is_admitted() -> None:
    assert refuse(Reply(device(), 1, good()), TASK, INBOX) is None


@pytest.mark.parametrize(
    ("sent", "code", "word"),
    [
        ({"weights": good()["weights"]}, "KEYS", "labels"),
        ({**good(), "secrets": {}}, "KEYS", "secrets"),
        (without("weights", "bias"), "KEYS", "bias"),
        (changed("weights", "extra", torch.zeros(1)), "KEYS", "extra"),
        (changed("weights", "weight", torch.zeros(2, 3)), "SHAPE", "weight"),
        (changed("weights", "bias", torch.zeros(())), "SHAPE", "bias"),
        (changed("labels", "seen", torch.ones(4, dtype=torch.bool)), "SHAPE", "seen"),
        (changed("weights", "bias", torch.zeros(3, dtype=torch.float64)), "DTYPE", "bias"),
        (changed("labels", "seen", torch.ones(3)), "DTYPE", "seen"),
        (changed("weights", "bias", torch.tensor([0.0, float("nan"), 0.0])), "NONFINITE", "bias"),
        (changed("weights", "weight", torch.full((3, 2), -float("inf"))), "NONFINITE", "weight"),
        (changed("weights", "weight", torch.full((3, 2), 1e30)), "HUGE", "weight"),
    ],
)
def test_refuse_each_fault_has_code_and_place(sent: Parcel, code: str, word: str) -> None:
    refusal = refuse(Reply(device(), 1, sent), TASK, INBOX)
    assert refusal is not None
    assert (refusal.device, refusal.code) == ("07", code)
    assert word in refusal.reason


@pytest.mark.parametrize("examples", [0, -1, 10**18, 2.0, float("nan"), True, None])
def test_refuse_impossible_example_count(examples: Any) -> None:
    refusal = refuse(Reply(device(), examples, good()), TASK, INBOX)
    assert refusal is not None
    assert refusal.code == "VALUE"


def test_refuse_declared_layout_follows_inbox() -> None:
    """A narrower device's reply must be as narrow as what it was given."""
    inbox = {"weights": {"weight": torch.zeros(3, 1), "bias": torch.zeros(3)}}
    assert refuse(Reply(device(), 1, good()), TASK, inbox) is not None
    assert refuse(Reply(device(), 1, changed("weights", "weight", torch.ones(3, 1))), TASK, inbox) is None


def test_refuse_undeclared_bundle() -> None:
    silent = replace(TASK, sends={})
    assert refuse(Reply(device(), 1, {}), silent, {}) is None
    refusal = refuse(Reply(device(), 1, good()), silent, {})
    assert refusal is not None
    assert refusal.code == "KEYS"


def test_engine_refused_reply_is_reported_and_skipped(world: Callable[..., Any]) -> None:
    from fedloom.methods.fedavg import FedAvg

    place = world(sizes=(4, 4, 4))

    def one_is_broken(client: Client, inbox: Parcel) -> ClientResult:
        weights = {name: tensor.clone() for name, tensor in inbox["weights"].items()}
        weights["classifier.bias"][1] = torch.nan
        return ClientResult({"weights": weights})

    task = Task("train", one_is_broken, {"weights": like("weights")})
    engine = place.engine(FedAvg())
    inbox = {"weights": place.fleet.global_model.initial_weights(0)}
    replies = list(engine.ask(Request(task, dict.fromkeys(place.fleet.devices(1), inbox), 1)))
    assert sorted(reply.device.name for reply in replies) == ["0", "2"]
    assert [(refusal.device, refusal.code) for refusal in place.refusals] == [("1", "NONFINITE")]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_refuse_nonfinite_state(value: float) -> None:
    """A personal model that diverged once would stay so for good."""
    kept = {"weights": {"weight": torch.tensor([1.0, value])}}
    refusal = refuse(Reply(device(), 1, good(), state=kept), TASK, INBOX)
    assert refusal is not None and refusal.code == "NONFINITE"
    assert refuse(Reply(device(), 1, good(), state={"weights": {"weight": torch.ones(2)}}), TASK, INBOX) is None

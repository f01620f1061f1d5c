"""What a method may use in a round: asking, counted and sorted."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedloom.client import Client, ClientResult, Task
from fedloom.fleet import Device, Fleet, Reply, Request, RoundContext, ServerModel, make_nested_tiers, tier_slices
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import build_model
from fedloom.tensors import Parcel


def tiny(size: int) -> nn.Module:
    return nn.Linear(size, 10)


def fleet_of(devices: int) -> Fleet:
    models = [(str(size), build_model("tiny", tiny, {"size": size}, (size,), 10)) for size in (4, 2)]
    return Fleet(make_nested_tiers(models), (0.5, 0.5), devices, seed=5)


def nothing(client: Client, inbox: Parcel) -> ClientResult:
    return ClientResult({})


TASK = Task("nothing", nothing, {})


def backwards(replies: dict[str, Parcel]) -> Callable[..., Any]:
    return lambda device, inbox: Reply(device, 1, replies[device.name]) if device.name in replies else None


def test_ask_replies_are_sorted_by_device(scripted: Callable[..., Any]) -> None:
    fleet = fleet_of(11)
    shuffled = list(reversed(fleet.devices(1)))
    context = RoundContext(1, shuffled, fleet, scripted(lambda device, inbox: Reply(device, 1, {})))
    names = [reply.device.name for reply in context.ask(TASK, {device: {} for device in shuffled})]
    assert names == sorted(names)
    assert len(names) == 11


def test_ask_counts_bytes_of_the_parcels(scripted: Callable[..., Any]) -> None:
    """4 bytes a float, 8 an integer, a bit a truth value, rounded up to bytes tensor by tensor."""
    fleet = fleet_of(3)
    inbox = {"weights": {"w": torch.zeros(5)}, "meta": {"round": torch.tensor(3)}}
    sent = {"weights": {"w": torch.zeros(5)}, "labels": {"seen": torch.zeros(10, dtype=torch.bool)}}
    replies = {"0": sent, "2": sent}
    context = RoundContext(1, fleet.devices(1), fleet, scripted(backwards(replies)))
    context.ask(TASK, dict.fromkeys(context.cohort, inbox))
    assert (context.traffic.asked, context.traffic.replied) == (3, 2)
    assert context.traffic.bytes_down == 3 * (20 + 8)
    assert context.traffic.bytes_up == 2 * (20 + 2)
    context.ask(TASK, {context.cohort[0]: inbox})
    assert context.traffic.bytes_down == 4 * 28
    assert (context.traffic.asked, context.traffic.replied) == (4, 3)


def test_ask_heterofl_round_costs_the_bytes_of_its_slices(scripted: Callable[..., Any]) -> None:
    """Down 4 bytes a weight of the slice; up the same and one bit a class."""
    fleet = fleet_of(4)

    def answer(device: Device, inbox: Parcel) -> Reply:
        return Reply(device, 1, {"weights": inbox["weights"], "labels": {"seen": torch.ones(10, dtype=torch.bool)}})

    context = RoundContext(1, fleet.devices(1), fleet, scripted(answer))
    HeteroFL().round({"weights": fleet.global_model.initial_weights(0)}, context)
    down = 2 * 4 * (10 * 4 + 10) + 2 * 4 * (10 * 2 + 10)
    assert context.traffic.bytes_down == down
    assert context.traffic.bytes_up == down + 4 * 2


@dataclass
class Counting:
    """Notes how often each task was asked before in this round."""

    repeats: list[tuple[str, int, int]] = field(default_factory=list)

    def ask(self, request: Request) -> Iterator[Reply]:
        self.repeats.append((request.task.name, request.round_number, request.repeat))
        return iter(())

    def commit(self, round_number: int) -> None: ...


def test_ask_same_stream_twice_increments_repeat() -> None:
    """Otherwise both exchanges would draw the same batches."""
    fleet, engine = fleet_of(2), Counting()
    context = RoundContext(7, fleet.devices(7), fleet, engine)
    for task in (TASK, TASK, Task("other", nothing, {}, stream="other"), Task("more", nothing, {})):
        context.ask(task, {})
    assert engine.repeats == [("nothing", 7, 0), ("nothing", 7, 1), ("other", 7, 0), ("more", 7, 2)]
    assert RoundContext(8, [], fleet, engine).ask(TASK, {}) == []
    assert engine.repeats[-1] == ("nothing", 8, 0)


def test_draw_depends_only_on_purpose_and_round() -> None:
    fleet = fleet_of(2)
    context, again, later = (RoundContext(number, [], fleet, Counting()) for number in (1, 1, 2))
    again.draw("other").random(10)
    first = context.draw("pick").random(4).tolist()
    assert again.draw("pick").random(4).tolist() == first
    assert context.draw("other").random(4).tolist() != first
    assert later.draw("pick").random(4).tolist() != first


def test_tier_slices_weights_have_each_tiers_shapes() -> None:
    fleet = fleet_of(2)
    weights = fleet.global_model.initial_weights(0)
    candidate = tier_slices(weights, -1.0)
    assert isinstance(candidate, ServerModel)
    assert candidate.unseen_logit == -1.0
    for tier in fleet.tiers:
        assert {name: t.shape for name, t in candidate.weights(tier).items()} == dict(tier.model.shapes())

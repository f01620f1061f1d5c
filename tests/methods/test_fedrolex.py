"""FedRolex: windows that roll through all layers together, and their aggregation."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.fleet import Device, Fleet, Reply, RoundContext, make_nested_tiers
from fedloom.methods.fedrolex import FedRolex
from fedloom.models import Model, StepSeeds, build_model
from fedloom.tensors import Parcel

SIDES = {"large": (3, 4, 6, 2), "middle": (3, 3, 4, 2), "small": (3, 2, 3, 2)}  # inputs, two hidden layers, classes


def layers(sides: tuple[int, ...]) -> nn.Module:
    made = [part for before, after in pairwise(sides) for part in (nn.Linear(before, after), nn.Tanh())]
    return nn.Sequential(*made[:-1])


def fleet_of(devices: int) -> Fleet:
    models = [(name, build_model("layers", layers, {"sides": sides}, (3,), 2)) for name, sides in SIDES.items()]
    return Fleet(make_nested_tiers(models), (1 / 3, 1 / 3, 1 / 3), devices, seed=0)


def window(number: int, small: int, large: int) -> list[int]:
    """The units of a layer in a device's window of a round."""
    return list(range(large)) if small == large else [(number - 1 + unit) % large for unit in range(small)]


def asked(method: FedRolex, fleet: Fleet, server: Parcel, number: int, scripted: Any) -> dict[Device, Parcel]:
    engine = scripted(lambda device, inbox: None)
    method.round(server, RoundContext(number, fleet.devices(number), fleet, engine))
    return dict(engine.asked[0][1])


@pytest.mark.usefixtures("double")
def test_fedrolex_device_gets_units_of_its_window(scripted: Callable[..., Any]) -> None:
    """Its outputs are those of the full model with all other units set to zero."""
    fleet, x = fleet_of(3), torch.randn(5, 3)
    weights = {name: torch.randn(shape) for name, shape in fleet.global_model.shapes().items()}
    for number in range(1, 14):
        for device, inbox in asked(FedRolex(), fleet, {"weights": weights}, number, scripted).items():
            sides, hidden = SIDES[device.tier], x
            for layer, (small, large) in enumerate(zip(sides[1:], SIDES["large"][1:], strict=True)):
                made = hidden @ weights[f"{2 * layer}.weight"].T + weights[f"{2 * layer}.bias"]
                silence = torch.zeros(large)
                silence[window(number, small, large)] = 1
                hidden = made if layer == 2 else made.tanh() * silence
            own = {name: tensor[None] for name, tensor in inbox["weights"].items()}
            assert torch.allclose(device.model(own, x[None], StepSeeds((0,))).logits[0], hidden, atol=1e-12)


def test_fedrolex_random_window_is_drawn_by_tier_and_round(scripted: Callable[..., Any]) -> None:
    """A window as any other, at a place that seed, round and tier decide; all places occur."""
    fleet, method = fleet_of(6), FedRolex(window="random")
    server = {"weights": {name: torch.randn(shape) for name, shape in fleet.global_model.shapes().items()}}
    starts: dict[str, set[int]] = {tier: set() for tier in SIDES}
    for number in range(1, 61):
        found: dict[str, set[int]] = {tier: set() for tier in SIDES}
        for device, inbox in asked(method, fleet, server, number, scripted).items():
            first = inbox["weights"]["2.bias"][0]
            found[device.tier].add(int((server["weights"]["2.bias"] == first).nonzero()[0]))
        assert all(len(places) == 1 for places in found.values())
        starts = {tier: starts[tier] | places for tier, places in found.items()}
    assert starts == {"large": {0}, "middle": set(range(6)), "small": set(range(6))}


@pytest.mark.usefixtures("double")
def test_fedrolex_sampled_channels_are_a_subnetwork_drawn_by_tier_and_round(scripted: Callable[..., Any]) -> None:
    """Every device's outputs are those of the full model with the units it lacks set to zero; all sets occur."""
    fleet, x, method = fleet_of(6), torch.randn(5, 3), FedRolex(window="sampled")
    weights = {name: torch.randn(shape) for name, shape in fleet.global_model.shapes().items()}
    seen: dict[str, set[tuple[int, ...]]] = {tier: set() for tier in SIDES}
    for number in range(1, 121):
        found: dict[str, set[tuple[int, ...]]] = {tier: set() for tier in SIDES}
        for device, inbox in asked(method, fleet, {"weights": weights}, number, scripted).items():
            hidden = x
            for layer in range(3):
                bias = weights[f"{2 * layer}.bias"]
                silence = torch.isin(bias, inbox["weights"][f"{2 * layer}.bias"])
                made = hidden @ weights[f"{2 * layer}.weight"].T + bias
                hidden = made if layer == 2 else made.tanh() * silence
                if layer == 1:
                    found[device.tier].add(tuple(silence.nonzero().flatten().tolist()))
            own = {name: tensor[None] for name, tensor in inbox["weights"].items()}
            assert torch.allclose(device.model(own, x[None], StepSeeds((0,))).logits[0], hidden, atol=1e-12)
        assert all(len(sets) == 1 for sets in found.values())
        seen = {tier: seen[tier] | sets for tier, sets in found.items()}
    assert {tier: len(sets) for tier, sets in seen.items()} == {"large": 1, "middle": 15, "small": 20}


def test_fedrolex_windows_cover_weights_equally(scripted: Callable[..., Any]) -> None:
    """Over a full cycle of twelve rounds: layers of four and of six units."""
    fleet = fleet_of(3)
    numbered = {name: torch.arange(shape.numel()).view(shape) for name, shape in fleet.global_model.shapes().items()}
    visits = {tier: {name: torch.zeros(t.numel()) for name, t in numbered.items()} for tier in SIDES}
    for number in range(1, 13):
        for device, inbox in asked(FedRolex(), fleet, {"weights": numbered}, number, scripted).items():
            for name, tensor in inbox["weights"].items():
                visits[device.tier][name][tensor.flatten()] += 1
    for tier, sides in SIDES.items():
        for name, count in visits[tier].items():
            layer = int(name[0]) // 2
            whole = SIDES["large"]
            share = sides[layer + 1] / whole[layer + 1]
            if name.endswith("weight") and layer != 1:  # between hidden layers both axes roll by the same step
                assert count.tolist() == [12 * share * sides[layer] / whole[layer]] * len(count)
            elif name.endswith("bias"):
                assert count.tolist() == [12 * share] * len(count)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_fedrolex_aggregate_is_mean_over_holders(weighting: Any, scripted: Callable[..., Any]) -> None:
    fleet, draw = fleet_of(6), torch.Generator().manual_seed(0)
    old = {name: torch.randn(shape, generator=draw) for name, shape in fleet.global_model.shapes().items()}
    for number in (1, 3, 6, 11):
        for cohort in (fleet.devices(number), fleet.devices(number)[4:]):
            sent_replies: dict[str, Reply] = {}

            def answer(device: Device, inbox: Parcel, sent_replies: Any = sent_replies) -> Reply:
                sent = {name: torch.randn(t.shape, generator=draw) for name, t in inbox["weights"].items()}
                sent_replies[device.name] = Reply(device, int(device.name) + 1, {"weights": sent})
                return sent_replies[device.name]  # type: ignore[no-any-return]

            context = RoundContext(number, cohort, fleet, scripted(answer))
            made = FedRolex(weighting).round({"weights": old}, context)["weights"]
            for name, tensor in old.items():
                total, mass = torch.zeros(tensor.shape, dtype=torch.float64), torch.zeros(tensor.shape)
                for reply in sent_replies.values():
                    sent = reply.upload["weights"][name]
                    rows = [window(number, *sizes) for sizes in zip(sent.shape, tensor.shape, strict=True)]
                    share = reply.examples if weighting == "examples" else 1
                    for index in torch.ones(sent.shape).nonzero().tolist():
                        at = tuple(rows[axis][sim] for axis, sim in enumerate(index))
                        total[at] += share * float(sent[tuple(index)])
                        mass[at] += share
                expected = torch.where(mass > 0, (total / mass.clamp_min(1)).float(), tensor)
                assert torch.allclose(made[name], expected, rtol=0, atol=1e-6)
                assert torch.equal(made[name][mass == 0], tensor[mass == 0])


def test_fedrolex_window_moves_every_round(
    world: Callable[..., Any], scripted: Callable[..., Any], difference: Callable[..., float]
) -> None:
    sim = world(widths=(1.0, 0.5), sizes=(8, 8))
    server = FedRolex().start(sim.fleet, 0)
    boxes = [
        {device.tier: inbox for device, inbox in asked(FedRolex(), sim.fleet, server, number, scripted).items()}
        for number in (1, 2)
    ]
    assert difference(boxes[0]["b"], boxes[1]["b"]) > 0
    assert difference(boxes[0]["a"], boxes[1]["a"]) == 0
    assert difference(boxes[0]["b"], {"weights": sim.fleet.smallest.footprint.read(server["weights"])}) == 0


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_fedrolex_rolled_model_gives_same_outputs(
    number: int, family: str, tiny_model: Callable[..., Model], scripted: Callable[..., Any]
) -> None:
    """For every family sliced in width only: a window of the full model is a leading slice of the rolled model."""
    pool = {"exit_pool": "global"} if family == "preactresnet" else {}
    models = [
        (name, tiny_model(family, width=width, normalization="none", **pool))
        for name, width in (("a", 1.0), ("b", 0.5))
    ]
    fleet = Fleet(make_nested_tiers(models), (0.5, 0.5), 2, seed=0)
    draw = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in fleet.global_model.shapes().items()}
    fixed = fleet.smallest.model.shapes()
    rolled = {name: back(tensor, fixed[name], number - 1) for name, tensor in weights.items()}
    x = torch.randn(1, 3, *fleet.global_model.input_shape, generator=draw)
    before, after = (
        fleet.global_model({key: t[None] for key, t in one.items()}, x, StepSeeds((0,))).exits
        for one in (weights, rolled)
    )
    assert all(torch.allclose(logits, after[name], atol=1e-8) for name, logits in before.items())
    inbox = next(
        box
        for device, box in asked(FedRolex(), fleet, {"weights": weights}, number, scripted).items()
        if device.tier == "b"
    )
    first = fleet.smallest.footprint.read(rolled)
    assert all(torch.equal(tensor, first[name]) for name, tensor in inbox["weights"].items())


def back(tensor: Tensor, small: torch.Size, steps: int) -> Tensor:
    """Roll every sliced axis back by this many units."""
    for axis, size in enumerate(small):
        if size < tensor.shape[axis]:
            tensor = tensor.roll(-steps, axis)
    return tensor


def test_fedrolex_windows_do_not_depend_on_cohort(scripted: Callable[..., Any]) -> None:
    fleet = fleet_of(6)
    server = {"weights": fleet.global_model.initial_weights(0)}
    redrawn = replace(fleet, assignment="redrawn")
    found = [
        {(device.tier, tuple(inbox["weights"]["2.weight"].flatten().tolist())) for device, inbox in boxes.items()}
        for boxes in (asked(FedRolex(), one, server, 2, scripted) for one in (fleet, redrawn))
    ]
    assert found[1] <= found[0]

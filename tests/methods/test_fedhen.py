"""FedHeN, NoSide and Decouple: aggregation, what complex devices train, and reports."""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom
from fedloom.client import Schedule, Sgd
from fedloom.fleet import Device, Fleet, Reply, RoundContext, ServerModel, make_nested_tiers
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.methods.decouple import Decouple
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.noside import NoSide
from fedloom.models import Model, Outputs, build_model
from fedloom.recipe.errors import RecipeError
from fedloom.tensors import fingerprint

Build = Callable[..., Model]
NESTED = [FedHeN(), NoSide(), NoSide("trained_only")]
ALL = [*NESTED, Decouple()]
kinds_in_round = st.lists(st.sampled_from(["simple", "complex"]), min_size=1, max_size=5)


def two_sizes(tiny_model: Build) -> list[tuple[str, Model]]:
    """With an exit that pools the whole map, so that its learned proportion has a gradient on tiny images."""
    simple, whole = (tiny_model("preactresnet", stages=stages, exit_pool="global") for stages in (1, 2))
    return [("simple", simple), ("complex", whole)]


def random_replies(tiny_model: Build, kinds: list[str], seed: int) -> tuple[Fleet, dict[str, Tensor], list[Reply]]:
    """A fleet, a global model, and replies with random weights from devices of these kinds."""
    fleet, draw = (
        Fleet(make_nested_tiers(two_sizes(tiny_model)), (0.5, 0.5), 9, seed=0),
        torch.Generator().manual_seed(seed),
    )
    old = {name: torch.randn(shape, generator=draw) for name, shape in fleet.global_model.shapes().items()}
    tiers = {tier.name: tier for tier in fleet.tiers}
    replies = []
    for number, kind in enumerate(kinds):
        device = Device(str(number), kind, tiers[kind].model, tiers[kind].footprint)
        sent = {name: torch.randn(shape, generator=draw) for name, shape in tiers[kind].model.shapes().items()}
        replies.append(Reply(device, number + 1, {"weights": sent}))
    return fleet, old, replies


def play(
    method: Method, scripted: Callable[..., Any], fleet: Fleet, old: dict[str, Tensor], replies: list[Reply]
) -> dict[str, dict[str, Tensor]]:
    """Tier -> its model after a round with these replies, in this order."""
    answers = {reply.device: reply for reply in replies}
    context = RoundContext(1, list(answers), fleet, scripted(lambda device, inbox: answers[device]))
    candidate = method.eval_targets(method.round(method.start(fleet, 0, old), context))["server"]
    assert isinstance(candidate, ServerModel)
    return {tier.name: dict(candidate.weights(tier)) for tier in fleet.tiers}


def mean(tensors: list[Tensor], otherwise: Tensor) -> Tensor:
    if not tensors:
        return otherwise
    total = torch.zeros(otherwise.shape, dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(otherwise.dtype)


@pytest.mark.parametrize("method", ALL, ids=repr)
@given(kinds=kinds_in_round, seed=st.integers(0, 1000))
def test_fedhen_aggregate_is_mean_over_contributors(
    method: Any, kinds: list[str], seed: int, tiny_model: Build, scripted: Callable[..., Any]
) -> None:
    fleet, old, replies = random_replies(tiny_model, kinds, seed)
    made = play(method, scripted, fleet, old, replies)
    for tier in fleet.tiers:
        for name, shape in tier.model.shapes().items():
            updates = [
                reply.upload["weights"][name]
                for reply in replies
                if name in reply.upload["weights"]
                and not (isinstance(method, Decouple) and reply.device.tier != tier.name)
                and not (
                    getattr(method, "exit_head", "") == "trained_only"
                    and name.startswith("exit.")
                    and reply.device.tier == "complex"
                )
            ]
            assert made[tier.name][name].shape == shape
            assert torch.equal(made[tier.name][name], mean(updates, old[name])), name


@pytest.mark.parametrize("method", ALL, ids=repr)
@given(kinds=kinds_in_round, seed=st.integers(0, 1000), shuffle=st.randoms(use_true_random=False))
def test_fedhen_reply_order_does_not_matter(
    method: Method,
    kinds: list[str],
    seed: int,
    shuffle: random.Random,
    tiny_model: Build,
    scripted: Callable[..., Any],
) -> None:
    fleet, old, replies = random_replies(tiny_model, kinds, seed)
    orders = [replies, shuffle.sample(replies, len(replies))]
    made = [play(method, scripted, fleet, old, order) for order in orders]
    assert fingerprint(made[0]) == fingerprint(made[1])


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_fedhen_without_complex_devices_keeps_their_weights(
    method: Method, tiny_model: Build, scripted: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    fleet, old, replies = random_replies(tiny_model, ["simple", "simple"], 3)
    made = play(method, scripted, fleet, old, replies)
    simple = made["simple"].keys()
    assert all(bits_equal(made["complex"][name], old[name]) for name in old.keys() - simple)
    assert not any(bits_equal(made["simple"][name], old[name]) for name in simple)


def test_fedhen_without_simple_devices_averages_complex_ones(tiny_model: Build, scripted: Callable[..., Any]) -> None:
    fleet, old, replies = random_replies(tiny_model, ["complex", "complex"], 3)
    made = play(FedHeN(), scripted, fleet, old, replies)
    expected = {name: mean([reply.upload["weights"][name] for reply in replies], old[name]) for name in old}
    assert fingerprint({"": made["complex"]}) == fingerprint({"": expected})
    apart = play(Decouple(), scripted, fleet, old, replies)
    assert all(torch.equal(tensor, old[name]) for name, tensor in apart["simple"].items())


@pytest.fixture
def sim(world: Callable[..., Any], tiny_model: Build) -> Any:
    """Two simple devices and three complex ones."""
    return world(sizes=(8, 9, 8, 5, 7), models=two_sizes(tiny_model), shares=(0.4, 0.6), schedule=Schedule(4, 2))


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_fedhen_simple_model_stays_part_of_complex_model(method: Method, sim: Any) -> None:
    """Except for Decouple, whose tiers are independent."""
    engine, server = sim.engine(method), method.start(sim.fleet, 0)
    for number in (1, 2, 3):
        server = method.round(server, sim.context(engine, number, 0.6))
        candidate = method.eval_targets(server)["server"]
        assert isinstance(candidate, ServerModel)
        simple, whole = (candidate.weights(tier) for tier in sim.fleet.tiers)
        same = [torch.equal(weight, whole[name]) for name, weight in simple.items()]
        assert not any(same) if isinstance(method, Decouple) else all(same)


def with_nan_images(sim: Any, devices: list[int]) -> Any:
    """The same world, where these devices hold images of NaN."""
    train = sim.dataset.train
    x = train.x.float()
    for device in devices:
        x[torch.as_tensor(sim.partition.train[device])] = float("nan")
    return replace(sim, dataset=replace(sim.dataset, train=replace(train, x=x)), refusals=[])


@pytest.mark.parametrize("bad", [[0], [3], [0, 3], [2, 3, 4]])
@pytest.mark.parametrize("method", ALL, ids=repr)
def test_fedhen_nonfinite_reply_is_ignored(method: Any, bad: list[int], sim: Any) -> None:
    method = replace(method, report=True)
    here, there = with_nan_images(sim, []), with_nan_images(sim, bad)
    start = method.start(sim.fleet, 0)
    made = method.round(start, there.context(there.engine(method, devices_per_block=1)))
    context = here.context(here.engine(method, devices_per_block=1))
    fewer = replace(context, cohort=[device for device in context.cohort if int(device.name) not in bad])
    assert sorted(refusal.device for refusal in there.refusals) == [str(number) for number in bad]
    assert fingerprint(made) == fingerprint(method.round(start, fewer))


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_fedhen_only_nonfinite_replies_change_nothing(method: Any, sim: Any) -> None:
    method, there = replace(method, report=True), with_nan_images(sim, [0, 1, 2, 3, 4])
    start = method.start(sim.fleet, 0)
    assert fingerprint(method.round(start, there.context(there.engine(method)))) == fingerprint(start)
    assert len(there.refusals) == 5


def sent_in_one_round(method: Method, sim: Any, meddling: Callable[..., Any]) -> dict[str, dict[str, Tensor]]:
    engine = meddling(sim.engine(method, devices_per_block=1), list)
    method.round(method.start(sim.fleet, 0), sim.context(engine))
    return {reply.device.name: dict(reply.upload["weights"]) for reply in engine.delivered}


@pytest.mark.parametrize("exit_head", ["all", "trained_only"])
def test_noside_complex_device_does_not_train_exit_head(
    exit_head: Any, sim: Any, meddling: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """To the bit, with momentum and weight decay."""
    sim = replace(sim, optimizer=Sgd(0.1, momentum=0.9, weight_decay=0.1, clip_norm=1.0))
    start, sent = sim.fleet.global_model.initial_weights(0), sent_in_one_round(NoSide(exit_head), sim, meddling)
    for device in sim.fleet.devices(1):
        for name, weight in sent[device.name].items():
            untouched = name.startswith("exit.") and device.tier == "complex"
            assert bits_equal(weight, start[name]) == untouched, (device.tier, name)


def test_decouple_unused_exit_only_decays_and_changes_nothing_else(sim: Any, bits_equal: Callable[..., bool]) -> None:
    """The complex net's exit gets no gradient: weight decay shrinks it, and the other weights do not depend on it."""
    sim = replace(sim, optimizer=Sgd(0.1, momentum=0.9, weight_decay=0.1, clip_norm=1.0))
    method, weights = Decouple(), sim.fleet.global_model.initial_weights(0)
    unused = weights.keys() - sim.fleet.global_model.last_exit_weights()
    assert unused and all(name.startswith("exit.") for name in unused)
    other = {name: 3 * weight + 1 if name in unused else weight for name, weight in weights.items()}
    first, second = (
        method.round(method.start(sim.fleet, 0, start), sim.context(sim.engine(method)))["complex"]
        for start in (weights, other)
    )
    for name, start in other.items():
        if name in unused:
            share = second[name] / start
            assert float(share.min()) > 0.8 and float(share.max()) < 0.999
        else:
            assert bits_equal(first[name], second[name]) and not torch.equal(first[name], start)


def test_fedhen_side_objective_leaves_complex_only_weights(sim: Any, meddling: Callable[..., Any]) -> None:
    """After one step, which shows the gradient alone; a simple device trains the same way in both methods."""
    sim = replace(sim, schedule=Schedule(100), optimizer=Sgd(0.5))
    with_side, without = (sent_in_one_round(method, sim, meddling) for method in (FedHeN(), NoSide()))
    shared = sim.fleet.smallest.model.shapes()
    for device in sim.fleet.devices(1):
        for name, weight in with_side[device.name].items():
            same = torch.equal(weight, without[device.name][name])
            assert same == (device.tier == "simple" or name not in shared), (device.tier, name)


class Counting(nn.Module):
    """Counts forward and backward passes."""

    forwards = backwards = 0

    def __init__(self, both: bool):
        super().__init__()
        self.shared = nn.Linear(36, 4)
        self.own = nn.Linear(36, 4) if both else None

    def forward(self, x: Tensor) -> Outputs:
        Counting.forwards += 1
        x = Backwards.apply(x.flatten(1) + 0 * self.shared.bias.sum())  # type: ignore[no-untyped-call]
        exits = {"exit": self.shared(x)}
        if self.own is not None:
            exits["full"] = self.own(x)
        return Outputs(exits, {})


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *slopes: Tensor) -> Tensor:
        Counting.backwards += 1
        return slopes[0]


def test_fedhen_both_objectives_share_one_forward_pass(world: Callable[..., Any]) -> None:
    net = build_model("counting", Counting, {"both": True}, (1, 6, 6), 4)
    sim = world(models=[("complex", net)], sizes=(8,), schedule=Schedule(4, 3))
    method = FedHeN()
    engine = sim.engine(method, devices_per_block=1)
    server = sim.play(method, engine, rounds=1)  # after the trial passes that happen once
    Counting.forwards = Counting.backwards = 0
    method.round(server, sim.context(engine, 2))
    assert (Counting.forwards, Counting.backwards) == (6, 6)


@pytest.mark.parametrize("method", [FedHeN(report=True), NoSide(report=True), Decouple(report=True)], ids=repr)
def test_report_targets_are_means_of_last_uploads(
    method: Method, sim: Any, meddling: Callable[..., Any], world: Callable[..., Any], tiny_model: Build
) -> None:
    """Over several rounds, with devices not asked yet and with lost replies."""
    sim = world(sizes=(8, 9, 8, 5, 7, 8, 6), models=two_sizes(tiny_model), shares=(3 / 7, 4 / 7))
    engine = meddling(sim.engine(method), lambda replies: replies[1:])
    first, server = sim.fleet.global_model.initial_weights(0), method.start(sim.fleet, 0)
    last = {device.name: device.footprint.read(first) for device in sim.fleet.devices(1)}
    replied = set()
    for number in (1, 2, 3):
        server = method.round(server, sim.context(engine, number, 0.4))
        last.update({reply.device.name: dict(reply.upload["weights"]) for reply in engine.delivered})
        replied |= {reply.device.name for reply in engine.delivered}
        engine.delivered.clear()
        found = method.eval_targets(server)
        assert list(found) == ["server", "report_paper", "report_all"]
        assert all(isinstance(one, ServerModel) for one in found.values())
        for tier in sim.fleet.tiers:
            own = [device.name for device in sim.fleet.devices(1) if device.tier == tier.name]
            for candidate, names in (("report_paper", own), ("report_all", last if tier.name == "simple" else own)):
                made = found[candidate].weights(tier)  # type: ignore[union-attr, call-arg, arg-type]
                assert made.keys() == tier.model.shapes().keys()
                for name, weight in made.items():
                    assert torch.equal(weight, mean([last[device][name] for device in sorted(names)], weight))
    assert 0 < len(replied) < len(last)


def test_last_uploads_lost_or_nonfinite_reply_keeps_previous(sim: Any) -> None:
    method = FedHeN(report=True)
    start = method.start(sim.fleet, 0)
    there = with_nan_images(sim, [3])
    made = method.round(start, there.context(there.engine(method)))
    kept: dict[bool, set[str]] = defaultdict(set)
    for name, tensors in made.items():
        if name.startswith("latest:"):
            kept[fingerprint({"": tensors}) == fingerprint({"": start[name]})].add(name)
    assert kept == {
        True: {"latest:complex:3"},
        False: {f"latest:simple:{n}" for n in "01"} | {"latest:complex:2", "latest:complex:4"},
    }


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_last_uploads_without_report_are_not_kept(method: Any, sim: Any) -> None:
    server = method.start(sim.fleet, 0)
    for state in (server, method.round(server, sim.context(sim.engine(method)))):
        assert not any(name.startswith("latest:") for name in state)
    assert list(method.eval_targets(method.start(sim.fleet, 0))) == ["server"]


@pytest.mark.parametrize("method", ALL, ids=repr)
def test_report_redrawn_tiers_are_refused(method: Any, sim: Any) -> None:
    redrawn, reporting = replace(sim.fleet, assignment="redrawn"), replace(method, report=True)
    assert fleet_problem(method, redrawn) is None
    assert fleet_problem(reporting, sim.fleet) is None
    refusal = fleet_problem(reporting, redrawn)
    assert type(method).__name__.lower() in refusal
    assert "report = false" in refusal


def recipe(method: str, **fleet: Any) -> dict[str, Any]:
    """Tiers that differ in both width and depth."""
    return {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": 4},
        "fleet": fleet,
        "model": {"family": "preactresnet", "hidden": [2, 4], "blocks": [1, 1], "exit_after": 1},
        "tiers": [{"name": "simple", "share": 0.5, "stages": 1, "width": 0.5}, {"name": "complex", "share": 0.5}],
        "training": {"batch_size": 200},
        "method": {"name": method, "report": True},
        "evaluation": {"tests": ["global"]},
    }


@pytest.mark.parametrize("eligible", [[], ["simple"], ["complex"]])
@pytest.mark.parametrize("method", ["fedhen", "noside", "decouple"])
def test_fedhen_recipe_with_widths_and_depths_runs(method: str, eligible: list[str], tmp_path: Path) -> None:
    rows = fedloom.run(recipe(method, eligible=eligible), out=tmp_path / "run").rows()
    evaluated = {(row.candidate, row.tier) for row in rows if row.metric == "loss" and not row.device}
    served = eligible or ["simple", "complex"]
    assert evaluated == {(name, tier) for name in ("server", "report_paper", "report_all") for tier in served}


@pytest.mark.parametrize("method", ["fedhen", "noside", "decouple"])
def test_fedhen_recipe_with_impossible_report_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="report = false"):
        fedloom.run(recipe(method, assignment="redrawn"), out=tmp_path / "run")


@pytest.mark.parametrize("method", ["fedhen", "noside"])
def test_fedhen_net_without_early_exit_is_refused(method: str, world: Callable[..., Any]) -> None:
    """It would do what HeteroFL does, under another name."""
    problem = fleet_problem(METHODS[method](), world("convnet", widths=(1.0, 0.5)).fleet)
    assert problem is not None and f"{method} is about early exits, and convnet has none" in problem

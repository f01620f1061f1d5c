"""FedSup's objective, compared for every subnet it may have sampled; E-FedSup's aggregation and budgets."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedloom
from fedloom.client import Batch, Schedule, Sgd, gradient
from fedloom.fleet import Device, Request
from fedloom.methods import fleet_problem
from fedloom.methods.efedsup import EFedSup
from fedloom.methods.fedsup import FedSup
from fedloom.models import SPACES, Model, StepSeeds, build_model, compute_cost
from fedloom.models.mobilenet import mobilenet
from fedloom.recipe.errors import RecipeError
from fedloom.tensors import Parcel, Tensors, fingerprint

CHOICES = (0.25, 0.5, 1.0)
SPACE = {"width": CHOICES}
DRAWS = StepSeeds((0,))


def logits_of(net: Model, whole: Model, weights: Tensors, batch: Batch) -> Tensor:
    """The logits of the leading slice, cut by hand."""
    cut = {
        name: weights[name][(slice(None), *(slice(0, size) for size in shape))] for name, shape in net.shapes().items()
    }
    return net(cut, batch.x, DRAWS).logits


def slope(whole: Model, start: Tensors, batch: Batch, width: float, teacher: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of one subnet's loss: on the labels, or on the teacher's logits."""

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        made = logits_of(whole.with_settings(width=width), whole, weights, batch)[0]
        answers = batch.y[0] if teacher is None else teacher.softmax(-1)
        return F.cross_entropy(made, answers)[None]

    return dict(gradient(loss, start, batch))


class OneStep:
    """One device that takes one step of rate 1 in double precision, so that its upload shows its gradient."""

    def __init__(self, world: Callable[..., Any], meddling: Callable[..., Any]):
        self.sim = world(sizes=(6,), schedule=Schedule(100), optimizer=Sgd(1.0), hidden=(4, 6), normalization="group")
        self.meddling, self.whole = meddling, self.sim.fleet.global_model
        self.start = {name: weight[None] for name, weight in self.whole.initial_weights(0).items()}
        data = self.sim.dataset
        self.batch = Batch(data.preparation(data.train.x)[None], data.train.y[None], DRAWS)
        self.teacher = logits_of(self.whole, self.whole, self.start, self.batch)[0].detach()
        self.labels = {width: slope(self.whole, self.start, self.batch, width) for width in CHOICES}
        self.soft = {width: slope(self.whole, self.start, self.batch, width, self.teacher) for width in CHOICES}

    def found(self, method: FedSup, round_number: int) -> dict[str, Tensor]:
        engine = self.meddling(self.sim.engine(method, devices_per_block=1), list)
        method.round({"weights": self.whole.initial_weights(0)}, self.sim.context(engine, round_number))
        sent = engine.delivered[0].upload["weights"]
        return {name: self.start[name][0] - weight for name, weight in sent.items()}

    def explained(self, found: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> bool:
        return all(
            torch.allclose(slope, sum(part[name][0] for part in parts), rtol=0, atol=1e-12)
            for name, slope in found.items()
        )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("distillation", [True, False])
@pytest.mark.parametrize(("subnets", "sandwich"), [(1, True), (2, True), (3, True), (4, True), (1, False), (3, False)])
def test_fedsup_gradient_is_sum_over_subnets(
    subnets: int, sandwich: bool, distillation: bool, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Some combination of samples explains each step, and all occur; no gradient flows to the teacher."""
    step = OneStep(world, meddling)
    method = FedSup(SPACE, subnets, sandwich, distillation)
    others = step.soft if distillation else step.labels
    fixed = ([step.labels[1.0]] if sandwich else []) + ([others[CHOICES[0]]] if sandwich and subnets > 2 else [])
    free = subnets - len(fixed)
    seen = set()
    for number in range(1, 13 if free < 2 else 5):
        found = step.found(method, number)
        matching = set()
        for widths in product(CHOICES, repeat=free):
            drawn = [(others if sandwich or index else step.labels)[width] for index, width in enumerate(widths)]
            if step.explained(found, fixed + drawn):
                matching.add(widths)
        assert len({tuple(sorted(widths)) if sandwich or not distillation else widths[:1] for widths in matching}) == 1
        seen |= matching
    assert len(seen) == 3**free if free < 2 else len(seen) > 1


@pytest.mark.usefixtures("double")
def test_fedsup_proximal_term_is_added(world: Callable[..., Any], meddling: Callable[..., Any]) -> None:
    sim = world(sizes=(8,), schedule=Schedule(100, 2), optimizer=Sgd(0.1), normalization="group")
    once = replace(sim, schedule=Schedule(100, 1))
    sent = []
    for one, proximal in ((once, 0.0), (sim, 0.0), (sim, 0.7)):
        method = FedSup({"width": (0.5,)}, proximal=proximal)
        engine = meddling(one.engine(method, devices_per_block=1), list)
        method.round(method.start(one.fleet, 0), one.context(engine))
        sent.append(engine.delivered[0].upload["weights"])
    for name, weight in sim.fleet.global_model.initial_weights(0).items():
        after_one, without, pulled = (made[name] for made in sent)
        assert torch.allclose(pulled, without - 0.1 * 0.7 * (after_one - weight), atol=1e-12)


@pytest.mark.parametrize("subnets", [1, 2, 5])
def test_fedsup_devices_exchange_whole_supernet(
    subnets: int, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    sim, method = world(widths=(1.0, 0.5), sizes=(8, 8, 8, 8)), FedSup(subnets=subnets)
    engine = meddling(sim.engine(method), list)
    method.round(method.start(sim.fleet, 0), sim.context(engine))
    assert len(engine.delivered) == 4
    for reply in engine.delivered:
        assert {
            name: tensor.shape for name, tensor in reply.upload["weights"].items()
        } == sim.fleet.global_model.shapes()


@pytest.fixture
def supernet(world: Callable[..., Any], tiny_model: Callable[..., Model]) -> Any:
    """MobileNets that differ in width, depth and kernel; two devices of each tier."""
    sizes: list[dict[str, Any]] = [
        {"widths": (4, 6), "depths": (1, 2), "kernels": (5, 5)},
        {"widths": (4, 4), "depths": (1, 2), "kernels": (3, 5)},
        {"widths": (2, 4), "depths": (1, 1), "kernels": (3, 3)},
    ]
    models = [(name, tiny_model("mobilenet", **size)) for name, size in zip("bms", sizes, strict=True)]
    optimizer = Sgd(0.1, momentum=0.9, weight_decay=0.05)
    return world(models=models, sizes=(8, 5, 7, 8, 6, 8), optimizer=optimizer, schedule=Schedule(4, 2))


def covered(device: Device, whole: Tensors) -> dict[str, Tensor]:
    """Which entries of the supernet a subnet has: leading channels, the center of each kernel."""
    marks = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in whole.items()}
    for name, shape in device.model.shapes().items():
        starts = [
            (large - small) // 2 if axis > 1 else 0
            for axis, (small, large) in enumerate(zip(shape, whole[name].shape, strict=True))
        ]
        marks[name][tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))] = True
    return marks


def test_efedsup_entries_in_no_subnet_are_unchanged(
    supernet: Any, meddling: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """In single precision, with momentum and weight decay, over several rounds; most other entries change."""
    method = EFedSup()
    engine, server = meddling(supernet.engine(method), list), method.start(supernet.fleet, 0)
    outside, moved, inside = 0, 0, 0
    for number in (1, 2, 3, 4):
        old, server = server["weights"], method.round(server, supernet.context(engine, number, 0.5))
        marks = [covered(reply.device, old) for reply in engine.delivered]
        engine.delivered.clear()
        for name, tensor in old.items():
            held = torch.stack([mark[name] for mark in marks]).any(0)
            assert bits_equal(server["weights"][name][~held], tensor[~held])
            outside += int((~held).sum())
            inside += int(held.sum())
            moved += int((server["weights"][name] != tensor).sum())
    assert outside > 100
    assert moved > 0.7 * inside


def test_efedsup_holders_average_only_what_they_trained(supernet: Any, meddling: Callable[..., Any]) -> None:
    """Compared with a loop over devices; entries that no device trained keep their value."""
    method = EFedSup(aggregation="holders")
    engine, start = meddling(supernet.engine(method), list), method.start(supernet.fleet, 0)
    made = method.round(start, supernet.context(engine))["weights"]
    for name, old in start["weights"].items():
        total, examples = (torch.zeros(old.shape, dtype=torch.float64) for _ in range(2))
        for reply in engine.delivered:
            if name in reply.upload["weights"]:
                held = covered(reply.device, start["weights"])[name]
                total[held] += reply.upload["weights"][name].flatten().double() * reply.examples
                examples[held] += reply.examples
        wanted = torch.where(examples > 0, total / examples.clamp_min(1), old.double())
        assert torch.allclose(made[name].double(), wanted, rtol=0, atol=1e-7)


def test_fedsup_without_sandwich_untouched_weights_keep_decaying(
    world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Their gradient is zero, and the optimizer goes on: one step of rate 0.1 and decay 0.5 takes a twentieth off."""
    sim = world(sizes=(6,), schedule=Schedule(100), optimizer=Sgd(0.1, weight_decay=0.5), hidden=(4, 6))
    method = FedSup({"width": (0.5,)}, subnets=1, sandwich=False)
    engine, start = meddling(sim.engine(method), list), method.start(sim.fleet, 0)["weights"]
    method.round({"weights": start}, sim.context(engine))
    (reply,) = engine.delivered
    inside = covered(replace(reply.device, model=sim.fleet.global_model.with_settings(width=0.5)), start)
    for name, weight in reply.upload["weights"].items():
        outside = ~inside[name]
        assert torch.allclose(weight[outside], 0.95 * start[name][outside], atol=1e-7)
        assert not torch.equal(weight[inside[name]], 0.95 * start[name][inside[name]])


@pytest.mark.parametrize("stream", ["device", "shared"])
def test_fedsup_without_sandwich_idle_weights_can_stay(
    stream: str, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """Outside of the drawn nets nothing moves; inside everything is as with decay, since the nets never change."""
    sim = world(
        sizes=(9, 9), schedule=Schedule(4, epochs=2), optimizer=Sgd(0.1, momentum=0.9, weight_decay=0.5), hidden=(4, 6)
    )
    found = []
    for idle in ("keep", "decay"):
        method = FedSup({"width": (0.5,)}, subnets=1, sandwich=False, subnet_stream=stream, idle_weights=idle)
        engine, start = meddling(sim.engine(method), list), method.start(sim.fleet, 0)["weights"]
        method.round({"weights": start}, sim.context(engine))
        found.append(sorted(engine.delivered, key=lambda reply: reply.device.name))
    for kept, decayed in zip(*found, strict=True):
        inside = covered(replace(kept.device, model=sim.fleet.global_model.with_settings(width=0.5)), start)
        for name, weight in kept.upload["weights"].items():
            held, other = inside[name], decayed.upload["weights"][name]
            assert torch.equal(weight[~held], start[name][~held])
            assert torch.equal(weight[held], other[held]) and not torch.equal(weight[held], start[name][held])


def test_efedsup_missing_weights_are_filled_with_broadcast(supernet: Any, meddling: Callable[..., Any]) -> None:
    """Compared with a loop over devices: the old model with the device's part in it, weighted by examples."""
    method = EFedSup()
    engine, start = meddling(supernet.engine(method), list), method.start(supernet.fleet, 0)
    made = method.round(start, supernet.context(engine))["weights"]
    for name, old in start["weights"].items():
        total, examples = torch.zeros(old.shape, dtype=torch.float64), 0
        for reply in sorted(engine.delivered, key=lambda reply: reply.device.name):
            padded = old.clone()
            if name in reply.upload["weights"]:
                padded[covered(reply.device, start["weights"])[name]] = reply.upload["weights"][name].flatten()
            total += padded.double() * reply.examples
            examples += reply.examples
        assert torch.allclose(made[name], (total / examples).float(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("budgets", [{}, {"s": 0.4}, {"s": 0.35, "m": 0.5, "b": 0.8}])
def test_efedsup_subnets_stay_within_budget(
    budgets: dict[str, float], supernet: Any, scripted: Callable[..., Any]
) -> None:
    method, seen = EFedSup(budgets=budgets), set()
    engine = scripted(lambda device, inbox: None)
    own = {tier.name: compute_cost(tier.model).macs for tier in supernet.fleet.tiers}
    whole = compute_cost(supernet.fleet.global_model).macs
    server = method.start(supernet.fleet, 0)
    for number in range(1, 31):
        method.round(server, supernet.context(engine, number))
    for _, inboxes in engine.asked:
        for device, inbox in inboxes.items():
            limit = budgets[device.tier] * whole if device.tier in budgets else own[device.tier]
            assert compute_cost(device.model).macs <= limit
            assert {name: tensor.shape for name, tensor in inbox["weights"].items()} == device.model.shapes()
            seen.add((device.name, device.model))
    for name in "0123":  # varies where there is a choice
        assert len({net for device, net in seen if device == name}) > 1


def test_efedsup_subnet_depends_on_seed_round_and_device_only(supernet: Any, scripted: Callable[..., Any]) -> None:
    method = EFedSup()

    def drawn(number: int, participation: float, seed: int = 0) -> dict[str, Model]:
        engine = scripted(lambda device, inbox: None)
        sim = replace(supernet, fleet=replace(supernet.fleet, seed=seed))
        method.round(method.start(sim.fleet, 0), sim.context(engine, number, participation))
        return {device.name: device.model for device in engine.asked[0][1]}

    assert drawn(1, 0.5).items() <= drawn(1, 1.0).items()
    assert len({tuple(drawn(1, 1.0, seed).values()) for seed in (0, 1, 2)}) > 1
    assert len({tuple(drawn(number, 1.0).values()) for number in (1, 2, 3)}) > 1


@pytest.mark.parametrize("method", [FedSup(), EFedSup()])
def test_fedsup_spaces_that_do_not_fit_are_refused(method: Any, supernet: Any) -> None:
    assert fleet_problem(method, supernet.fleet) is None
    name = type(method).__name__.lower()
    for space, message in {
        "nowhere": "nowhere",
        "code": "does not lie in the larger",
        "width": {"width": (0.5, 2.0)},
        "unknown": {"breadth": (1, 2)},
        "empty": {"width": ()},
        "an empty place": {"depths": ((), (1,))},
        "unordered": {"width": ("wide", 0.5)},
    }.items():
        refusal = fleet_problem(replace(method, space=space if isinstance(message, str) else message), supernet.fleet)
        assert refusal is not None, space
        assert name in refusal
        assert not isinstance(message, str) or message in refusal


@pytest.mark.parametrize("space", sorted(SPACES))
def test_fedsup_published_spaces_fit_published_model(space: str, world: Callable[..., Any]) -> None:
    net = build_model("mobilenet", mobilenet, {}, (3, 32, 32), 10)
    sim = world(models=[("whole", net)], input_shape=(3, 32, 32), classes=10)
    assert fleet_problem(FedSup(space), sim.fleet) is None
    assert fleet_problem(EFedSup(space), sim.fleet) is None


@pytest.mark.parametrize("stream", ["device", "shared"])
def test_fedsup_subnets_do_not_depend_on_block(stream: Any, supernet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They depend on device and step, or on the step alone with a shared stream."""
    by_block, real = [], FedSup._draw_subnets
    for block in (1, 2, 6):
        noted: list[tuple[str, ...]] = []
        sim = replace(supernet, schedule=Schedule(4, 2, "wrap"))
        method = FedSup(subnet_stream=stream)
        plan = sim.engine(method).plan
        names = {plan(Request(method.train, {}, 1), device).seed: device.name for device in sim.fleet.devices(1)}

        def note(self: FedSup, client: Any, batch: Batch, noted: Any = noted, names: Any = names) -> Any:
            nets = real(self, client, batch)
            common = client.plan[0].step_seeds.common
            for index, seed in enumerate(batch.step_seeds.per_device):  # type: ignore[union-attr]
                step = batch.step_seeds.common - common  # type: ignore[union-attr]
                chosen = nets[1][0 if len(nets[1]) == 1 else index]
                noted.append((names[seed - step], step, chosen))
            return nets

        with monkeypatch.context() as patch:
            patch.setattr(FedSup, "_draw_subnets", note)
            method.round(method.start(sim.fleet, 0), sim.context(sim.engine(method, devices_per_block=block)))
        by_block.append({(device, step): net for device, step, net in noted})
    shared = [key for key in by_block[0] if all(key in one for one in by_block)]
    assert len(shared) >= 24
    assert all(len({one[key] for one in by_block}) == 1 for key in shared)
    per_step = [{net for (_, step), net in by_block[0].items() if step == wanted} for wanted in range(4)]
    assert all(len(nets) == 1 for nets in per_step) if stream == "shared" else any(len(nets) > 1 for nets in per_step)
    assert len(set().union(*per_step)) > 1


def test_fedsup_space_as_table_gives_same_run(world: Callable[..., Any]) -> None:
    """A space given as a table equal to the tiers' space gives the same bits."""
    sim = world(widths=(1.0, 0.5), sizes=(8, 8, 8, 8))
    made: list[Parcel] = [sim.play(method, sim.engine(method)) for method in (FedSup(), FedSup({"width": (1.0, 0.5)}))]
    assert fingerprint(made[0]) == fingerprint(made[1])


def recipe(**method: Any) -> dict[str, Any]:
    return {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": 4},
        "model": {"family": "convnet", "hidden": [2, 4]},
        "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
        "training": {"batch_size": 200},
        "method": method,
        "evaluation": {"tests": ["global"]},
    }


@pytest.mark.parametrize(
    "method",
    [
        *(
            {"name": "fedsup", "subnets": m, "sandwich": s, "distillation": m != 2}
            for m in (1, 2, 5)
            for s in (True, False)
        ),
        {"name": "fedsup", "space": {"hidden": [[1, 2], [2, 3, 4]]}, "subnet_stream": "shared"},
        {"name": "fedsup", "space": {}},
        {"name": "efedsup", "space": {"hidden": [[1, 2], [4]], "width": [0.5, 1.0]}, "budgets": {"small": 0.6}},
        {"name": "fjord", "widths": [0.3, 0.7], "distillation": False},
    ],
    ids=str,
)
def test_fedsup_recipe_runs(method: dict[str, Any], tmp_path: Path) -> None:
    rows = fedloom.run(recipe(**method), out=tmp_path / "run").rows()
    evaluated = {row.tier: row.value for row in rows if row.metric == "loss" and not row.device}
    assert evaluated.keys() == {"large", "small"}
    assert all(0 < loss < 10 for loss in evaluated.values())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"name": "fedsup", "space": "codes"}, "knows the spaces"),
        ({"name": "fedsup", "space": "paper"}, "cannot cut"),
        ({"name": "fedsup", "space": {"hidden": [[2, 4], [4, 8]]}}, "does not lie in the larger"),
        ({"name": "fedsup", "space": {"width": [[0.5], [1.0]]}}, "cannot cut"),
        ({"name": "efedsup", "space": {"width": []}}, "cannot cut"),
        ({"name": "efedsup", "space": {"width": ["half", 1.0]}}, "cannot cut"),
        ({"name": "fedsup", "subnets": 0}, "RECIPE_RANGE"),
        ({"name": "efedsup", "budgets": {"small": 1.5}}, "RECIPE_RANGE"),
        ({"name": "efedsup", "budgets": {"small": 0}}, "RECIPE_RANGE"),
        ({"name": "fjord", "widths": [0.5, 1.5]}, "RECIPE_RANGE"),
        ({"name": "fedsup", "subnet_stream": "mine"}, "device, shared"),
    ],
    ids=str,
)
def test_fedsup_impossible_recipe_is_refused(method: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        fedloom.run(recipe(**method), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()

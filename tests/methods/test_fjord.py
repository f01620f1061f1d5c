"""FjORD: which widths a device samples, what it trains on each batch, and the aggregation."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.client import Batch, Schedule, Sgd, gradient, subnet_logits
from fedloom.methods.fjord import FjORD
from fedloom.models import Model, StepSeeds
from fedloom.tensors import Tensors

WIDTHS = (1.0, 0.5, 0.25)


def slope(own: Model, width: float, start: Tensors, batch: Batch, teacher: Tensor | None = None) -> dict[str, Tensor]:
    """The gradient of one leading slice's loss: on the labels, or on the teacher's logits."""
    net = own.with_settings(width=width)

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        cut = {
            name: weights[name][(slice(None), *(slice(0, size) for size in shape))]
            for name, shape in net.shapes().items()
        }
        made = net(cut, batch.x, batch.step_seeds).logits[0]
        return F.cross_entropy(made, batch.y[0] if teacher is None else teacher.softmax(-1))[None]

    return dict(gradient(loss, start, batch))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("distillation", [True, False])
@pytest.mark.parametrize("widths", [(), WIDTHS])
def test_fjord_step_trains_sampled_width_and_teacher(
    widths: tuple[float, ...], distillation: bool, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """One step of rate 1, so that the upload shows the gradient; no device trains more than its own model."""
    sim = world(widths=WIDTHS, sizes=(6, 6, 6), normalization="group", schedule=Schedule(100), optimizer=Sgd(1.0))
    method, drawn = FjORD(widths, distillation), Counter[tuple[str, float]]()
    engine, first = meddling(sim.engine(method, devices_per_block=1), list), method.start(sim.fleet, 0)
    data, known = sim.dataset, {}
    for number in range(1, 13):
        method.round(first, sim.context(engine, number))
    for reply in engine.delivered:
        own = reply.device.model
        able = [width for width in WIDTHS if width <= dict(own.settings)["width"]]
        start = reply.device.footprint.read(first["weights"])
        found = {name: start[name] - weight for name, weight in reply.upload["weights"].items()}
        if reply.device.name not in known:
            rows = torch.as_tensor(sim.partition.train[int(reply.device.name)])
            batch = Batch(data.preparation(data.train.x[rows])[None], data.train.y[rows][None], StepSeeds((0,)))
            block = {name: weight[None] for name, weight in start.items()}
            teacher = own(block, batch.x, batch.step_seeds).logits[0].detach() if distillation else None
            extra = [slope(own, able[0], block, batch)] if distillation else []
            known[reply.device.name] = {width: [*extra, slope(own, width, block, batch, teacher)] for width in able}
        matching = [
            width
            for width, parts in known[reply.device.name].items()
            if all(torch.allclose(found[name], sum(p[name][0] for p in parts), atol=1e-12) for name in found)
        ]
        assert len(matching) == 1
        drawn[reply.device.tier, matching[0]] += 1
    assert set(drawn) == {(tier, width) for n, tier in enumerate("abc") for width in WIDTHS[n:]}


@pytest.mark.parametrize("assignment", ["fixed", "redrawn"])
def test_fjord_aggregate_is_example_weighted_mean_over_holders(
    assignment: Any, world: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    sim = world(widths=WIDTHS, sizes=(4, 9, 6, 5, 12, 7))
    sim = replace(sim, fleet=replace(sim.fleet, assignment=assignment))
    method = FjORD()
    engine, start = meddling(sim.engine(method), list), method.start(sim.fleet, 0)
    made = method.round(start, sim.context(engine))["weights"]
    assert len({reply.examples for reply in engine.delivered}) > 3
    for name, old in start["weights"].items():
        for index in torch.ones(old.shape).nonzero().tolist():
            at, total, mass = tuple(index), 0.0, 0
            for reply in sorted(engine.delivered, key=lambda reply: reply.device.name):
                sent = reply.upload["weights"][name]
                if all(here < size for here, size in zip(at, sent.shape, strict=True)):
                    total += reply.examples * float(sent[at])
                    mass += reply.examples
            assert float(made[name][at]) == pytest.approx(total / mass if mass else float(old[at]), abs=1e-7)


def test_fjord_widths_beyond_device_are_not_sampled(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """So a list of widths that are too wide for all changes nothing."""
    sim = world(widths=(0.5, 0.25), sizes=(8, 8))
    methods = FjORD((0.25, 0.5)), FjORD((0.25, 0.5, 0.75, 1.0))
    made = [sim.play(method, sim.engine(method)) for method in methods]
    assert parcels_equal(*made)


def test_fjord_subnet_stream_decides_shared_sampling(
    world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal devices in one round: subnets by step, in device order."""
    sim = world(widths=WIDTHS, shares=(1.0, 0.0, 0.0), sizes=(8, 8, 8), schedule=Schedule(4, 4))
    inside = import_module("fedloom.methods.fjord")
    for stream in ("device", "shared"):
        noted: list[Model] = []

        def note(drawn: Any, *rest: Any, noted: list[Model] = noted) -> list[Tensor]:
            noted.extend(*drawn)
            return subnet_logits(drawn, *rest)

        monkeypatch.setattr(inside, "subnet_logits", note)
        method = FjORD(subnet_stream=stream)  # type: ignore[arg-type]
        method.round(method.start(sim.fleet, 0), sim.context(sim.engine(method, devices_per_block=1)))
        by_device = {tuple(noted[start : start + 8]) for start in (0, 8, 16)}
        assert len(noted) == 24
        assert len(by_device) == (1 if stream == "shared" else 3)
        assert len(set(noted)) == 3

"""The contract of every method, with every model family."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from fedloom.client import Schedule, Task
from fedloom.engines import DryRun
from fedloom.fleet import Engine, Reply, Request, ServerModel
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.tensors import Parcel, fingerprint

SIZES = (8, 5, 9, 8, 12, 7)  # unequal; some can share a block
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2], [1, 3]]


def device_states(engine: Any) -> dict[str, Parcel]:
    return dict(sorted(engine.client_states.committed.items()))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("last", ["keep", pytest.param("wrap", marks=pytest.mark.slow)])
def test_block_of_devices_learns_as_alone(
    method: Method,
    family: str,
    last: Any,
    world_for: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    sim = world_for(method, family, sizes=SIZES, labels=LABELS, schedule=Schedule(4, 2, last))
    alone, together = sim.engine(method, devices_per_block=1), sim.engine(method, devices_per_block=16)
    servers = [sim.play(method, engine) for engine in (alone, together)]
    assert sim.refusals == []
    assert difference(*servers) <= 1e-8
    assert device_states(alone).keys() == device_states(together).keys()
    for name, parcel in device_states(alone).items():
        assert difference(parcel, device_states(together)[name]) <= 1e-8
    assert servers[0] or device_states(alone)  # something was trained


@pytest.mark.usefixtures("double")
def test_block_of_devices_is_evaluated_as_alone(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, family, sizes=SIZES, labels=LABELS)
    found = []
    for block in (1, 16):
        engine = sim.engine(method, devices_per_block=block)
        candidates = method.eval_targets(sim.play(method, engine, rounds=1))
        found.append(
            sim.evaluator().rows(
                candidates,
                sim.fleet,
                lambda task, inboxes, engine=engine: engine.ask(Request(task, inboxes, 1)),
                1,
                True,
            )
        )
    assert [replace(row, value=0.0) for row in found[0]] == [replace(row, value=0.0) for row in found[1]]
    assert [row.value for row in found[0]] == pytest.approx([row.value for row in found[1]], abs=1e-8)
    assert len(found[0]) > 0


def test_run_repeated_gives_same_bits(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, family, sizes=SIZES, labels=LABELS)
    prints = set()
    for _ in range(2):
        engine = sim.engine(method)
        server = sim.play(method, engine, participation=0.6)
        prints.add((fingerprint(server), *(fingerprint(parcel) for parcel in device_states(engine).values())))
    assert len(prints) == 1


def test_round_reply_order_does_not_change_bits(
    method: Method, world_for: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    shuffle = random.Random(4)

    def any_order(replies: list[Reply]) -> list[Reply]:
        return shuffle.sample(replies, len(replies))

    shuffled = meddling(sim.engine(method), any_order)
    assert fingerprint(sim.play(method, shuffled)) == fingerprint(sim.play(method, sim.engine(method)))


@pytest.mark.parametrize("kept", [1, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (0, 2))])
def test_round_missing_replies_continues(
    kept: int, method: Method, world_for: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    first = method.start(sim.fleet, 0)
    server = sim.play(method, meddling(sim.engine(method), lambda replies: replies[:kept]))
    assert server.keys() == first.keys()
    for bundle, tensors in first.items():
        assert server[bundle].keys() == tensors.keys()
        for name, tensor in tensors.items():  # tensors that start empty may grow
            grows = len(tensor.shape) > 0 and len(tensor) == 0
            assert server[bundle][name].shape[grows:] == tensor.shape[grows:]
        assert all(bool(tensor.isfinite().all()) for tensor in server[bundle].values())
    if kept == 0:
        assert fingerprint(server) == fingerprint(first)


def test_round_lost_reply_equals_unasked_device(
    method: Method, world_for: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """In blocks of one device, so that the composition of blocks does not matter."""
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    lost = meddling(
        sim.engine(method, devices_per_block=1), lambda replies: [one for one in replies if one.device.name != "2"]
    )
    server = method.round(method.start(sim.fleet, 0), sim.context(lost))
    context = sim.context(sim.engine(method, devices_per_block=1))
    fewer = replace(context, cohort=[one for one in context.cohort if one.name != "2"])
    if any(one.device.name == "pool" for one in lost.delivered):
        fewer = context  # it asks one device with all data, for any cohort
    assert fingerprint(server) == fingerprint(method.round(method.start(sim.fleet, 0), fewer))


def test_round_changes_only_cohort(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    engine = sim.engine(method)
    server = method.start(sim.fleet, 0)
    for number in (1, 2, 3):
        before = {name: fingerprint(parcel) for name, parcel in device_states(engine).items()}
        context = sim.context(engine, number, participation=0.3)
        server = method.round(server, context)
        engine.commit(number)
        touched = {device.name for device in context.cohort}
        after = {name: fingerprint(parcel) for name, parcel in device_states(engine).items()}
        assert after.keys() - before.keys() <= touched
        assert {name for name in before if before[name] != after[name]} <= touched


def test_evaluation_changes_no_state(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, family, sizes=SIZES, labels=LABELS)
    engine = sim.engine(method)
    server = sim.play(method, engine, rounds=1)
    before = fingerprint(server), {name: fingerprint(parcel) for name, parcel in device_states(engine).items()}
    sim.evaluator().rows(
        method.eval_targets(server), sim.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1, True
    )
    engine.commit(1)
    assert (fingerprint(server), {name: fingerprint(p) for name, p in device_states(engine).items()}) == before


def reload(parcel: Parcel) -> dict[str, dict[str, torch.Tensor]]:
    """A file does not keep the order of names, so they come back reversed here."""
    return {bundle: dict(sorted(load(save(dict(tensors))).items(), reverse=True)) for bundle, tensors in parcel.items()}


def test_parcels_survive_serialization(
    method: Method, world_for: Callable[..., Any], meddling: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """Server state, replies and device states are contiguous named tensors that share no storage."""
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    engine = sim.engine(method)
    recorder = meddling(engine, lambda replies: replies)
    server = sim.play(method, recorder, rounds=1)
    parcels = [server, *(reply.upload for reply in recorder.delivered), *device_states(engine).values()]
    assert recorder.delivered
    for parcel in parcels:
        assert parcels_equal(reload(parcel), parcel)


def test_round_continues_from_serialized_server(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    straight, interrupted = sim.engine(method), sim.engine(method)
    whole = sim.play(method, straight, rounds=2)
    half = sim.play(method, interrupted, rounds=1)
    interrupted.client_states.committed = {name: reload(p) for name, p in interrupted.client_states.committed.items()}
    resumed = method.round(reload(half), sim.context(interrupted, 2))
    interrupted.commit(2)
    assert fingerprint(resumed) == fingerprint(whole)
    assert [fingerprint(p) for p in device_states(interrupted).values()] == [
        fingerprint(p) for p in device_states(straight).values()
    ]


Layout = dict[tuple[str, str, str], tuple[tuple[int, ...], torch.dtype]]


@dataclass
class LayoutRecorder:
    """Records the layout of every reply."""

    engine: Engine
    layouts: list[Layout] = field(default_factory=list)

    def ask(self, request: Request) -> Iterator[Reply]:
        found: Layout = {}
        replies = list(self.engine.ask(request))
        for reply in replies:
            found[reply.device.name, "", ""] = ((), torch.bool)  # to record devices that upload nothing
            for bundle, tensors in reply.upload.items():
                for name, tensor in tensors.items():
                    found[reply.device.name, bundle, name] = (tuple(tensor.shape), tensor.dtype)
        self.layouts.append(found)
        yield from replies

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)


def test_dry_run_sends_what_devices_send(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, family, sizes=SIZES, labels=LABELS)
    alone = sim.engine(method)
    real, dry_run = LayoutRecorder(alone), LayoutRecorder(DryRun(alone.client_data.count))
    for engine in (real, dry_run):
        method.round(method.start(sim.fleet, 0), sim.context(engine))
    assert real.layouts == dry_run.layouts
    assert real.layouts[0]


def test_dry_run_counts_traffic_of_round(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method, None, sizes=SIZES, labels=LABELS)
    engine = sim.engine(method)
    real, dry_run = sim.context(engine), DryRun(engine.client_data.count)
    method.round(method.start(sim.fleet, 0), real)
    method.round(method.start(sim.fleet, 0), sim.context(dry_run))
    assert sum(dry_run.bytes_down.values()) == real.traffic.bytes_down
    assert sum(dry_run.bytes_up.values()) == real.traffic.bytes_up


def test_evaluation_tasks_send_declared_bundles(method: Method, family: str, world_for: Callable[..., Any]) -> None:
    """In both precisions: a refused reply would mean a model that is not evaluated."""
    for dtype in (torch.float32, torch.float64):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            sim = world_for(method, family, sizes=SIZES, labels=LABELS)
            engine = sim.engine(method)
            server = sim.play(method, engine, rounds=1)

            def ask(task: Task, boxes: Any, engine: Any = engine) -> Any:
                return engine.ask(Request(task, boxes, 1))

            rows = sim.evaluator().rows(method.eval_targets(server), sim.fleet, ask, 1, True)
        finally:
            torch.set_default_dtype(before)
        assert sim.refusals == []
        assert rows


def test_start_with_warm_start_uses_its_weights(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method)
    earlier = {name: tensor + 1 for name, tensor in sim.fleet.global_model.initial_weights(5).items()}
    warm = method.start(sim.fleet, 0, earlier)
    for candidate in method.eval_targets(warm).values():
        for tier in sim.fleet.tiers if isinstance(candidate, ServerModel) else ():
            expected = {"weights": tier.footprint.read(earlier)}
            assert fingerprint({"weights": candidate.weights(tier)}) == fingerprint(expected)


def test_finish_is_one_more_round_or_none(
    method: Method, world_for: Callable[..., Any], meddling: Callable[..., Any]
) -> None:
    """A method that has one asks devices, and returns a state of the usual layout."""
    sim = world_for(method)
    engine = meddling(sim.engine(method), list)
    server = sim.play(method, engine, rounds=1)
    engine.delivered.clear()
    ended = method.finish(server, sim.context(engine, 2))
    assert (ended is None) == (engine.delivered == [])
    assert ended is None or {name: tensors.keys() for name, tensors in ended.items()} == {
        name: tensors.keys() for name, tensors in server.items()
    }


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_info_is_complete(name: str) -> None:
    kind = METHODS[name]
    assert kind.info.produces in ("global", "personalized")
    for text in (kind.info.paper, kind.info.uploads, kind.info.client_state):
        assert text.strip() == text != ""
    assert hash(kind()) == hash(kind())  # all hyperparameters have defaults and are immutable


def test_method_info_produces_matches_eval_targets(method: Method, world_for: Callable[..., Any]) -> None:
    sim = world_for(method)
    engine = sim.engine(method)
    candidates = method.eval_targets(sim.play(method, engine, rounds=1))
    held_by_server = [isinstance(candidate, ServerModel) for candidate in candidates.values()]
    assert held_by_server
    assert all(held_by_server) if method.info.produces == "global" else not all(held_by_server)


NESTED = ["heterofl", "fedrolex", "fjord", "fedhen", "noside", "decouple", "fedsup", "efedsup"]
CHAOTIC = {"mobilenet": 1e-8, "splitnet": 1e-8}  # families in which rounding differences grow from step to step


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [NESTED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NESTED[1:])])
def test_redrawn_tiers_are_trained_or_refused(
    name: str, family: str, world: Callable[..., Any], meddling: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """A block learns as each device alone, and only the cohort is asked, each device in its tier of the round."""
    method = METHODS[name]()
    pooled = {"exit_pool": "global"} if family == "preactresnet" else {}  # windows cannot roll after a flattened map
    sim = world(family, widths=(1.0, 0.5), sizes=SIZES, labels=LABELS, **pooled)
    sim = replace(sim, fleet=replace(sim.fleet, assignment="redrawn"))
    assert fleet_problem(method, sim.fleet) is None
    made, tiers = [], set()
    for block in (1, 16):
        alone = sim.engine(method, devices_per_block=block)
        engine, server = meddling(alone, list), method.start(sim.fleet, 0)
        for number in (1, 2, 3):
            context = sim.context(engine, number, participation=0.6)
            server = method.round(server, context)
            engine.commit(number)
            asked = {(reply.device.name, reply.device.tier) for reply in engine.delivered}
            assert asked == {(device.name, device.tier) for device in context.cohort}
            assert len(engine.delivered) == context.traffic.asked
            tiers |= asked
            engine.delivered.clear()
        made.append(server)
        assert not any(device_states(alone).values())
    assert sim.refusals == []
    assert difference(*made) <= CHAOTIC.get(family, 1e-10)
    assert difference(made[0], method.start(sim.fleet, 0)) > 1e-3
    assert len({device for device, tier in tiers if (device, "a") in tiers and (device, "b") in tiers}) > 0

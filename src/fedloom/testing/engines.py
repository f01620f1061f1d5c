"""The contract of an engine: it carries tasks and replies like the in-process engine."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..client import Client, ClientResult, like, on_device, shaped
from ..fleet import Device, Engine, Exchange, Reply, Request, RoundContext
from ..footprints import ClientUpdate
from ..methods import METHODS, Method, MethodInfo
from ..tensors import Parcel, Tensors, per_device
from .report import ENGINE_CHECKS, Broken, CheckReport, listed_in, require_same, run_checks
from .world import TinyWorld, name_of

MakeEngine = Callable[[TinyWorld, Method], Engine]
"""Build an engine for the devices of a world."""


def check_engine(make_engine: MakeEngine) -> CheckReport:
    """Check that an engine carries tasks to devices and replies back like the in-process engine, to the bit.

    Parameters
    ----------
    make_engine
        A function `(world, method) -> Engine`. `world.engine(method)` is the in-process engine to compare with; it has
        the data of all devices, and runs them one at a time, because the size of a block changes the last bits.

    Returns
    -------
    CheckReport
        The checks that passed.

    Raises
    ------
    CheckFailed
        By the first check that does not pass.

    Examples
    --------
    >>> from fedloom.testing import check_engine
    >>> check_engine(lambda world, method: world.engine(method)).notes
    {}
    """
    return run_checks(name_of(make_engine), ENGINE_CHECKS, make_engine)


@dataclass(frozen=True)
class _CountingMethod(Method):
    """Devices count how often they were asked, and send back the weights times a factor."""

    info = MethodInfo(uploads="the received weights, a count", client_state="a count")

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"asked": {"times": torch.zeros(1, dtype=torch.int64)}}

    def inboxes(self, devices: Iterable[Device], factors: Mapping[str, float] | None = None) -> dict[Device, Parcel]:
        return {
            device: {
                "weights": device.model.initial_weights(0),
                "factor": {"by": torch.tensor([(factors or {}).get(device.name, 1.0)])},
            }
            for device in devices
        }

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, self.inboxes(context.cohort))
        updates = [ClientUpdate(reply.device.footprint, reply.upload["weights"], 1.0) for reply in replies]
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights"), "asked": shaped(times=((1,), torch.int64))})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        factor = inbox["factor"]["by"].flatten()
        weights = {name: weight * per_device(factor, weight) for name, weight in inbox["weights"].items()}
        asked = {"asked": {"times": client.state["asked"]["times"] + 1}}
        return ClientResult(upload={"weights": weights, **asked}, state=asked)


@contextmanager
def _engine_world(make_engine: MakeEngine, method: Method) -> Iterator[tuple[TinyWorld, Engine]]:
    world = replace(TinyWorld.make(widths=(1.0, 0.5), sizes=(8, 5, 9, 8)), devices_per_block=1)
    engine = make_engine(world, method)
    try:
        yield world, engine
    finally:
        engine.close()


def _times_asked(replies: Iterable[Reply]) -> dict[str, int]:
    """What `_CountingMethod`'s devices say."""
    return {reply.device.name: int(reply.upload["asked"]["times"]) for reply in replies}


def _require_counts(found: Mapping[str, int], expected: Mapping[str, int], why: str, hint: str) -> None:
    if found != expected:
        raise Broken(
            f"{why}: devices were asked {dict(sorted(expected.items()))} times", f"{dict(sorted(found.items()))}", hint
        )


@listed_in(ENGINE_CHECKS)
def check_replies(make_engine: MakeEngine) -> None:
    """One request gives the replies of the in-process engine: the same devices, example counts and bits."""
    method = METHODS["heterofl"]()
    with _engine_world(make_engine, method) as (world, engine):
        server = method.start(world.fleet, 0)
        inboxes = {d: {"weights": d.footprint.read(server["weights"])} for d in world.fleet.devices(1)}
        request = Request(method.find("train"), inboxes, 1)
        found, expected = (
            {reply.device.name: reply for reply in one.ask(request)} for one in (engine, world.engine(method))
        )
        if found.keys() != expected.keys():
            raise Broken(
                f"replies of devices {sorted(expected)}", f"{sorted(found)}", "ask every device of the request"
            )
        for name, reply in found.items():
            if reply.examples != expected[name].examples:
                counts = f"device {name}: {reply.examples} instead of {expected[name].examples}"
                raise Broken("the number of the device's examples", counts, "see InProcess.client_data.count")
            require_same(
                reply.upload,
                expected[name].upload,
                "the bits of the in-process engine",
                "use the plan of InProcess (seed, round, stream, repeat, device) and one torch thread",
                what=f"upload of device {name}",
            )


@listed_in(ENGINE_CHECKS)
def check_asked_devices(make_engine: MakeEngine) -> None:
    """Replies come from the devices that were asked, once each, without their states."""
    method = _CountingMethod()
    with _engine_world(make_engine, method) as (world, engine):
        devices = world.fleet.devices(1)[1:3]
        replies = list(engine.ask(Request(method.train, method.inboxes(devices), 1)))
        names = sorted(reply.device.name for reply in replies)
        asked = sorted(device.name for device in devices)
        if names != asked:
            raise Broken(f"one reply each of {asked}", f"{names}", "answer for the keys of request.inboxes only")
        if any(reply.device not in devices for reply in replies):
            raise Broken(
                "Reply.device is the device that was asked", "another object", "keep the request's own objects"
            )
        if any(reply.state is not None or reply.residual is not None for reply in replies):
            raise Broken("no device state in a reply", "a reply holds one", "replace(reply, state=None, residual=None)")
        if list(engine.ask(Request(method.train, {}, 1))):
            raise Broken("no reply to a request to no device", "there is one", "")


@listed_in(ENGINE_CHECKS)
def check_states(make_engine: MakeEngine) -> None:
    """Devices find the state that they left, within a round and, once it is committed, in the next.

    An engine with `client_states` also forgets what a round left if it is rolled back instead.
    """
    method, hint = _CountingMethod(), "stage ClientResult.state of admitted replies; make it permanent in commit"
    with _engine_world(make_engine, method) as (world, engine):
        devices = world.fleet.devices(1)

        def ask(number: int, repeat: int = 0) -> dict[str, int]:
            return _times_asked(engine.ask(Request(method.train, method.inboxes(devices), number, repeat)))

        every = [device.name for device in devices]
        _require_counts(ask(1), dict.fromkeys(every, 1), "in round 1", hint)
        _require_counts(ask(1, 1), dict.fromkeys(every, 2), "again in round 1", hint)
        states = getattr(engine, "client_states", None)
        if states is not None:
            if states.versions:
                raise Broken("no committed state before commit", f"{sorted(states.versions)}", hint)
            states.rollback()
            _require_counts(ask(1), dict.fromkeys(every, 1), "after a rollback", hint)
        engine.commit(1)
        if states is not None and sorted(states.versions) != every:
            raise Broken(f"committed states of {every} after commit", f"of {sorted(states.versions)}", hint)
        counted = ask(2)
        engine.commit(2)
        expected = dict.fromkeys(every, 3 if states is None else 2)
        _require_counts(counted, expected, "in round 2, after commit", hint)


@listed_in(ENGINE_CHECKS)
def check_transports(make_engine: MakeEngine) -> None:
    """The transports of a request apply: what they hold back is not asked, what they drop is lost with its state."""
    method = _CountingMethod()
    hint = "open fedloom.fleet.Channel(request); deliver through it, and pass replies through Gate.receive with it"
    with _engine_world(make_engine, method) as (world, engine):
        devices = world.fleet.devices(1)
        names = [device.name for device in devices]
        lossy = _LossyTransport(names[0], names[1], names[2])
        request = Request(method.train, method.inboxes(devices), 1, transports=(lossy,))
        _require_counts(_times_asked(engine.ask(request)), {names[3]: 1}, "through a lossy transport", hint)
        engine.commit(1)
        expected = {**dict.fromkeys(names, 1), names[3]: 2}
        again = _times_asked(engine.ask(Request(method.train, method.inboxes(devices), 2)))
        _require_counts(again, expected, "after lost replies, whose states are discarded", hint)


@dataclass(frozen=True)
class _LossyTransport:
    """One device is out of reach, the reply of one is lost, and that of one is dropped when all have come."""

    unreachable: str
    lost: str
    dropped: str
    side: Literal["server"] = "server"

    def open(self, request: Request) -> Exchange:
        return _LossyExchange(self)


@dataclass
class _LossyExchange(Exchange):
    transport: _LossyTransport

    def deliver(self, device: Device, inbox: Parcel) -> Parcel | None:
        return None if device.name == self.transport.unreachable else inbox

    def upload(self, reply: Reply) -> Reply | None:
        return None if reply.device.name == self.transport.lost else reply

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        return [reply for reply in replies if reply.device.name != self.transport.dropped]


@listed_in(ENGINE_CHECKS)
def check_gate(make_engine: MakeEngine) -> None:
    """A reply that is not finite is refused, and its device keeps its old state."""
    method = _CountingMethod()
    with _engine_world(make_engine, method) as (world, engine):
        devices = world.fleet.devices(1)
        bad, *good = (device.name for device in devices)
        request = Request(method.train, method.inboxes(devices, {bad: math.nan}), 1)
        hint = "pass every reply through fedloom.engines.Gate.receive"
        _require_counts(_times_asked(engine.ask(request)), dict.fromkeys(good, 1), "without the refused reply", hint)
        engine.commit(1)
        again = _times_asked(engine.ask(Request(method.train, method.inboxes(devices), 2)))
        _require_counts(again, {bad: 1, **dict.fromkeys(good, 2)}, "after a refused reply", hint)
        if not any(refusal.device == bad for refusal in world.refusals):
            raise Broken("the refusal is reported", "nothing was reported", "use the gate of world.engine(method)")


@listed_in(ENGINE_CHECKS)
def check_waiting(make_engine: MakeEngine) -> None:
    """`min_replies` are waited for, and an engine does not wait long after `deadline`."""
    method = _CountingMethod()
    with _engine_world(make_engine, method) as (world, engine):
        inboxes = method.inboxes(world.fleet.devices(1))
        replies = list(engine.ask(Request(method.train, inboxes, 1, min_replies=2)))
        if len(replies) < 2:
            raise Broken("at least the 2 replies of min_replies", f"{len(replies)}", "wait for request.min_replies")
        engine.commit(1)
        began = time.monotonic()
        for reply in engine.ask(Request(method.train, inboxes, 2, deadline=0.0)):
            if reply.device not in inboxes:
                raise Broken("replies of asked devices", reply.device.name, "")
        waited = time.monotonic() - began
        if waited > 10:
            raise Broken("an answer soon after a deadline of 0 s", f"after {waited:.0f} s", "look at request.deadline")


@listed_in(ENGINE_CHECKS)
def check_server_tasks(make_engine: MakeEngine) -> None:
    """A task for the server itself (`device.is_server`) runs, and bypasses the transports."""
    method = _ServerMethod()
    with _engine_world(make_engine, method) as (world, engine):
        device = world.fleet.devices(1)[0].on_server()
        lossy = _LossyTransport(device.name, device.name, device.name)
        inboxes = {device: {"numbers": {"x": torch.arange(3.0)}}}
        replies = list(engine.ask(Request(method.double, inboxes, 1, transports=(lossy,))))
        found = [reply.upload["numbers"]["x"].tolist() for reply in replies]
        if found != [[0.0, 2.0, 4.0]]:
            hint = "let an in-process engine run what the server is asked; Channel leaves its messages alone"
            raise Broken("the server's own result, [0, 2, 4]", f"{found}", hint)


@dataclass(frozen=True)
class _ServerMethod(Method):
    """The server doubles numbers."""

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        return server

    @on_device(sends={"numbers": like("numbers")})
    def double(self, client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult(upload={"numbers": {"x": 2 * inbox["numbers"]["x"]}})


@listed_in(ENGINE_CHECKS)
def check_rounds(make_engine: MakeEngine) -> None:
    """Three rounds of methods with and without device states end in the bits of the in-process engine."""
    for name in ("heterofl", "lgfedavg"):
        method = METHODS[name]()
        with _engine_world(make_engine, method) as (world, engine):
            here, there = (world.play(method, one, 3, 0.75) for one in (engine, world.engine(method)))
            require_same(here, there, f"the bits of {name} in process", "see check_replies and check_states")


@listed_in(ENGINE_CHECKS)
def check_close(make_engine: MakeEngine) -> None:
    """`close` can be called twice, before and after the engine was used."""
    method = _CountingMethod()
    with _engine_world(make_engine, method) as (world, engine):
        list(engine.ask(Request(method.train, method.inboxes(world.fleet.devices(1)), 1)))
        engine.close()
        engine.close()
    with _engine_world(make_engine, method) as (_, unused):
        unused.close()

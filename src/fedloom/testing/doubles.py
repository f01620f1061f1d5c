"""Engines and clients for tests: scripted, intercepted, compressed."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..client import Client, Optimizer, PaddedIndices, Sgd, Step
from ..data import Examples, Preparation
from ..engines import Compression, DeviceEnd, InProcess, ServerEnd
from ..fleet import Device, Engine, Reply, Request, Transport
from ..models import Model
from ..tensors import Parcel


@dataclass
class ScriptedEngine:
    """Devices that answer what the test wrote for them; it keeps what they were asked.

    Parameters
    ----------
    answer
        `(device, inbox)` -> the reply, or None for none.
    asked
        The name of the task and the inboxes of every request; it grows.
    committed
        Rounds that were committed; it grows.

    Examples
    --------
    >>> from fedloom.fleet import Reply
    >>> from fedloom.methods.fedavg import FedAvg
    >>> from fedloom.testing import ScriptedEngine, TinyWorld
    >>> world, method = TinyWorld.make(sizes=(8, 8)), FedAvg()
    >>> engine = ScriptedEngine(lambda device, inbox: Reply(device, 8, {"weights": inbox["weights"]}))
    >>> server = world.play(method, engine, rounds=1)
    >>> [name for name, inboxes in engine.asked]
    ['train']
    """

    answer: Callable[[Device, Parcel], Reply | None]
    asked: list[tuple[str, Mapping[Device, Parcel]]] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)

    def ask(self, request: Request) -> Iterator[Reply]:
        """Answer for every device of the request."""
        self.asked.append((request.task.name, request.inboxes))
        for device, inbox in request.inboxes.items():
            reply = self.answer(device, inbox)
            if reply is not None:
                yield reply

    def commit(self, round_number: int) -> None:
        """Note the round."""
        self.committed.append(round_number)

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class InterceptingEngine:
    """Another engine's replies, changed on their way to the server; it keeps what the server got.

    Parameters
    ----------
    engine
        The engine that is asked.
    change
        All replies of a request -> the replies that arrive.
    delivered
        The replies that arrived; it grows.
    requests
        The requests, as the method made them; it grows.
    """

    engine: Engine
    change: Callable[[list[Reply]], Iterable[Reply]] = list
    delivered: list[Reply] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def ask(self, request: Request) -> list[Reply]:
        """Ask the engine, and change what it answers."""
        self.requests.append(request)
        replies = list(self.change(list(self.engine.ask(request))))
        self.delivered += replies
        return replies

    def commit(self, round_number: int) -> None:
        """Pass it on."""
        self.engine.commit(round_number)

    def close(self) -> None:
        """Pass it on."""
        self.engine.close()


@dataclass(frozen=True)
class TransportedEngine:
    """An engine whose requests pass some more transports."""

    engine: Engine
    transports: tuple[Transport, ...]

    def ask(self, request: Request) -> Iterable[Reply]:
        return self.engine.ask(replace(request, transports=(*request.transports, *self.transports)))

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()


def with_transports(engine: Engine, *transports: Transport) -> TransportedEngine:
    """An engine whose requests pass some more transports.

    Parameters
    ----------
    engine
        The engine that is asked.
    *transports
        Listed from the server to the device.

    Returns
    -------
    TransportedEngine
    """
    return TransportedEngine(engine, transports)


def with_compression(engine: InProcess, compression: Compression, *network: Transport) -> TransportedEngine:
    """An engine whose messages are compressed.

    Parameters
    ----------
    engine
        The engine that is asked.
    compression
        Of both directions.
    *network
        What happens to the compressed messages on their way.

    Returns
    -------
    TransportedEngine
    """
    gate = engine.gate
    server = ServerEnd(compression, gate.report, gate.max_examples)
    return TransportedEngine(engine, (server, *network, DeviceEnd(compression, engine.client_states.residual)))


def random_block(model: Model, devices: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Random weights for a block of devices, different for each.

    Parameters
    ----------
    model
        Whose weights.
    devices
        The length of the leading axis.
    dtype, seed
        Of the numbers.

    Returns
    -------
    dict
        Name -> `[devices, ...]`.
    """
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(devices, *shape, generator=draw, dtype=torch.float64).mul(0.5).to(dtype)
        for name, shape in model.shapes().items()
    }


def build_client(
    model: Model, examples: Examples, plan: Sequence[Step], optimizer: Optimizer | None = None, **changes: Any
) -> Client:
    """A block of devices that share a store of examples, to call a task's function with.

    Parameters
    ----------
    model
        Of all devices.
    examples
        Their training and test examples.
    plan
        The batches of the block, as `merge_plans` makes them.
    optimizer
        By default SGD.
    **changes
        Other fields of `Client`.

    Returns
    -------
    Client
    """
    devices = len(plan[0].rows)
    made = Client(
        model=model,
        optimizer=optimizer or Sgd(0.1),
        examples=examples,
        tests=examples,
        test_indices=PaddedIndices(
            torch.zeros(devices, 1, dtype=torch.int64), torch.ones(devices, 1, dtype=torch.bool)
        ),
        preparation=Preparation(),
        plan=tuple(plan),
        seen_labels=torch.ones(devices, model.classes, dtype=torch.bool),
        state={},
    )
    return replace(made, **changes)


def committed_states(engine: InProcess) -> dict[str, Parcel]:
    """The states that devices keep, by name of the device."""
    return dict(sorted(engine.client_states.committed.items()))

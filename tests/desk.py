"""Flower without a network: a grid in memory whose messages go through Flower's own serialising, both ways."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.supercore.task_identity import TaskIdentity

from fedloom.engines import InProcess
from fedloom.flower.apps import ClientRuntime, client_app
from fedloom.flower.engine import Flower
from fedloom.flower.messages import MessageClient
from fedloom.flower.nodes import NodeRegistry

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
FIRST = 100  # number of the first device's node

Transit = Callable[[Message], Iterable[Message]]


def sent(message: Message) -> Message:
    """What arrives of it."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


@dataclass
class Desk:
    """Every node answers when it is looked for, unless it is slow; `transit` is what becomes of an answer."""

    apps: dict[int, ClientApp]
    transit: Transit = lambda message: [message]
    slow: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # Flower knows that they are
    pushed: list[Message] = field(default_factory=list)
    _waiting: dict[str, Message] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        return [node for node in self.apps if node not in self.gone]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self.pushed.append(message)
            if message.metadata.dst_node_id in self.apps:
                self._waiting[message.metadata.message_id] = sent(message)
                names.append(message.metadata.message_id)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterator[Message]:
        for name in message_ids:
            message = self._waiting.get(name)
            if message is None:
                continue
            node = message.metadata.dst_node_id
            if node in self.gone:
                error = Error(5, "Node unavailable")
                yield Message(error, reply_to=self._waiting.pop(name))
            elif node not in self.slow:
                yield from self.transit(sent(self._answer(self._waiting.pop(name))))

    def _answer(self, message: Message) -> Message:
        context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
        try:
            return self.apps[message.metadata.dst_node_id](message, context)
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


def at_home(name: str, engine: InProcess, place: Any, method: Any, folder: Path) -> ClientApp:
    home = ClientRuntime(name, engine, place.fleet, lambda address: method.find(*address), folder / name)
    return client_app(lambda recipe, config: home, lambda config: {"device": name})


def connect(place: Any, method: Any, folder: Path, run: str = "first", block: int = 16, **changes: Any) -> Flower:
    """A world's devices, each at a node of its own with a disk of its own, and the engine that writes to them."""
    names = [place.fleet.name(index) for index in range(place.fleet.size)]
    apps = {
        FIRST + index: at_home(name, place.engine(method, devices_per_block=block), place, method, folder)
        for index, name in enumerate(names)
    }
    client = MessageClient(Desk(apps), poll_interval=0.0)
    inner = place.engine(method, devices_per_block=block, **changes)
    return Flower(inner, NodeRegistry(client), {"name": "a recipe"}, lambda: run)


def desk_of(engine: Flower) -> Desk:
    assert isinstance(engine.client.grid, Desk)
    return engine.client.grid

"""Flower without a network: a grid in memory whose messages go through Flower's own serialization, both ways."""

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
FIRST_NODE = 100

Transit = Callable[[Message], Iterable[Message]]


def transmit(message: Message) -> Message:
    """The message after Flower's serialization."""
    return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))


@dataclass
class InMemoryGrid:
    """Nodes reply when their replies are pulled, unless they are slow; `transit` may change or drop a reply."""

    apps: dict[int, ClientApp]
    transit: Transit = lambda message: [message]
    slow: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)  # disconnected
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
                self._waiting[message.metadata.message_id] = transmit(message)
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
                yield from self.transit(transmit(self._answer(self._waiting.pop(name))))

    def _answer(self, message: Message) -> Message:
        context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
        try:
            return self.apps[message.metadata.dst_node_id](message, context)
        except Exception as error:
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)


def build_app(name: str, engine: InProcess, world: Any, method: Any, folder: Path) -> ClientApp:
    runtime = ClientRuntime(name, engine, world.fleet, lambda address: method.find(*address), folder / name)
    return client_app(lambda recipe, config: runtime, lambda config: {"device": name})


def connect(world: Any, method: Any, folder: Path, run: str = "first", block: int = 16, **changes: Any) -> Flower:
    """An engine whose devices are nodes of an in-memory grid, each with its own folder."""
    names = [world.fleet.name(index) for index in range(world.fleet.size)]
    apps = {
        FIRST_NODE + index: build_app(name, world.engine(method, devices_per_block=block), world, method, folder)
        for index, name in enumerate(names)
    }
    client = MessageClient(InMemoryGrid(apps), poll_interval=0.0)
    inner = world.engine(method, devices_per_block=block, **changes)
    return Flower(inner, NodeRegistry(client), {"name": "a recipe"}, lambda: run)


def grid_of(engine: Flower) -> InMemoryGrid:
    assert isinstance(engine.client.grid, InMemoryGrid)
    return engine.client.grid

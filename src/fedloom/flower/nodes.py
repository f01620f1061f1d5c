"""Which node is which device. Only the device knows, so every node is asked once while it is connected."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..engines.gate import Refusal, excerpt
from .messages import HEADER, TEXT, MessageClient, read_error

REPLY_TIMEOUT = 60.0  # seconds

IdentifyNode = Callable[[int, dict[str, Any]], str | Refusal | None]
"""(node, what it reports about itself) -> name of the device; None: not of this fleet; or why it is refused."""


def identify_by_name(node: int, info: dict[str, Any]) -> str | Refusal | None:
    name = info.get("device")
    return name if isinstance(name, str) else None


def no_rejections() -> Iterable[Refusal]:
    return ()


@dataclass
class NodeRegistry:
    """The connected devices. The first update waits for `expected` of them; later ones may join at any time."""

    client: MessageClient
    identify: IdentifyNode = identify_by_name
    expected: int = 0
    timeout: float = REPLY_TIMEOUT  # seconds to wait for the expected devices
    read_rejected: Callable[[], Iterable[Refusal]] = no_rejections  # connections rejected since the last call
    node_ids: dict[str, int] = field(default_factory=dict)  # by device name
    _info: dict[int, dict[str, Any]] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)  # reported once
    _unreported: list[Refusal] = field(default_factory=list)
    _queries: dict[str, int] = field(default_factory=dict)  # nodes by message id
    _has_waited: bool = False

    def update(self) -> Iterator[Refusal]:
        """Look for nodes that joined or left; report those that are refused."""
        yield from self.read_rejected()
        unreported, self._unreported = self._unreported, []
        yield from unreported
        yield from self._update_nodes()

    def meet(self) -> dict[str, dict[str, Any]]:
        """Update before a run begins: what devices report, by name. Refusals are kept for the first `update`."""
        self._unreported += self._update_nodes()
        return {name: self._info[node] for name, node in self.node_ids.items()}

    def _update_nodes(self) -> Iterator[Refusal]:
        until = time.monotonic() + (0.0 if self._has_waited else self.timeout)
        self._has_waited = True
        while True:
            connected = set(self.client.grid.get_node_ids())
            yield from self._query(connected)  # those that are here need not wait for the others
            is_complete = len(connected) >= self.expected and not self._queries
            if is_complete or time.monotonic() >= until:
                break
            self.client.pause()
        self.node_ids = {name: node for name, node in self.node_ids.items() if node in connected}
        self._info = {node: info for node, info in self._info.items() if node in connected}
        self._refused &= connected
        for node in sorted(self._info.keys() - set(self.node_ids.values()) - self._refused):
            name = self.identify(node, self._info[node])
            if isinstance(name, Refusal):
                self._refused.add(node)
                yield name
            elif name is not None and name in self.node_ids:
                yield Refusal(name, "DUPLICATE", f"node {node} reports the same device")
            elif name is not None:
                self.node_ids[name] = node

    def _query(self, connected: set[int]) -> Iterator[Refusal]:
        """Ask new nodes what they are, and read the replies that have come. Later ones are read by a later call."""
        request = RecordDict({HEADER: ConfigRecord({TEXT: "{}"})})
        for node in sorted(connected - self._info.keys() - set(self._queries.values())):
            message_id = self.client.send(request, node, "query", REPLY_TIMEOUT)
            self._queries |= {} if message_id is None else {message_id: node}
        for message_id, message in dict(self.client.fetch(self._queries)).items():
            yield from self._read_info(self._queries.pop(message_id), message)

    def _read_info(self, node: int, message: Message) -> Iterator[Refusal]:
        error = read_error(message)
        info = None if error else _decode_device_info(message.content)
        if info is not None:
            self._info[node] = info
        else:
            code, reason = error or ("BAD_FORMAT", "it does not report which device it is")
            yield Refusal("", code, f"node {node}: {excerpt(reason)}")


def encode_device_info(info: Any) -> RecordDict:
    """What a device reports about itself, for the `identify` of its server."""
    return RecordDict({HEADER: ConfigRecord({TEXT: json.dumps(info)})})


def _decode_device_info(content: RecordDict) -> dict[str, Any] | None:
    try:
        info = json.loads(str(content[HEADER][TEXT]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return info if isinstance(info, dict) else None

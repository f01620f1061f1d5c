"""Which node is which device. Only the device knows, so every node is asked until it replies."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..engines.gate import Refusal, excerpt
from .messages import HEADER, TEXT, MessageClient, read_error
from .queries import NodeQueries

CONNECT_TIMEOUT = 60.0  # seconds for which the first update waits for devices to connect
REPLY_TIMEOUT = 180.0  # seconds for which it waits for connected nodes to reply
LATER_TIMEOUT = 45.0  # seconds for which later updates wait for them

IdentifyNode = Callable[[int, dict[str, Any]], str | Refusal | None]
"""(node, what it reports about itself) -> name of the device; None: not of this fleet; or why it is refused."""


def identify_by_name(node: int, info: dict[str, Any]) -> str | Refusal | None:
    name = info.get("device")
    return name if isinstance(name, str) else None


def no_rejections() -> Iterable[Refusal]:
    return ()


@dataclass
class NodeRegistry:
    """The connected devices. The first update waits for `expected` of them; later ones may join at any time.

    While devices are missing, an update also waits for connected nodes to reply, but for each node in one update only:
    one that never replies is still asked from time to time, and delays no further round.
    """

    client: MessageClient
    identify: IdentifyNode = identify_by_name
    expected: int = 0
    timeout: float = CONNECT_TIMEOUT
    reply_timeout: float = REPLY_TIMEOUT
    later_timeout: float = LATER_TIMEOUT
    read_rejected: Callable[[], Iterable[Refusal]] = no_rejections  # connections rejected since the last call
    node_ids: dict[str, int] = field(default_factory=dict)  # by device name
    _info: dict[int, dict[str, Any]] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)  # reported once
    _unreported: list[Refusal] = field(default_factory=list)
    _queries: NodeQueries = field(default_factory=NodeQueries)
    _not_awaited: set[int] = field(default_factory=set)  # nodes that did not reply, or with an error
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
        is_first, self._has_waited = not self._has_waited, True
        began, failed, considered = time.monotonic(), set[int](), set[int]()
        while True:
            connected = set(self.client.grid.get_node_ids())
            self._forget_all_but(connected)
            self._queries.ask(self.client, connected - self._info.keys() - failed)
            for node, message in self._queries.fetch(self.client):
                yield from self._read_info(node, message)
                failed |= {node} - self._info.keys()  # asked again by the next update
            yield from self._identify_nodes(self._info.keys() - considered)
            considered |= self._info.keys()
            if time.monotonic() - began >= self._seconds_to_wait(len(connected), is_first):
                break
            self.client.pause()
        yield from self._report_late()

    def _seconds_to_wait(self, connected: int, is_first: bool) -> float:
        """How long this update may take, unless more devices become known."""
        if len(self.node_ids) >= self.expected:
            return 0.0
        connecting = self.timeout if is_first and connected < self.expected else 0.0
        replying = self.reply_timeout if is_first else self.later_timeout
        return max(connecting, replying if self._queries.unanswered - self._not_awaited else 0.0)

    def _forget_all_but(self, connected: set[int]) -> None:
        self.node_ids = {name: node for name, node in self.node_ids.items() if node in connected}
        self._info = {node: info for node, info in self._info.items() if node in connected}
        self._refused &= connected
        self._queries.forget_all_but(connected)

    def _identify_nodes(self, nodes: set[int]) -> Iterator[Refusal]:
        for node in sorted(nodes - set(self.node_ids.values()) - self._refused):
            name = self.identify(node, self._info[node])
            if isinstance(name, Refusal):
                self._refused.add(node)
                yield name
            elif name is not None and name in self.node_ids:
                yield Refusal(name, "DUPLICATE", f"node {node} reports the same device")
            elif name is not None:
                self.node_ids[name] = node

    def _report_late(self) -> Iterator[Refusal]:
        """Report the nodes that were waited for in vain."""
        if len(self.node_ids) >= self.expected:
            return
        for node in sorted(self._queries.unanswered - self._not_awaited):
            self._not_awaited.add(node)
            yield Refusal(
                "", "LATE", f"node {node} has not reported which device it is{self._queries.last_error(node)}"
            )

    def _read_info(self, node: int, message: Message) -> Iterator[Refusal]:
        error = read_error(message)
        info = None if error else _decode_device_info(message.content)
        if info is not None:
            self._info[node] = info
            self._not_awaited.discard(node)
        else:
            self._not_awaited.add(node)
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

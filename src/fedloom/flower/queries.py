"""Ask nodes which device they are. A query or its reply can be lost, so it is repeated until a reply arrives."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, RecordDict

from ..engines.gate import excerpt
from .messages import HEADER, TEXT, MessageClient, read_error

LIFETIME = 600.0  # seconds for which a query is kept: a busy device replies late
FIRST_REPEAT = 20.0  # seconds until a query is repeated; until the next repetition it is twice as long, and so on
LOSSES = ("EXPIRED", "GONE", "CRASHED")  # errors after which the same query may succeed


@dataclass
class _Unanswered:
    """What is known of a node that has not replied."""

    interval: float  # seconds between the last query and the next
    repeat_at: float
    restarts: int  # of the SuperLink before the last query
    last_error: str = ""


@dataclass
class NodeQueries:
    """Queries to nodes that have not replied. The first reply to any of a node's queries counts."""

    _unanswered: dict[int, _Unanswered] = field(default_factory=dict)
    _nodes: dict[str, int] = field(default_factory=dict)  # by message id

    @property
    def unanswered(self) -> set[int]:
        return set(self._unanswered)

    def last_error(self, node: int) -> str:
        """The last error of a node's queries as the end of a sentence; empty if there was none."""
        error = self._unanswered[node].last_error
        return f": {error}" if error else ""

    def forget_all_but(self, connected: set[int]) -> None:
        """Forget nodes that left, so that they are asked at once when they return."""
        self._unanswered = {node: one for node, one in self._unanswered.items() if node in connected}
        self._nodes = {message_id: node for message_id, node in self._nodes.items() if node in connected}

    def ask(self, client: MessageClient, nodes: Iterable[int]) -> None:
        """Ask new nodes, and repeat queries that may be lost: old ones, and all once the SuperLink has restarted."""
        request, now, restarts = RecordDict({HEADER: ConfigRecord({TEXT: "{}"})}), time.monotonic(), client.restarts()
        for node in sorted(nodes):
            before = self._unanswered.get(node)
            if before and now < before.repeat_at and restarts == before.restarts:
                continue
            message_id = client.send(request, node, "query", LIFETIME)
            if message_id is not None:
                interval = min(2 * before.interval, LIFETIME) if before else FIRST_REPEAT
                error = before.last_error if before else ""
                self._unanswered[node] = _Unanswered(interval, now + interval, restarts, error)
                self._nodes[message_id] = node

    def fetch(self, client: MessageClient) -> Iterator[tuple[int, Message]]:
        """Replies that have arrived, one of each node."""
        for message_id, message in client.fetch(self._nodes):
            node, error = self._nodes.pop(message_id, None), read_error(message)
            if node is None:
                continue
            if error and error[0] in LOSSES:
                self._unanswered[node].last_error = excerpt(error[1])
                continue
            del self._unanswered[node]
            self._nodes = {other: one for other, one in self._nodes.items() if one != node}
            yield node, message

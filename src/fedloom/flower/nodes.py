"""Which node is which device. Only a device knows, so it is asked, once for as long as it is connected."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict

from ..engines.gate import Refusal, excerpt
from .messages import ENTRY, SAID, MessageClient, error_of

ANSWER_WITHIN = 60.0  # seconds

Place = Callable[[int, dict[str, Any]], str | Refusal | None]
"""(node, what its device says of itself) -> the name by which the fleet knows it; None: it is none of the fleet's; or
why it is not believed."""


def as_it_says(node: int, said: dict[str, Any]) -> str | Refusal | None:
    name = said.get("device")
    return name if isinstance(name, str) else None


def nobody() -> Iterable[Refusal]:
    return ()


@dataclass
class NodeRegistry:
    """So many devices are `expected`, and waited for when it is first called; who comes later is welcome too."""

    post: MessageClient
    place: Place = as_it_says
    expected: int = 0
    within: float = ANSWER_WITHIN  # seconds, for those expected
    turned_away: Callable[[], Iterable[Refusal]] = nobody  # who did not come as far as to be called, since last asked
    nodes: dict[str, int] = field(default_factory=dict)  # by name of the device
    _said: dict[int, dict[str, Any]] = field(default_factory=dict)
    _doubted: set[int] = field(default_factory=set)  # told of once
    _untold: list[Refusal] = field(default_factory=list)
    _out: dict[str, int] = field(default_factory=dict)  # questions to nodes, by message
    _called: bool = False

    def call(self) -> Iterator[Refusal]:
        """Know everybody who is connected and has said who it is; tells who is not believed."""
        yield from self.turned_away()
        untold, self._untold = self._untold, []
        yield from untold
        yield from self._called_over()

    def meet(self) -> dict[str, dict[str, Any]]:
        """The same before a run begins: what each has said of itself, by name. Who is not believed is told later."""
        self._untold += self._called_over()
        return {name: self._said[node] for name, node in self.nodes.items()}

    def _called_over(self) -> Iterator[Refusal]:
        until = time.monotonic() + (0.0 if self._called else self.within)
        there, self._called = self._there(until), True
        self.nodes = {name: node for name, node in self.nodes.items() if node in there}
        self._said = {node: said for node, said in self._said.items() if node in there}
        self._doubted &= there
        yield from self._hear(there, until)
        for node in sorted(self._said.keys() - set(self.nodes.values()) - self._doubted):
            name = self.place(node, self._said[node])
            if isinstance(name, Refusal):
                self._doubted.add(node)
                yield name
            elif name is not None and name in self.nodes:
                yield Refusal(name, "DUPLICATE", f"node {node} takes itself for it too")
            elif name is not None:
                self.nodes[name] = node

    def _there(self, until: float) -> set[int]:
        there = set(self.post.grid.get_node_ids())
        while len(there) < self.expected and time.monotonic() < until:
            self.post.rest()
            there = set(self.post.grid.get_node_ids())
        return there

    def _hear(self, there: set[int], until: float) -> Iterator[Refusal]:
        """Ask all that are new; later, who is slow to answer is known the next time."""
        question = RecordDict({ENTRY: ConfigRecord({SAID: "{}"})})
        for node in sorted(there - self._said.keys() - set(self._out.values())):
            sent = self.post.send(question, node, "query", ANSWER_WITHIN)
            self._out |= {} if sent is None else {sent: node}
        while True:
            for name, message in dict(self.post.fetch(self._out)).items():
                yield from self._heard(self._out.pop(name), message)
            if not self._out or time.monotonic() >= until:
                return
            self.post.rest()

    def _heard(self, node: int, message: Message) -> Iterator[Refusal]:
        fault = error_of(message)
        said = None if fault else _words(message.content)
        if said is not None:
            self._said[node] = said
        else:
            code, reason = fault or ("BAD_FORMAT", "it does not say who it is")
            yield Refusal("", code, f"node {node}: {excerpt(reason)}")


def introduction(**said: Any) -> RecordDict:
    """What a device says of itself: `device`, its name, and whatever else the one who places it wants to know."""
    return RecordDict({ENTRY: ConfigRecord({SAID: json.dumps(said)})})


def _words(content: RecordDict) -> dict[str, Any] | None:
    try:
        said = json.loads(str(content[ENTRY][SAID]))
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return said if isinstance(said, dict) else None

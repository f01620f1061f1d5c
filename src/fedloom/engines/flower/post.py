"""Messages out and answers in, by Flower's own grid. Who owes an answer is not written to again."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import Message, RecordDict

PAUSE = 0.25  # seconds between looks: an answer whose device leaves before it is fetched is lost

ERRORS = {
    0: "DEVICE_ERROR", 1: "APP_MISSING", 2: "RAISED", 3: "EXPIRED", 4: "EXPIRED", 5: "GONE", 6: "DEVICE_ERROR",
    7: "APP_INVALID", 8: "CRASHED",
}  # fmt: skip
"""What Flower says of a message without an answer, as codes of events."""


class Grid(Protocol):
    """As much of Flower's as is needed here."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Debt:
    """An answer that did not come in time."""

    device: str
    round_number: int


@dataclass
class Post:
    grid: Grid
    pause: float = PAUSE
    owing: dict[str, Debt] = field(default_factory=dict)  # by message
    breaks: Callable[[], int] = lambda: 0  # how often whatever carries messages has ended and begun again
    _breaks: int = 0  # that are known of

    def broken(self) -> bool:
        """Whether it has since this was last asked: a message that was just being handed over is then nobody's."""
        before, self._breaks = self._breaks, self.breaks()
        return self._breaks != before

    def send(self, content: RecordDict, node: int, kind: str, ttl: float | None, group: str = "") -> str | None:
        """The message's name; None: it could not be sent, for nobody of that number is there."""
        message = Message(content, node, kind, ttl=ttl, group_id=group)
        accepted = set(self.grid.push_messages([message]))
        return message.metadata.message_id if message.metadata.message_id in accepted else None

    def fetch(self, messages: Iterable[str]) -> list[tuple[str, Message]]:
        """Answers with what they answer: an error has no other sender than the server itself."""
        wanted = set(messages)
        found = self.grid.pull_messages(sorted(wanted)) if wanted else ()
        answered = [(message.metadata.reply_to_message_id, message) for message in found]
        return [(name, message) for name, message in answered if name in wanted]

    def settle(self) -> list[tuple[Debt, Message]]:
        """Answers that are here at last."""
        found = self.fetch(self.owing)
        return [(self.owing.pop(name), message) for name, message in found if name in self.owing]

    def busy(self) -> dict[str, Debt]:
        return {debt.device: debt for debt in self.owing.values()}

    def rest(self) -> None:
        time.sleep(self.pause)


def error_of(message: Message) -> tuple[str, str] | None:
    """A code and what Flower says, if a message holds no answer."""
    if message.has_content():
        return None
    error: Any = message.error
    return ERRORS.get(error.code, "DEVICE_ERROR"), f"Flower says {error.code}: {error.reason or 'nothing'}"

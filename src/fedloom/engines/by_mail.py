"""A simulation whose devices answer in bytes, as they would over a network: the same bits as without."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ..fleet import Reply
from ..training import Task
from .admission import Refusal
from .codecs import Codec
from .coded import Coded
from .in_process import InProcess
from .mail import Question, opened, sealed
from .works import Parcels

Transit = Callable[[bytes, Question], Iterable[bytes]]
"""What arrives of what a device sent: as a rule just that, but it may be nothing, something else, or several things."""


def as_sent(data: bytes, question: Question) -> Iterable[bytes]:
    return (data,)


@dataclass(frozen=True)
class ByMail:
    """The first reply to a question that is admitted counts. A device of which nothing was does not remember."""

    inner: InProcess
    run: str = "run"
    transit: Transit = as_sent
    codec: Codec | None = None

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        asked = self.codec.asked(task) if self.codec else task

        def way(reply: Reply) -> Reply | None:
            if reply.device.here:  # the server does not write to itself
                return reply
            device, most = reply.device, self.inner.most_examples
            return self._arrived(reply, Question(self.run, round_number, repeat, asked, device, inboxes[device], most))

        engine = Coded(self.inner, self.codec) if self.codec else self.inner
        return engine.ask(task, inboxes, round_number, repeat, way)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()

    def _arrived(self, reply: Reply, question: Question) -> Reply | None:
        first: Reply | None = None
        for data in self.transit(sealed(question.heading(reply.examples), reply.sent), question):
            found = opened(data, replace(question, answered=first is not None))
            if isinstance(found, Refusal):
                self.inner.on_refusal(question.round_number, found)
            else:
                first = found
        return first

"""Refuse updates that are much longer than those of similar devices.

Off unless a recipe asks for it: no paper has it. An update is measured against the median of those admitted in earlier
rounds, of the same tier and task; in the first round, against the median of the request itself.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

from ..client import Task
from ..fleet import Device, Exchange, Reply, Request
from ..fleet.round_context import update_norm
from ..tensors import Parcel
from .gate import Refusal, Report, ignore

KEPT = 500  # norms of a tier and a task

History = dict[str, list[float]]
"""Norms of admitted updates, by tier and task, in order of round and device."""


def _private_history() -> Callable[[], History]:
    history: History = {}
    return lambda: history


@dataclass
class NormScreening:
    """A transport at the server that refuses updates much longer than those of similar devices.

    Parameters
    ----------
    limit : how many times the median norm an update may have.
    history : the norms of earlier rounds. They belong to the run's state, so that a resumed run still knows them.
    report : called for every update that is refused.
    side : where the transport runs.
    """

    limit: float
    history: Callable[[], History] = field(default_factory=_private_history)
    report: Report = ignore
    side: Literal["server"] = "server"
    _round: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)

    def open(self, request: Request) -> Exchange:
        return _ScreenedExchange(self, request)

    def refusals(
        self, task: Task, repeat: int, replies: Sequence[Reply], inboxes: Mapping[Device, Parcel]
    ) -> dict[Device, Refusal]:
        """The updates that are too long; the norms of the others are noted.

        Parameters
        ----------
        task : the task of the request.
        repeat : the number of earlier requests of the round with the task's random stream.
        replies : the replies that the gate admitted.
        inboxes : what the devices received.
        """
        norms: dict[str, dict[Device, float]] = {}
        for reply in replies:
            norm = update_norm(reply, inboxes[reply.device])
            if norm is not None:
                norms.setdefault(f"{reply.device.tier} {task.name}", {})[reply.device] = norm
        refused: dict[Device, Refusal] = {}
        for kind, of_kind in norms.items():
            usual = median_low(self.history().get(kind) or of_kind.values())  # of two, one may be beyond all measure
            refused |= {
                device: self._refusal(device, norm, usual)
                for device, norm in of_kind.items()
                if usual > 0 and norm > self.limit * usual
            }
            admitted = {(device.name, repeat): norm for device, norm in of_kind.items() if device not in refused}
            self._round.setdefault(kind, {}).update(admitted)
        return refused

    def commit(self) -> None:
        """The round is over: its norms join the history, in order of device."""
        history = self.history()
        for kind, norms in self._round.items():
            history[kind] = [*history.get(kind, []), *(norms[key] for key in sorted(norms))][-KEPT:]
        self._round.clear()

    def _refusal(self, device: Device, norm: float, usual: float) -> Refusal:
        reason = f"an update of norm {norm:.4g}, more than {self.limit:g} times the median of {usual:.4g}"
        return Refusal(device.name, "NORM", reason)


@dataclass
class _ScreenedExchange(Exchange):
    screening: NormScreening
    request: Request

    def gather(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Once all have arrived: in the first round there is nothing else to compare with."""
        request, ordered = self.request, sorted(replies, key=lambda reply: reply.device.name)
        refused = self.screening.refusals(request.task, request.repeat, ordered, request.inboxes)
        for reply in ordered:
            if reply.device in refused:
                self.screening.report(request.round_number, refused[reply.device])
            else:
                yield reply

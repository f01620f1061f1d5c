"""How far devices move what they are given. One that moves it much farther than its like is not admitted.

Off unless a recipe asks for it: no paper has it. An update is measured against the median of those admitted in earlier
rounds, of the same tier and task; in the first round, against the median of those who answer the same question.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from ..client import Task
from ..fleet import Device, Reply
from ..fleet.round_context import update_norm
from ..tensors import Parcel
from .gate import Refusal

KEPT = 500  # norms of a tier and a task

Known = dict[str, list[float]]


def _nowhere_else() -> Callable[[], Known]:
    known: Known = {}
    return lambda: known


@dataclass
class Norms:
    """`earlier` is where they are kept from round to round, so that a run that is resumed still knows them. They are
    put in order of device, so that it does not matter who answers first."""

    most: float  # times the median
    earlier: Callable[[], Known] = field(default_factory=_nowhere_else)
    _now: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)

    def refusals(
        self, task: Task, repeat: int, replies: Sequence[Reply], inboxes: Mapping[Device, Parcel]
    ) -> dict[Device, Refusal]:
        """Who went too far; how far the others went is noted."""
        lengths: dict[str, dict[Device, float]] = {}
        for reply in replies:
            norm = update_norm(reply, inboxes[reply.device])
            if norm is not None:
                lengths.setdefault(f"{reply.device.tier} {task.name}", {})[reply.device] = norm
        found: dict[Device, Refusal] = {}
        for kind, of_kind in lengths.items():
            usual = median_low(self.earlier().get(kind) or of_kind.values())  # of two, one may be beyond all measure
            found |= {
                device: self._refusal(device, norm, usual) for device, norm in of_kind.items() if self._far(norm, usual)
            }
            admitted = {(device.name, repeat): norm for device, norm in of_kind.items() if device not in found}
            self._now.setdefault(kind, {}).update(admitted)
        return found

    def commit(self) -> None:
        known = self.earlier()
        for kind, norms in self._now.items():
            known[kind] = [*known.get(kind, []), *(norms[who] for who in sorted(norms))][-KEPT:]
        self._now.clear()

    def _far(self, norm: float, usual: float) -> bool:
        """Where most do not move at all, nothing is known of how far is far."""
        return usual > 0 and norm > self.most * usual

    def _refusal(self, device: Device, norm: float, usual: float) -> Refusal:
        said = f"an update of norm {norm:.4g}, more than {self.most:g} times the median of {usual:.4g}"
        return Refusal(device.name, "NORM", said)

"""A simulation whose parcels go through a codec. An engine for the turns of a method; whoever judges asks another.

What a device leaves out it remembers only if its reply is admitted, and from the round's commit on, as all its memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..fleet import Device, Reply
from ..tensors import Parcel, combine
from ..training import Task
from .admission import Refusal
from .codecs import Codec
from .holdings import Shelf
from .in_process import InProcess, Way, straight
from .works import Parcels


@dataclass(frozen=True)
class Coded:
    inner: InProcess
    codec: Codec

    @property
    def shelf(self) -> Shelf:
        return self.inner.shelf

    def ask(
        self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0, way: Way = straight
    ) -> Iterator[Reply]:
        """`way` is what becomes of a reply as it travels: coded."""
        post = _Post(self, task, inboxes, self._told(inboxes), round_number, way)
        for reply in self.inner.ask(task, inboxes, round_number, repeat, post, post.told):
            if reply.device in post.left:
                self.inner.memory.leave_out(reply.device, post.left.pop(reply.device))
            yield reply

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()

    def _told(self, inboxes: Parcels) -> Parcels:
        """What several devices share they still share, so that a block has it once."""
        if self.codec.down is None:
            return inboxes
        known: dict[int, Tensor] = {}

        def rounded(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = self.codec.rounded(tensor)
            return known[id(tensor)]

        return {device: inbox if device.here else _each(rounded, inbox) for device, inbox in inboxes.items()}


@dataclass(frozen=True)
class _Post:
    """The way of the replies to one question."""

    engine: Coded
    task: Task
    inboxes: Parcels  # as the server has them
    told: Parcels  # as the devices do
    round_number: int
    way: Way
    left: dict[Device, Parcel] = field(default_factory=dict)  # out, by those who are heard

    def __call__(self, reply: Reply) -> Reply | None:
        device, codec, simulation = reply.device, self.engine.codec, self.engine.inner
        if device.here:  # nothing travels
            return self.way(reply)
        before = simulation.memory.left_out(device)
        coded, after = codec.encode_up(self.task, self.told[device], reply.sent, before)
        arrived = self.way(replace(reply, sent=coded))
        if arrived is None:
            return None
        heard = codec.decode_up(arrived, self.task, self.inboxes[device], simulation.most_examples)
        if isinstance(heard, Refusal):
            simulation.on_refusal(self.round_number, heard)
            return None
        if after is not before:
            self.left[device] = after
        return heard


def _each(function: Callable[[Tensor], Tensor], parcel: Parcel) -> Parcel:
    return {bundle: combine(function, tensors) for bundle, tensors in parcel.items()}

"""An engine without devices: it answers with what tasks declare to send, so a round can be costed before it runs."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..client import Layout
from ..fleet import UNCOMPRESSED, Device, Reply, Request
from ..fleet.engine import ByteCounter
from ..tensors import Parcel, payload_bytes
from .gate import declared


@dataclass
class DryRun:
    """An engine without devices that counts, per tier, the bytes all its devices together receive and send.

    Parameters
    ----------
    count_examples : the number of examples of a device.
    wire : how large parcels are as they travel.
    bytes_down : bytes that devices received, by tier.
    bytes_up : bytes that they sent, by tier.
    bytes_down_compressed : bytes that devices received, as they travelled.
    bytes_up_compressed : bytes that they sent, as they travelled.
    largest_message : the largest of a single message in either direction, as it travelled, by tier.
    """

    count_examples: Callable[[Device], int] = lambda device: 1
    wire: ByteCounter = UNCOMPRESSED
    bytes_down: Counter[str] = field(default_factory=Counter)
    bytes_up: Counter[str] = field(default_factory=Counter)
    bytes_down_compressed: Counter[str] = field(default_factory=Counter)
    bytes_up_compressed: Counter[str] = field(default_factory=Counter)
    largest_message: dict[str, int] = field(default_factory=dict)

    def ask(self, request: Request) -> Iterator[Reply]:
        for device, inbox in request.inboxes.items():
            examples = 0 if device.is_server else self.count_examples(device)
            layouts = declared(request.task, device, inbox, examples)
            upload = {bundle: _zeros(layout) for bundle, layout in layouts.items()}
            if not device.is_server:
                self._count(request, device, inbox, upload)
            yield Reply(device, examples, upload)

    def _count(self, request: Request, device: Device, inbox: Parcel, upload: Parcel) -> None:
        self.bytes_down[device.tier] += payload_bytes(inbox)
        self.bytes_up[device.tier] += payload_bytes(upload)
        down, up = self.wire.bytes_down(inbox), self.wire.bytes_up(request.task, upload)
        self.bytes_down_compressed[device.tier] += down
        self.bytes_up_compressed[device.tier] += up
        self.largest_message[device.tier] = max(down, up, self.largest_message.get(device.tier, 0))

    def commit(self, round_number: int) -> None:
        pass

    def close(self) -> None:
        pass


def _zeros(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}

"""An engine without devices: it answers with what tasks declare to send, so a round can be costed before it is run."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..client import Task
from ..fleet import PLAIN, Coding, Device, Reply
from ..tensors import Parcel, payload_bytes


@dataclass
class DryRun:
    """`down` and `up` hold, per tier, what all its devices together received and sent."""

    examples: Callable[[Device], int] = lambda device: 1  # that a device holds
    down: dict[str, int] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    coded_down: Counter[str] = field(default_factory=Counter)  # the same as it travels
    coded_up: Counter[str] = field(default_factory=Counter)

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterator[Reply]:
        for device, inbox in inboxes.items():
            held = 0 if device.is_server else self.examples(device)
            sent = {bundle: _zeros(declared(device.model, inbox, held)) for bundle, declared in task.sends.items()}
            if not device.is_server:
                self.down[device.tier] = self.down.get(device.tier, 0) + payload_bytes(inbox)
                self.up[device.tier] = self.up.get(device.tier, 0) + payload_bytes(sent)
                self.coded_down[device.tier] += self.coding.down_bytes(inbox)
                self.coded_up[device.tier] += self.coding.up_bytes(task, sent)
            yield Reply(device, held, sent)

    def commit(self, round_number: int) -> None:
        pass

    def close(self) -> None:
        pass


def _zeros(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}

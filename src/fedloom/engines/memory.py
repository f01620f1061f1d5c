"""What devices keep from round to round, in the memory of the process that simulates them.

Two generations: what was remembered in a round counts from its commit on, so a round that is abandoned leaves no trace.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..fleet import Device
from ..tensors import Parcel


@dataclass
class Memory:
    prepare: Callable[[Device], Parcel]
    committed: dict[str, Parcel] = field(default_factory=dict)
    staged: dict[str, Parcel] = field(default_factory=dict)

    def recall(self, device: Device) -> Parcel:
        """The newest memory; a device that has none yet prepares its first."""
        for generation in (self.staged, self.committed):
            if device.name in generation:
                return generation[device.name]
        return self.prepare(device)

    def remember(self, device: Device, parcel: Parcel) -> None:
        self.staged[device.name] = parcel

    def commit(self) -> None:
        self.committed.update(self.staged)
        self.staged.clear()

    def abandon(self) -> None:
        self.staged.clear()

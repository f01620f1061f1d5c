"""Which of its memories a device is to use: all that the server has where devices keep them themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...tensors import Parcel
from .diary import Stamp


@dataclass
class Stamps:
    """Two generations, as in process: what was remembered in a round counts from its commit on."""

    commits: int = 0
    _committed: dict[str, Stamp] = field(default_factory=dict)
    _staged: dict[str, Stamp | None] = field(default_factory=dict)  # None: lost

    def newest(self, device: str) -> Stamp | None:
        """What a device is to use; None: it has nothing yet, and prepares its first memory."""
        return self._staged[device] if device in self._staged else self._committed.get(device)

    def counting(self, device: str) -> Stamp | None:
        """What it must not forget, for the round may come to nothing."""
        return self._committed.get(device)

    def remember(self, device: str, stamp: Stamp) -> None:
        self._staged[device] = stamp

    def lost(self, device: str) -> None:
        self._staged[device] = None

    def commit(self) -> None:
        kept = {**self._committed, **self._staged}
        self._committed = {device: stamp for device, stamp in kept.items() if stamp is not None}
        self._staged.clear()
        self.commits += 1

    def abandon(self) -> None:
        self._staged.clear()

    @property
    def committed(self) -> Mapping[str, Parcel]:
        """As parcels, so that they are saved and compared like memories."""
        return {device: {"memory": {"stamp": torch.tensor(stamp)}} for device, stamp in self._committed.items()}

    @committed.setter
    def committed(self, parcels: Mapping[str, Parcel]) -> None:
        self._committed = {device: _stamp(parcel) for device, parcel in parcels.items()}
        self._staged.clear()

    @property
    def stamps(self) -> dict[str, int]:
        """A number for every memory, which no other memory of its device has."""
        return {device: round_number << 20 | serial for device, (round_number, serial) in self._committed.items()}


def _stamp(parcel: Parcel) -> Stamp:
    round_number, serial = parcel["memory"]["stamp"].tolist()
    return round_number, serial

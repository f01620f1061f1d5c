"""Which model of a run is wanted, and for what kind of input."""

from dataclasses import dataclass
from typing import Literal

Input = Literal["stored", "prepared"]
"""Examples as they are stored, prepared inside the exported file; or as the model itself takes them."""


@dataclass(frozen=True)
class Wanted:
    """One of the three; else the largest tier's."""

    tier: str | None = None
    device: str | None = None
    macs: int | None = None

"""What a judgement writes down: who was judged, on what, and how it did. Nothing is averaged before it is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    round: int
    candidate: str
    tier: str
    device: str  # empty: not one device's own
    test: str  # "global": the whole test set; "local": devices' own test examples
    metric: str
    value: float

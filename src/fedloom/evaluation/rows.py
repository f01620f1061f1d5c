"""What a judgement writes down: who was judged, on what, and how it did. Nothing is averaged before it is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    round: int
    candidate: str
    tier: str
    device: str  # empty: not one device's own
    test: str  # "global": the whole set; "local": devices' own examples; "unseen": those of devices that never train
    metric: str
    value: float

"""A tier's, a device's or a sub-net's model as files that run without this package."""

from .card import loading, read_card, write_card
from .formats import FORMATS, Answer, Format, Unavailable
from .module import Plain, plain, preparing, unfilled
from .parity import Parity, accuracy_on, functional, latency_ms, measured, parity

__all__ = [
    "FORMATS",
    "Answer",
    "Format",
    "Parity",
    "Plain",
    "Unavailable",
    "accuracy_on",
    "functional",
    "latency_ms",
    "loading",
    "measured",
    "parity",
    "plain",
    "preparing",
    "read_card",
    "unfilled",
    "write_card",
]

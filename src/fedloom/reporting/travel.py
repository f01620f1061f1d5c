"""What devices moved, as it counts when runs are compared: the bytes that travelled."""

from collections.abc import Sequence

from ..evaluation import Row

PLAIN, CODED = ("down", "up"), ("down_coded", "up_coded")


def travelled(rows: Sequence[Row]) -> list[Row]:
    """The rows of a run that say so. With a codec they are those of the coded parcels, for nothing else was sent."""
    coded = [row for row in rows if row.metric in CODED]
    return coded or [row for row in rows if row.metric in PLAIN]

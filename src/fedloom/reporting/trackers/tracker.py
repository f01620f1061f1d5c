"""Where a run's rows go besides its own folder, and how a run is kept safe from that."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ...evaluation import Row
from ..journal import read_rows


@dataclass(frozen=True)
class Beginning:
    """The run that is about to be followed. `kept` are the rows of rounds that are over: none, unless it is resumed."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    kept: Sequence[Row] = ()
    resumed: bool = False


class Tracker(Protocol):
    """Is told all that is written to rows.jsonl. Whatever it raises ends its own work, never the run."""

    def begin(self, run: Beginning) -> None: ...

    def rows(self, rows: Sequence[Row]) -> None: ...

    def end(self, status: str) -> None:
        """`status` is the manifest's: finished, failed or interrupted."""


@dataclass
class Trackers:
    """Those that follow one run. One that fails is told of once, and asked nothing more."""

    name: str = ""  # of the run; empty: as its folder
    each: dict[str, Tracker] = field(default_factory=dict)
    noticed: Callable[[str], None] = lambda said: None

    @contextmanager
    def told(self, folder: Path, recipe: Mapping[str, Any], resumed: bool) -> Iterator[None]:
        """Of a run from its beginning to its end, whatever that is."""
        kept = list(read_rows(folder)) if self.each else []
        beginning = Beginning(folder, self.name or folder.resolve().name, recipe, kept, resumed)
        self._all(lambda one: one.begin(beginning))
        status = "interrupted"
        try:
            yield
            status = "finished"
        except Exception:
            status = "failed"
            raise
        finally:
            self._all(lambda one: one.end(status))

    def rows(self, rows: Sequence[Row]) -> None:
        self._all(lambda one: one.rows(rows))

    def _all(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.each.items()):
            try:
                tell(tracker)
            except Exception as error:  # of a library that is none of ours
                del self.each[name]
                self.noticed(f"{name} follows no further: {type(error).__name__}: {error}")


NONE = Trackers()


def title(row: Row) -> str:
    """One name for each curve: what was judged, from the general to the particular."""
    device = f"device {row.device}" if row.device else ""
    return "/".join(filter(None, (row.candidate, row.tier, device, row.test, row.metric)))


def finite(rows: Sequence[Row]) -> list[Row]:
    """A loss that is no number is a gap in a curve; rows.jsonl has it as null."""
    return [row for row in rows if math.isfinite(row.value)]

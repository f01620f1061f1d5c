"""Messages of the package, through `logging` under the name `fedloom`: silent until somebody listens.

The command line listens for its user; a notebook calls `fedloom.logs.show()`; a program attaches handlers of its own.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

ROOT = logging.getLogger("fedloom")
ROOT.addHandler(logging.NullHandler())


class StderrHandler(logging.Handler):
    """Write to what `sys.stderr` is at that moment: progress bars, notebooks and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")
        sys.stderr.flush()


_STDERR = StderrHandler()


def show(level: int | str = logging.INFO) -> None:
    """Show messages on stderr. Call it again to change the level.

    Parameters
    ----------
    level : the lowest level that is shown; "INFO" includes progress.
    """
    ROOT.addHandler(_STDERR)
    ROOT.setLevel(level)


@contextmanager
def showing(level: int | str = logging.INFO) -> Iterator[None]:
    """Show messages on stderr while the context lasts; handlers of the root logger do not repeat them.

    Parameters
    ----------
    level : the lowest level that is shown; "INFO" includes progress.
    """
    before = ROOT.level, ROOT.propagate, _STDERR in ROOT.handlers
    show(level)
    ROOT.propagate = False
    try:
        yield
    finally:
        level, ROOT.propagate, shown = before
        ROOT.setLevel(level)
        if not shown:
            ROOT.removeHandler(_STDERR)

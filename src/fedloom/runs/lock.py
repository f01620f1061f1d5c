"""A run's folder is written by one process at a time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..recipe.errors import recipe_error

try:
    import fcntl
except ImportError:  # not on every system; there, a second process is not noticed
    fcntl = None  # type: ignore[assignment]


class _Handle:
    """An open folder whose lock belongs to the process that took it."""

    def __init__(self, folder: Path) -> None:
        self.number = os.open(folder, os.O_RDONLY)
        _handles.add(self)

    def close(self) -> None:
        if self in _handles:
            _handles.remove(self)
            os.close(self.number)


_handles: set[_Handle] = set()


def _close_in_child() -> None:
    """Close a forked worker's copies: it must not hold the lock of a killed parent."""
    for handle in list(_handles):
        handle.close()


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Hold the folder of a run while it is written.

    The lock is on the folder itself: it leaves no file behind, and ends with the process, however that ends.

    Parameters
    ----------
    folder : of the run.

    Raises
    ------
    RecipeError
        If another process, or an unfinished iterator of this one, is writing to it.
    """
    if fcntl is None:
        yield
        return
    handle = _Handle(folder)
    try:
        try:
            fcntl.flock(handle.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "this run is being written right now, by another process or an iterator that is not closed"
            raise recipe_error(folder, "RUN_LOCKED", message, "wait until it ends, or stop it") from None
        yield
    finally:
        handle.close()

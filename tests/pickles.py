"""An ear for pickles: whatever is unpickled while somebody listens is heard."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

HEARD: list[str] = []


@contextmanager
def pickles_heard() -> Iterator[list[str]]:
    _listen()
    before, heard = len(HEARD), list[str]()
    try:
        yield heard
    finally:
        heard += HEARD[before:]


@cache
def _listen() -> None:
    """Once for all tests of a process, for a hook cannot be taken back."""

    def hook(event: str, arguments: Any) -> None:
        if event.startswith("pickle."):
            HEARD.append(f"{event} {arguments}")

    sys.addaudithook(hook)

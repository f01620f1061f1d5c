"""A clock that advances only while the server waits, so that no test depends on the speed of the machine."""

from dataclasses import dataclass

import pytest

from fedloom.flower import engine, messages, nodes, queries


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1.0


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of everything that waits for devices."""
    clock = Clock()
    for module in (messages, nodes, queries, engine):
        monkeypatch.setattr(module, "time", clock)
    return clock

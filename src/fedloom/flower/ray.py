"""Flower's own simulation on Ray: as many devices at a time as there are cores, here or on a cluster (RAY_ADDRESS).

Flower runs beside the loop, in a thread of its own: its server half hands over the grid and waits for the run to end.
"""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from queue import Queue
from threading import Event, Thread
from typing import Any

from flwr.app import Message
from flwr.simulation import run_simulation

from .apps import ClientApp, Config, Grid, server_app

LONGEST_END = 60.0  # seconds that Ray may take to end what it started
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
RESOURCES: dict[str, int | float] = {"num_cpus": 1, "num_gpus": 0.0}


@dataclass
class RayGrid:
    """A grid that is not there before it is used, and gone when it is closed."""

    app: ClientApp
    devices: int
    _opened: "Queue[Grid | BaseException]" = field(default_factory=Queue)
    _over: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _grid: Grid | None = None

    def get_node_ids(self) -> Iterable[int]:
        return self._open().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._open().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError("Flower's simulation has ended by itself; what it said is above")
        return self._open().pull_messages(message_ids)

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(LONGEST_END)

    def _open(self) -> Grid:
        if self._grid is None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
            found = self._opened.get()
            if isinstance(found, BaseException):
                raise found
            self._grid = found
        return self._grid

    def _run(self) -> None:
        def hand_over(grid: Grid, config: Config) -> None:
            self._opened.put(grid)
            self._over.wait()

        logging.getLogger("flwr").setLevel(logging.ERROR)  # its progress is not the run's
        # else Ray would join whatever cluster was last begun on this machine, or wait for one that is gone
        where = {} if os.environ.get("RAY_ADDRESS") else {"address": "local"}
        settings: dict[str, Any] = {"client_resources": RESOURCES, "init_args": {**QUIET, **where}}
        try:
            run_simulation(server_app(hand_over), self.app, self.devices, backend_config=settings)
        except BaseException as error:
            self._opened.put(error)

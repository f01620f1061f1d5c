"""Flower's simulation on Ray: as many devices at a time as there are cores, here or on a cluster (RAY_ADDRESS).

The simulation runs in a thread; its server app hands the grid over to the training loop and waits for the run to end.
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

SHUTDOWN_TIMEOUT = 60.0  # seconds
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}
RESOURCES: dict[str, int | float] = {"num_cpus": 1}


@dataclass
class RayGrid:
    """A grid whose simulation starts when it is first used and ends when it is closed."""

    app: ClientApp
    devices: int
    num_gpus: float = 0.0  # of each process that simulates devices
    _started: "Queue[Grid | BaseException]" = field(default_factory=Queue)
    _closed: Event = field(default_factory=Event)
    _thread: Thread | None = None
    _grid: Grid | None = None

    def get_node_ids(self) -> Iterable[int]:
        return self._start().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._start().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError("Flower's simulation ended unexpectedly; see its output above")
        return self._start().pull_messages(message_ids)

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_TIMEOUT)

    def _start(self) -> Grid:
        if self._grid is None:
            self._thread = Thread(target=self._run, daemon=True)
            self._thread.start()
            started = self._started.get()
            if isinstance(started, BaseException):
                raise started
            self._grid = started
        return self._grid

    def _run(self) -> None:
        def hand_over(grid: Grid, config: Config) -> None:
            self._started.put(grid)
            self._closed.wait()

        logging.getLogger("flwr").setLevel(logging.ERROR)  # its progress is not the run's
        # without an address Ray joins the cluster last started on this machine, or waits for one that is gone
        address = {} if os.environ.get("RAY_ADDRESS") else {"address": "local"}
        settings: dict[str, Any] = {
            "client_resources": {**RESOURCES, "num_gpus": self.num_gpus},
            "init_args": {**QUIET, **address},
        }
        try:
            run_simulation(server_app(hand_over), self.app, self.devices, backend_config=settings)
        except BaseException as error:
            self._started.put(error)

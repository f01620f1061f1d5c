"""Simulate devices in several processes, one torch thread each: the same bits as in one, sooner.

Workers are forked once and see the data without a copy. Work goes out by descending cost; parcels travel as bytes of
safetensors. A worker that dies is replaced and its work done again; an error in a task is raised where the method is.
"""

import contextlib
import ctypes
import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..evaluation import cost
from ..fleet import Device, Fleet, Reply
from ..models import Model
from ..tensors import Parcel
from ..training import Outcome, Schedule, Task
from .in_process import InProcess, Parcels, Work
from .wire import pack, unpack

TRIES = 3  # how often work may cost a worker its life before it is done by the one who asked

Find = Callable[[tuple[str, ...]], Task]
"""A task by its address."""


@dataclass
class Worker:
    process: BaseProcess
    link: Connection
    at: Work | None = None


@dataclass
class ProcessPool:
    inner: InProcess
    fleet: Fleet
    find: Find
    workers: int
    _pool: list[Worker] = field(default_factory=list)

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        works = self.inner.works(task, inboxes, round_number, repeat)
        works.sort(key=lambda work: -_macs(work.devices[0].model) * work.visits)
        if len(works) == 1:
            yield from self.inner.admitted(works[0], inboxes, self.inner.carry_out(works[0]))
            return
        for work, outcome in self._outcomes(works):
            yield from self.inner.admitted(work, inboxes, outcome)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        for worker in self._pool:
            worker.link.close()
        for worker in self._pool:
            worker.process.join(timeout=2)
            worker.process.kill()
        self._pool.clear()

    def _outcomes(self, works: list[Work]) -> Iterator[tuple[Work, Outcome]]:
        """In the order they are done. Whoever asked for them sorts."""
        waiting, deaths = list(works), Counter[int]()
        for worker in [worker for worker in self._pool if worker.at]:  # an ask that nobody heard to its end
            worker.process.kill()
            self._replace(worker)
        while len(self._pool) < self.workers:
            self._pool.append(self._hire())
        while waiting or any(worker.at for worker in self._pool):
            for worker in self._pool:
                if worker.at is None and waiting:
                    self._hand(worker, waiting.pop(0))
            busy = {worker.link: worker for worker in self._pool if worker.at}
            for link in wait(list(busy)):
                worker = busy[link]  # type: ignore[index]
                work = worker.at
                assert work is not None
                try:
                    outcome = _receive_outcome(worker.link)
                    worker.at = None
                except (EOFError, OSError):  # it was killed; its work was not
                    self._replace(worker)
                    deaths[id(work)] += 1
                    if deaths[id(work)] < TRIES:
                        waiting.insert(0, work)
                        continue
                    outcome = None
                # a task's own error is raised here, with its own traceback, by doing the work again
                yield work, outcome or self.inner.carry_out(work)

    def _hand(self, worker: Worker, work: Work) -> None:
        worker.at = work
        with contextlib.suppress(OSError):  # a worker that is gone is noticed when its answer is read
            worker.link.send_bytes(json.dumps(_header(work)).encode())
            worker.link.send_bytes(pack(work.inbox))
            worker.link.send_bytes(pack(work.memory))

    def _replace(self, worker: Worker) -> None:
        worker.link.close()
        worker.process.join(timeout=1)
        self._pool[self._pool.index(worker)] = self._hire()

    def _hire(self) -> Worker:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        others = [worker.link for worker in self._pool]
        process = fork.Process(target=self._serve, args=(theirs, [ours, *others]), daemon=True)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _serve(self, link: Connection, others: list[Connection]) -> None:
        """A worker's life: until its pipe closes."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked decides when to stop
        for other in others:
            other.close()  # or a pipe would stay open after its owner has gone
        torch.set_num_threads(1)
        keep_the_heap()
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = link.recv_bytes(), link.recv_bytes(), link.recv_bytes()
                try:
                    outcome: Outcome | None = self.inner.carry_out(self._work(*said))
                except Exception:
                    outcome = None
                _send_outcome(link, outcome)

    def _work(self, said: bytes, inbox: bytes, memory: bytes) -> Work:
        header = json.loads(said)
        schedule = Schedule(**header["schedule"]) if header["schedule"] else None
        task = replace(self.find(tuple(header["address"])), schedule=schedule)
        tiers = {tier.name: tier for tier in self.fleet.tiers}
        company = [
            Device(
                one["name"], one["tier"], tiers[one["tier"]].model, tiers[one["tier"]].footprint, tuple(one["gathers"])
            )
            for one in header["devices"]
        ]
        parcels = unpack(inbox, header["inbox"]), unpack(memory, header["memory"])
        number, repeat = header["round"], header["repeat"]
        plans = [self.inner.plan(task, device, number, repeat) for device in company]  # the same draws
        return Work(task, company, company, *parcels, number, repeat, plans)

    def _device(self, name: str, tier_name: str, gathers: list[str]) -> Device:
        (tier,) = [tier for tier in self.fleet.tiers if tier.name == tier_name]
        return Device(name, tier.name, tier.model, tier.footprint, tuple(gathers))


def _header(work: Work) -> dict[str, Any]:
    task = work.task
    return {
        "address": task.address or (task.name,),
        "schedule": asdict(task.schedule) if task.schedule else None,
        "devices": [{"name": d.name, "tier": d.tier, "gathers": d.gathers} for d in work.company],
        "inbox": list(work.inbox),
        "memory": list(work.memory),
        "round": work.round_number,
        "repeat": work.repeat,
    }


def _send_outcome(link: Connection, outcome: Outcome | None) -> None:
    parcels: Mapping[str, Parcel | None] = {"send": outcome.send, "remember": outcome.remember} if outcome else {}
    link.send_bytes(json.dumps({key: None if p is None else list(p) for key, p in parcels.items()}).encode())
    for parcel in parcels.values():
        if parcel is not None:
            link.send_bytes(pack(parcel))


def _receive_outcome(link: Connection) -> Outcome | None:
    header = json.loads(link.recv_bytes())
    if not header:
        return None
    parcels = {key: None if names is None else unpack(link.recv_bytes(), names) for key, names in header.items()}
    return Outcome(parcels["send"] or {}, parcels["remember"])


@lru_cache(maxsize=256)
def _macs(model: Model) -> int:
    return cost(model).macs


def keep_the_heap() -> None:
    """Have glibc keep freed memory instead of returning it at every step: a fifth off the time of wide nets."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD

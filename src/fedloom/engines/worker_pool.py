"""Simulate devices in several processes, one torch thread each: the same bits as in one, sooner.

Workers are forked once and see the data without a copy. Work goes out by descending cost; parcels travel as bytes of
safetensors. A worker that dies is replaced and its work done again; an error in a task is raised where the method is.
"""

import contextlib
import ctypes
import gc
import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..client import ClientResult, Task
from ..fleet import Fleet, Reply
from ..models import cost
from ..tensors import Parcel
from .blocks import Block, BlockMember, Parcels, Request, make_blocks, run_block
from .client_state import ClientStateStore
from .in_process import InProcess
from .serialization import Find, device_from_words, device_in_words, pack, task_from_words, task_in_words, unpack

TRIES = 3  # how often work may cost a worker its life before it is done by the one who asked


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Meanwhile; a child would be born with a collection under way."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@dataclass
class Worker:
    process: BaseProcess
    link: Connection
    at: Block | None = None


@dataclass(frozen=True)
class PoolClient:
    """An experiment whose work is done here: what a worker must know to do it."""

    engine: InProcess
    fleet: Fleet
    find: Find


@dataclass
class WorkerPool:
    """The worker processes, for one experiment or for several."""

    members: list[PoolClient]
    workers: int
    pool: list[Worker] = field(default_factory=list)

    def outcomes(self, make_blocks: list[Block]) -> Iterator[tuple[Block, ClientResult]]:
        """In the order they are done. Whoever asked for them sorts."""
        if len(make_blocks) == 1 or self.workers == 1:
            yield from ((work, run_block(work)) for work in make_blocks)
            return
        waiting, deaths = sorted(make_blocks, key=lambda work: -cost(work.model).macs * work.visits), Counter[int]()
        for worker in [worker for worker in self.pool if worker.at]:  # an ask that nobody heard to its end
            worker.process.kill()
            self._replace(worker)
        while len(self.pool) < self.workers:
            self.pool.append(self._spawn())
        while waiting or any(worker.at for worker in self.pool):
            for worker in self.pool:
                if worker.at is None and waiting:
                    self._hand(worker, waiting.pop(0))
            busy = {worker.link: worker for worker in self.pool if worker.at}
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
                yield work, outcome or run_block(work)

    def close(self) -> None:
        for worker in self.pool:
            worker.link.close()
        for worker in self.pool:
            worker.process.join(timeout=2)
            worker.process.kill()
        self.pool.clear()

    def _hand(self, worker: Worker, work: Block) -> None:
        worker.at = work
        with contextlib.suppress(OSError):  # a worker that is gone is noticed when its answer is read
            worker.link.send_bytes(json.dumps(self._header(work)).encode())
            worker.link.send_bytes(pack(work.inbox))
            worker.link.send_bytes(pack(work.memory))

    def _replace(self, worker: Worker) -> None:
        worker.link.close()
        worker.process.join(timeout=1)
        self.pool[self.pool.index(worker)] = self._spawn()

    def _spawn(self) -> Worker:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        others = [worker.link for worker in self.pool]
        process = fork.Process(target=self._serve, args=(theirs, [ours, *others]), daemon=True)
        with _nothing_collected():
            process.start()
        theirs.close()
        return Worker(process, ours)

    def _serve(self, link: Connection, others: list[Connection]) -> None:
        """A worker's life: until its pipe closes."""
        gc.freeze()  # what is garbage by now is its parent's: some of it waits for threads that are not here
        gc.enable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who asked decides when to stop
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in others:
            other.close()  # or a pipe would stay open after its owner has gone
        torch.set_num_threads(1)
        keep_the_heap()
        with contextlib.suppress(EOFError, OSError):
            while True:
                said = link.recv_bytes(), link.recv_bytes(), link.recv_bytes()
                try:
                    outcome: ClientResult | None = run_block(self._work(*said))
                except Exception:
                    outcome = None
                _send_outcome(link, outcome)

    def _header(self, work: Block) -> dict[str, Any]:
        engines = [member.engine for member in self.members]
        return {
            **task_in_words(work.task),
            "seats": [
                {
                    "member": next(number for number, one in enumerate(engines) if one is seat.request.engine),
                    "round": seat.request.round_number,
                    "repeat": seat.request.repeat,
                    **device_in_words(seat.device),
                }
                for seat in work.seats
            ],
            "inbox": list(work.inbox),
            "memory": list(work.memory),
        }

    def _work(self, said: bytes, inbox: bytes, memory: bytes) -> Block:
        header = json.loads(said)
        seats = [self._seat(one, header) for one in header["seats"]]
        return Block(seats, len(seats), unpack(inbox, header["inbox"]), unpack(memory, header["memory"]))

    def _seat(self, one: Mapping[str, Any], header: Mapping[str, Any]) -> BlockMember:
        member = self.members[one["member"]]
        task, device = task_from_words(header, member.find), device_from_words(one, member.fleet)
        request = Request(member.engine, task, {}, one["round"], one["repeat"])
        return BlockMember(
            request, device, member.engine.plan(task, device, one["round"], one["repeat"])
        )  # the same draws


@dataclass
class ProcessPool:
    """One experiment's engine with workers of its own."""

    inner: InProcess
    fleet: Fleet
    find: Find
    workers: int

    def __post_init__(self) -> None:
        self.crew = WorkerPool([PoolClient(self.inner, self.fleet, self.find)], self.workers)
        self.inner.carry = lambda request: self.crew.outcomes(make_blocks([request]))

    @property
    def memory(self) -> ClientStateStore:
        return self.inner.memory

    def ask(self, task: Task, inboxes: Parcels, round_number: int, repeat: int = 0) -> Iterator[Reply]:
        return self.inner.ask(task, inboxes, round_number, repeat)

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.crew.close()
        self.inner.close()


def _send_outcome(link: Connection, outcome: ClientResult | None) -> None:
    parcels: Mapping[str, Parcel | None] = {"send": outcome.upload, "remember": outcome.state} if outcome else {}
    link.send_bytes(json.dumps({key: None if p is None else list(p) for key, p in parcels.items()}).encode())
    for parcel in parcels.values():
        if parcel is not None:
            link.send_bytes(pack(parcel))


def _receive_outcome(link: Connection) -> ClientResult | None:
    header = json.loads(link.recv_bytes())
    if not header:
        return None
    parcels = {key: None if names is None else unpack(link.recv_bytes(), names) for key, names in header.items()}
    return ClientResult(parcels["send"] or {}, parcels["remember"])


def keep_the_heap() -> None:
    """Have glibc keep freed memory instead of returning it at every step: a fifth off the time of wide nets."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD

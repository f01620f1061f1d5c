"""Run blocks in several processes, one torch thread each: the same bits as in one process, sooner.

Workers are forked once and see the data without a copy. Blocks go out by descending cost, as safetensors.
A worker that dies is replaced and its block run again; an error in a task is raised where the method is.
"""

import contextlib
import ctypes
import gc
import json
import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from ..fleet import Request
from ..models import compute_cost
from ..tensors import Parcel, pack, unpack
from .in_process import Block, BlockMember, BlockResult, Job, WorkerContext, make_blocks, run_block
from .task_ref import device_from_json, device_to_json, task_from_json, task_to_json

logger = logging.getLogger(__name__)

TRIES = 3  # workers that may die over a block before it is run in this process


@dataclass
class Worker:
    process: BaseProcess
    link: Connection
    block: Block | None = None  # that it is running


@dataclass
class WorkerPool:
    """An executor with worker processes, for one experiment or for several.

    Parameters
    ----------
    workers : the number of processes.
    simulations : the experiments whose blocks they run.
    pool : the running processes.
    """

    workers: int
    simulations: list[WorkerContext] = field(default_factory=list)
    pool: list[Worker] = field(default_factory=list)
    _forks: bool | None = None

    def register(self, simulation: WorkerContext) -> None:
        """Make an experiment known; before its first job.

        Parameters
        ----------
        simulation : the experiment.
        """
        self.simulations.append(simulation)

    @property
    def processes(self) -> int:
        """How many processes there are: on accelerators one for each of them, since they would only share it."""
        computes = [simulation.engine.compute for simulation in self.simulations]
        if all(compute.is_cpu for compute in computes):
            return self.workers
        return max(len(compute.devices) or 1 for compute in computes)

    def run(self, job: Job) -> Iterator[tuple[Block, BlockResult]]:
        """Run the blocks of a job.

        Parameters
        ----------
        job : a request to the engine of an experiment.
        """
        return self.run_blocks(make_blocks([job]))

    def clock(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def run_blocks(
        self, blocks: list[Block], seconds: dict[Block, float] | None = None
    ) -> Iterator[tuple[Block, BlockResult]]:
        """Run blocks. Results come in any order; the caller sorts.

        Parameters
        ----------
        blocks : the blocks.
        seconds : is filled with the time that each of them takes.
        """
        took = {} if seconds is None else seconds
        on_cpu = all(block.members[0].job.engine.compute.is_cpu for block in blocks)
        # on an accelerator not even one block: a process that has used it cannot be forked any more
        if (len(blocks) == 1 and on_cpu) or self.processes == 1 or not self._can_fork():
            for here in blocks:
                started = time.perf_counter()
                made = run_block(here)
                took[here] = time.perf_counter() - started
                yield here, made
            return
        sent: dict[Block, float] = {}
        waiting = sorted(blocks, key=lambda block: -compute_cost(block.model).macs * block.visits)
        deaths = Counter[int]()
        for worker in [worker for worker in self.pool if worker.block]:  # left over from a request that was abandoned
            worker.process.kill()
            self._replace(worker)
        while len(self.pool) < self.processes:
            self.pool.append(self._spawn(len(self.pool)))
        while waiting or any(worker.block for worker in self.pool):
            self._hand_out(waiting, sent)
            busy = {worker.link: worker for worker in self.pool if worker.block}
            for link in wait(list(busy)):
                worker = busy[link]  # type: ignore[index]
                block = worker.block
                assert block is not None
                result, reason = None, "it died"
                try:
                    result, reason = _receive_result(worker.link)
                    worker.block = None
                except (EOFError, OSError):  # the worker was killed
                    self._replace(worker)
                    deaths[id(block)] += 1
                    if deaths[id(block)] < TRIES:
                        waiting.insert(0, block)
                        continue
                if result is None and not on_cpu:  # this process must not use the accelerator
                    raise RuntimeError(f"a worker failed: {reason}")
                self._hand_out(waiting, sent)  # no worker waits for what the caller does with a result
                # without a result the block runs again here, so that a task's error has its own traceback
                done = result or run_block(block)
                took[block] = time.perf_counter() - sent[block]
                yield block, done

    def close(self) -> None:
        for worker in self.pool:
            worker.link.close()
        for worker in self.pool:
            worker.process.join(timeout=2)
            worker.process.kill()
        self.pool.clear()

    def _hand_out(self, waiting: list[Block], sent: dict[Block, float]) -> None:
        """Give idle workers the next blocks."""
        for worker in self.pool:
            if worker.block is None and waiting:
                sent[waiting[0]] = time.perf_counter()
                self._send(worker, waiting.pop(0))

    def _send(self, worker: Worker, block: Block) -> None:
        worker.block = block
        with contextlib.suppress(OSError):  # a worker that is gone is noticed when its result is read
            worker.link.send_bytes(json.dumps(self._describe(block)).encode())
            worker.link.send_bytes(pack(block.inbox))
            worker.link.send_bytes(pack(block.state))

    def _replace(self, worker: Worker) -> None:
        worker.link.close()
        worker.process.join(timeout=1)
        place = self.pool.index(worker)
        self.pool[place] = self._spawn(place)

    def _can_fork(self) -> bool:
        """Whether forked processes can train. Where torch finds an accelerator, they cannot after this one has."""
        if self._forks is None:
            self._forks = _trains_when_forked()
            if not self._forks:
                logger.warning(
                    "torch finds an accelerator and has computed gradients, so worker processes cannot be forked: "
                    "everything runs in one process, with the same result"
                )
        return self._forks

    def _spawn(self, place: int) -> Worker:
        fork = multiprocessing.get_context("fork")
        ours, theirs = fork.Pipe()
        others = [worker.link for worker in self.pool]
        process = fork.Process(target=self._serve, args=(theirs, [ours, *others], place), daemon=True)
        with _no_garbage_collection():
            process.start()
        theirs.close()
        return Worker(process, ours)

    def _serve(self, link: Connection, others: list[Connection], place: int) -> None:
        """The worker's loop, until its pipe closes."""
        gc.freeze()  # garbage inherited from the parent may wait for threads that do not exist here
        gc.enable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in others:
            other.close()  # or a pipe would stay open after its owner has gone
        torch.set_num_threads(1)
        keep_freed_memory()
        for simulation in self.simulations:
            simulation.engine.compute = simulation.engine.compute.for_worker(place)
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = link.recv_bytes(), link.recv_bytes(), link.recv_bytes()
                try:
                    result = run_block(self._read_block(*message))
                except Exception:
                    link.send_bytes(json.dumps({"failed": traceback.format_exc()}).encode())
                else:
                    _send_result(link, result)

    def _describe(self, block: Block) -> dict[str, Any]:
        engines = [simulation.engine for simulation in self.simulations]
        return {
            **task_to_json(block.task),
            "members": [
                {
                    "simulation": next(i for i, engine in enumerate(engines) if engine is member.job.engine),
                    "round": member.job.request.round_number,
                    "repeat": member.job.request.repeat,
                    **device_to_json(member.device),
                }
                for member in block.members
            ],
            "inbox": list(block.inbox),
            "state": list(block.state),
        }

    def _read_block(self, description: bytes, inbox: bytes, state: bytes) -> Block:
        header = json.loads(description)
        members = [self._read_member(member, header) for member in header["members"]]
        return Block(members, len(members), unpack(inbox, header["inbox"]), unpack(state, header["state"]))

    def _read_member(self, member: Mapping[str, Any], header: Mapping[str, Any]) -> BlockMember:
        simulation = self.simulations[member["simulation"]]
        device = device_from_json(member, simulation.fleet)
        request = Request(task_from_json(header, simulation.find_task), {}, member["round"], member["repeat"])
        job = Job(simulation.engine, request)
        return BlockMember(job, device, simulation.engine.plan(request, device))  # the same draws as in the parent


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A child must not be forked in the middle of a collection."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _trains_when_forked() -> bool:
    """Try it: compute a gradient in a forked process."""
    process = multiprocessing.get_context("fork").Process(target=_train_once, daemon=True)
    process.start()
    process.join()
    return process.exitcode == 0


def _train_once() -> None:
    number = torch.zeros((), requires_grad=True)
    try:
        torch.autograd.grad(number * 2, number)
    except RuntimeError:
        os._exit(1)


def _send_result(link: Connection, result: BlockResult) -> None:
    parcels: Mapping[str, Parcel | None] = {"upload": result.upload, "state": result.state}
    bundles = {key: None if p is None else list(p) for key, p in parcels.items()}
    link.send_bytes(json.dumps({"bundles": bundles, "largest_part": result.largest_part}).encode())
    for parcel in parcels.values():
        if parcel is not None:
            link.send_bytes(pack(parcel))


def _receive_result(link: Connection) -> tuple[BlockResult | None, str]:
    """The result of a worker, or None and why there is none."""
    header = json.loads(link.recv_bytes())
    if "failed" in header:
        return None, header["failed"]
    bundles = header["bundles"].items()
    parcels = {key: None if names is None else unpack(link.recv_bytes(), names) for key, names in bundles}
    return BlockResult(parcels["upload"] or {}, parcels["state"], header["largest_part"]), ""


def keep_freed_memory() -> None:
    """Have glibc keep freed memory instead of returning it at every step: a fifth off the time of wide nets."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD

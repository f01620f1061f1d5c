"""Several experiments side by side: what they ask at the same time runs together, in shared blocks.

Each experiment has a thread, but only one thread runs at a time: an experiment goes on to its next request, then waits
until all have one. Requests of the earliest round run first, so an experiment that asks once a round waits for one that
asks twice, and both train the next round together. Neither the order of its events nor its bits depend on the others.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Semaphore, Thread, get_ident
from typing import Any, Generic, TypeVar

from .in_process import Block, BlockResult, Job, WorkerContext, make_blocks
from .worker_pool import WorkerPool

StepT = TypeVar("StepT")
Results = list[tuple[Block, BlockResult]]


class Cancelled(BaseException):
    """Another experiment has failed or the caller has stopped, so this one ends too."""


@dataclass
class Lockstep:
    """The executor of experiments that run side by side. It runs a job at once unless its experiment is in lockstep.

    The creator of the pool closes it; closing an experiment does not.

    Parameters
    ----------
    pool : the worker processes, which all experiments share.
    """

    pool: WorkerPool
    _threads: "dict[int, ExperimentThread[Any]]" = field(default_factory=dict)  # by identifier of the thread

    def register(self, simulation: WorkerContext) -> None:
        self.pool.register(simulation)

    def run(self, job: Job) -> Iterable[tuple[Block, BlockResult]]:
        thread = self._threads.get(get_ident())
        return thread.wait_for(job) if thread else self.pool.run(job)

    def clock(self) -> float:
        """Seconds of the calling experiment alone: its own thread's, and its share of blocks that ran together."""
        thread = self._threads.get(get_ident())
        return time.perf_counter() - (thread.waited if thread else 0.0)

    def close(self) -> None:
        pass

    def steps(self, experiments: Mapping[str, Iterable[StepT]]) -> Iterator[tuple[str, StepT]]:
        """The steps of several experiments, each with its name, as they are made.

        Parameters
        ----------
        experiments : the steps of each experiment, by name.
        """
        threads = {name: ExperimentThread(steps, self._threads) for name, steps in experiments.items()}
        try:
            while threads:
                for name, thread in threads.items():
                    for step in thread.steps_to_next_job():
                        yield name, step
                threads = {name: thread for name, thread in threads.items() if thread.job}
                self._run_together(_in_earliest_round(threads.values()))
        finally:
            for thread in threads.values():
                thread.cancel()

    def _run_together(self, threads: "list[ExperimentThread[StepT]]") -> None:
        results: Results = []
        failure = None
        started, seconds = time.perf_counter(), dict[Block, float]()
        try:
            results = list(self.pool.run_blocks(make_blocks([thread.job for thread in threads if thread.job]), seconds))
        except Exception as error:  # raised in every experiment, so that each can report it
            failure = error
        spent = time.perf_counter() - started
        for thread in threads:
            thread.own_seconds += spent * _share_of(thread.job, seconds)
            thread.job, thread.answer = None, failure or results


def _in_earliest_round(threads: "Iterable[ExperimentThread[StepT]]") -> "list[ExperimentThread[StepT]]":
    rounds = [(thread.job.request.round_number, thread) for thread in threads if thread.job]
    first = min((number for number, _ in rounds), default=0)
    return [thread for number, thread in rounds if number == first]


def _share_of(job: Job | None, seconds: Mapping[Block, float]) -> float:
    """The share of the blocks' time that one job took, a device counting the same as others of its block."""
    own = sum(
        took * sum(member.job is job for member in block.members) / len(block.members)
        for block, took in seconds.items()
    )
    return own / sum(seconds.values()) if seconds else 0.0


class ExperimentThread(Generic[StepT]):
    def __init__(self, steps: Iterable[StepT], registry: "dict[int, ExperimentThread[Any]]"):
        self.job: Job | None = None
        self.answer: Results | Exception = []
        self._steps, self._step, self._error = steps, list[StepT](), list[BaseException]()
        self._over = self._cancelled = False
        self.waited = 0.0  # seconds in which other experiments ran
        self.own_seconds = 0.0  # of this experiment, in blocks that ran while its thread waited
        self._go, self._halt = Semaphore(0), Semaphore(0)
        self._registry = registry
        Thread(target=self._run, daemon=True).start()

    def steps_to_next_job(self) -> Iterator[StepT]:
        while not self._over and self.job is None:
            self._advance()
            if self._error:
                raise self._error.pop()
            if self._step:
                yield self._step.pop()

    def wait_for(self, job: Job) -> Results:
        """Called in the experiment's own thread: pause until all jobs have run."""
        self.job = job
        self._pause()
        answer, self.answer = self.answer, []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self._cancelled = True
        while not self._over:
            self._advance()

    def _advance(self) -> None:
        """Let the experiment's thread run until it has a job, a step, or no more of either."""
        self._go.release()
        self._halt.acquire()

    def _pause(self) -> None:
        started = time.perf_counter()
        self._halt.release()
        self._go.acquire()
        self.waited += time.perf_counter() - started - self.own_seconds
        self.own_seconds = 0.0
        if self._cancelled:
            raise Cancelled

    def _run(self) -> None:
        self._registry[get_ident()] = self
        self._go.acquire()
        try:
            for step in () if self._cancelled else self._steps:
                self._step.append(step)
                self._pause()
        except Cancelled:
            pass
        except BaseException as error:
            self._error.append(error)
        finally:
            del self._registry[get_ident()]
            self._over = True
            self._halt.release()

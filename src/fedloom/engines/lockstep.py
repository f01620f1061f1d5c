"""Several experiments side by side: what they ask at the same time is carried out together, in common blocks.

Each experiment has a thread, but only one thread runs at a time: an experiment goes on to its next question, then waits
until all have one. To the experiments nothing shows, neither in their order of events nor in their bits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Semaphore, Thread
from typing import Generic, TypeVar

from ..client import ClientResult
from .blocks import Block, Request, make_blocks
from .in_process import InProcess

Step = TypeVar("Step")
Outcomes = Callable[[list[Block]], Iterable[tuple[Block, ClientResult]]]


class Cancelled(BaseException):
    """Another experiment has failed or somebody has had enough, so this one ends too."""


def lockstep(
    journeys: Mapping[str, tuple[InProcess, Iterable[Step]]], outcomes: Outcomes
) -> Iterator[tuple[str, Step]]:
    """The steps of several experiments, each under its name, as they are made."""
    strands = {name: ExperimentThread(engine, steps) for name, (engine, steps) in journeys.items()}
    try:
        while strands:
            for name, strand in strands.items():
                for step in strand.steps_to_next_question():
                    yield name, step
            strands = {name: strand for name, strand in strands.items() if strand.request}
            _answer(list(strands.values()), outcomes)
    finally:
        for strand in strands.values():
            strand.abandon()


def _answer(strands: "list[ExperimentThread[Step]]", outcomes: Outcomes) -> None:
    requests = [strand.request for strand in strands if strand.request]
    done: list[tuple[Block, ClientResult]] = []
    failure = None
    try:
        done = list(outcomes(make_blocks(requests)))
    except Exception as error:  # raised where it was asked for, so that each experiment can tell of it
        failure = error
    for strand in strands:
        strand.request, strand.answer = None, failure or done


class ExperimentThread(Generic[Step]):
    def __init__(self, engine: InProcess, steps: Iterable[Step]):
        engine.carry = self._carry
        self.request: Request | None = None
        self.answer: list[tuple[Block, ClientResult]] | Exception = []
        self._steps, self._step, self._error = steps, list[Step](), list[BaseException]()
        self._over = self._abandoned = False
        self._go, self._halt = Semaphore(0), Semaphore(0)
        Thread(target=self._run, daemon=True).start()

    def steps_to_next_question(self) -> Iterator[Step]:
        while not self._over and self.request is None:
            self._advance()
            if self._error:
                raise self._error.pop()
            if self._step:
                yield self._step.pop()

    def abandon(self) -> None:
        self._abandoned = True
        while not self._over:
            self._advance()

    def _advance(self) -> None:
        """Let the experiment's thread run until it has a question, a step, or no more of either."""
        self._go.release()
        self._halt.acquire()

    def _pause(self) -> None:
        self._halt.release()
        self._go.acquire()
        if self._abandoned:
            raise Cancelled

    def _carry(self, request: Request) -> list[tuple[Block, ClientResult]]:
        self.request = request
        self._pause()
        answer, self.answer = self.answer, []
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self) -> None:
        self._go.acquire()
        try:
            for step in () if self._abandoned else self._steps:
                self._step.append(step)
                self._pause()
        except Cancelled:
            pass
        except BaseException as error:
            self._error.append(error)
        finally:
            self._over = True
            self._halt.release()

"""The contract of every engine: the checks of `fedloom.testing` for devices in process, in workers and over Flower."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.engines import Gate, WorkerContext, WorkerPool
from fedloom.fleet import Engine, Reply, Request
from fedloom.methods import Method
from fedloom.tensors import combine
from fedloom.testing import ENGINE_CHECKS, CheckFailed, TinyWorld, check_engine


def in_process(world: TinyWorld, method: Method) -> Engine:
    return world.engine(method)


def worker_pool(world: TinyWorld, method: Method) -> Engine:
    pool = WorkerPool(2)
    engine = world.engine(method, executor=pool)
    pool.register(WorkerContext(engine, world.fleet, lambda ref: method.find(*ref)))
    return engine


@pytest.mark.parametrize("check", ENGINE_CHECKS)
@pytest.mark.parametrize("make_engine", [in_process, worker_pool])
def test_simulated_devices_pass(check: str, make_engine: object) -> None:
    assert ENGINE_CHECKS[check](make_engine) is None


@pytest.mark.parametrize("check", ENGINE_CHECKS)
def test_flower_passes(check: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    import fedloom.flower  # noqa: F401 - configures Flower before it is imported
    from tests.in_memory_grid import connect

    folders = (tmp_path / str(number) for number in range(10))
    ENGINE_CHECKS[check](lambda world, method: connect(world, method, next(folders), block=1))


def test_check_engine_reports_every_check() -> None:
    report = check_engine(in_process)
    assert report.passed == tuple(ENGINE_CHECKS)
    assert "in_process: 9 checks passed" in repr(report)


@dataclass
class Wrapped:
    """The in-process engine, to be spoiled."""

    inner: Any
    client_states: Any = None

    def __post_init__(self) -> None:
        self.client_states = self.inner.client_states

    def ask(self, request: Request) -> Iterable[Reply]:
        return list(self.inner.ask(request))

    def commit(self, round_number: int) -> None:
        self.inner.commit(round_number)

    def close(self) -> None:
        self.inner.close()


class AnswersForOthers(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        replies = list(self.inner.ask(request))
        stranger = [replace(one, device=replace(one.device, name="9")) for one in replies[:1]]
        return replies + stranger if len(request.inboxes) == 2 else replies


class AnswersTwice(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        replies = list(self.inner.ask(request))
        return replies + replies[:1]


class ShowsStates(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        return [replace(one, state={}) for one in self.inner.ask(request)]


class Rounds(Wrapped):
    """To half precision."""

    def ask(self, request: Request) -> Iterable[Reply]:
        for one in self.inner.ask(request):
            yield replace(one, upload={b: combine(_half, tensors) for b, tensors in one.upload.items()})


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half().float() if tensor.is_floating_point() else tensor


class LosesOne(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        return list(self.inner.ask(request))[1:]


class Forgets(Wrapped):
    def commit(self, round_number: int) -> None:
        self.client_states.rollback()


class CommitsAtOnce(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        replies = list(self.inner.ask(request))
        self.inner.commit(request.round_number)
        return replies


class IgnoresTransports(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        return list(self.inner.ask(replace(request, transports=())))


class StopsAtOnce(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        replies = list(self.inner.ask(request))
        return replies if request.min_replies is None else replies[:1]


class OnlyDevices(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        return [one for one in self.inner.ask(request) if not one.device.is_server]


class AlwaysRoundOne(Wrapped):
    def ask(self, request: Request) -> Iterable[Reply]:
        return list(self.inner.ask(replace(request, round_number=1)))


class ClosesOnce(Wrapped):
    def close(self) -> None:
        self.inner.executor.workers.pop()


class NoGate(Gate):
    def admits(self, request: Request, reply: Reply) -> bool:
        return True


def without_gate(world: TinyWorld, method: Method) -> Engine:
    return world.engine(method, gate=NoGate())


def wrapped(kind: Callable[[Any], Any]) -> Callable[[TinyWorld, Method], Engine]:
    return lambda world, method: kind(world.engine(method))


BROKEN: list[tuple[str, str, Any]] = [
    ("check_replies", "differs by up to", wrapped(Rounds)),
    ("check_replies", "replies of devices", wrapped(LosesOne)),
    ("check_asked_devices", "'9'", wrapped(AnswersForOthers)),
    ("check_asked_devices", "one reply each", wrapped(AnswersTwice)),
    ("check_asked_devices", "no device state", wrapped(ShowsStates)),
    ("check_states", "after commit", wrapped(Forgets)),
    ("check_states", "before commit", wrapped(CommitsAtOnce)),
    ("check_transports", "lossy transport", wrapped(IgnoresTransports)),
    ("check_gate", "without the refused reply", without_gate),
    ("check_waiting", "min_replies", wrapped(StopsAtOnce)),
    ("check_server_tasks", "the server's own result", wrapped(OnlyDevices)),
    ("check_rounds", "the bits of heterofl in process", wrapped(AlwaysRoundOne)),
    ("check_close", "AttributeError", wrapped(ClosesOnce)),
]


@pytest.mark.parametrize(("check", "message", "make"), BROKEN, ids=[f"{one[0]}-{n}" for n, one in enumerate(BROKEN)])
def test_broken_engine_fails_its_check(check: str, message: str, make: Any) -> None:
    with pytest.raises(CheckFailed) as failed:
        ENGINE_CHECKS[check](make)
    assert failed.value.check == check
    assert message in str(failed.value)
    assert failed.value.hint


def test_every_check_is_broken_by_an_engine() -> None:
    assert {check for check, *_ in BROKEN} == set(ENGINE_CHECKS)


def test_check_engine_names_first_failing_check() -> None:
    with pytest.raises(CheckFailed, match="check_asked_devices failed"):
        check_engine(wrapped(AnswersForOthers))

"""Time whole rounds of fedloom: draw the cohort, run the method's round, commit."""

import time
from collections.abc import Iterator

from fedloom.client import Constant, Schedule, Sgd, Task
from fedloom.data import Dataset, Partition
from fedloom.engines import ClientStateStore, InProcess, WorkerContext, WorkerPool, build_client_data
from fedloom.fleet import Engine, Fleet, RoundContext, draw_cohort
from fedloom.methods import Method
from fedloom.tensors import Parcel

BATCH = 10


def build_engine(method: Method, fleet: Fleet, dataset: Dataset, partition: Partition, workers: int) -> Engine:
    """An engine in one or several processes, with the SGD that all benchmarks use."""
    engine = InProcess(
        build_client_data(dataset, partition, fleet), ClientStateStore(lambda device: {}), Schedule(BATCH),
        Sgd(0.01, 0.9, 5e-4, 1.0), Constant(), seed=0, executor=WorkerPool(workers),
    )  # fmt: skip

    def find_task(ref: tuple[str, ...]) -> Task:
        task: Task = getattr(method, ref[-1])
        return task

    engine.executor.register(WorkerContext(engine, fleet, find_task))
    return engine


def time_rounds(
    method: Method, server: Parcel, fleet: Fleet, engine: Engine, active: int, count: int
) -> Iterator[tuple[float, Parcel]]:
    """Seconds of each round, and the server state after it."""
    for number in range(1, count + 1):
        start = time.perf_counter()
        context = RoundContext(number, draw_cohort(fleet, active / fleet.size, number), fleet, engine)
        server = method.round(server, context)
        engine.commit(number)
        assert context.traffic.replied == active
        yield time.perf_counter() - start, server

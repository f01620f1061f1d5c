"""One cell of a scaling table, in a process of its own: HeteroFL on MNIST's shape, some rounds of some devices."""

from typing import Any

import torch

from benchmarks import apart, memory
from benchmarks.rounds import BATCH, engine_for, timed_rounds
from benchmarks.scenarios import LEVELS, SHAPES, made_up, sized
from fedloom.data import Partition
from fedloom.engines import keep_the_heap
from fedloom.fleet import Fleet, make_nested_tiers
from fedloom.methods.heterofl import HeteroFL

STORE = 4000
"""Examples in the store, whatever the fleet's size; devices share them, so that what grows is the fleet itself."""


def measure(levels: str, fleet: int, active: int, steps: int, rounds: int, workers: int) -> dict[str, Any]:
    method, devices = HeteroFL(), _fleet(levels, fleet)
    engine = engine_for(method, devices, made_up(SHAPES["convnet"], STORE), _partition(fleet, steps * BATCH), workers)
    server = method.start(devices, 0)
    seconds = [took for took, _ in timed_rounds(method, server, devices, engine, active, rounds)]
    found = {"rounds": seconds, **memory.peaks()}
    engine.close()
    return found


def _fleet(levels: str, size: int) -> Fleet:
    models = [(level, sized("convnet", level, SHAPES["convnet"])) for level in levels]
    return Fleet(make_nested_tiers(models), (1 / len(levels),) * len(levels), size, seed=0, assignment="redrawn")


def _partition(devices: int, share: int) -> Partition:
    rows = torch.arange(share)
    train = tuple(((rows + device * share) % STORE).numpy() for device in range(devices))
    return Partition(train, (rows[:1].numpy() * 0,) * devices)


def main() -> None:
    torch.set_num_threads(1)
    keep_the_heap()
    work = apart.read()
    assert set(work["levels"]) <= set(LEVELS)
    apart.answer(measure(**work))


if __name__ == "__main__":
    main()

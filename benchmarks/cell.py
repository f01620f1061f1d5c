"""One cell of the scaling table, in its own process: some rounds of HeteroFL on MNIST's shape."""

from typing import Any

import torch

from benchmarks import isolated, memory
from benchmarks.rounds import BATCH, build_engine, time_rounds
from benchmarks.scenarios import LEVELS, SHAPES, build_scenario_model, random_dataset
from fedloom.data import Partition
from fedloom.engines import keep_freed_memory
from fedloom.fleet import Fleet, make_nested_tiers
from fedloom.methods.heterofl import HeteroFL

POOL = 4000
"""Number of examples for any fleet size: devices share them, so that only the fleet itself grows."""


def measure(levels: str, fleet: int, active: int, steps: int, rounds: int, workers: int) -> dict[str, Any]:
    method, devices = HeteroFL(), _fleet(levels, fleet)
    engine = build_engine(
        method, devices, random_dataset(SHAPES["convnet"], POOL), _partition(fleet, steps * BATCH), workers
    )
    server = method.start(devices, 0)
    seconds = [duration for duration, _ in time_rounds(method, server, devices, engine, active, rounds)]
    result = {"rounds": seconds, **memory.peak_memory()}
    engine.close()
    return result


def _fleet(levels: str, size: int) -> Fleet:
    models = [(level, build_scenario_model("convnet", level, SHAPES["convnet"])) for level in levels]
    return Fleet(make_nested_tiers(models), (1 / len(levels),) * len(levels), size, seed=0, assignment="redrawn")


def _partition(devices: int, share: int) -> Partition:
    rows = torch.arange(share)
    train = tuple(((rows + device * share) % POOL).numpy() for device in range(devices))
    return Partition(train, (rows[:1].numpy() * 0,) * devices)


def main() -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    task = isolated.read_input()
    assert set(task["levels"]) <= set(LEVELS)
    isolated.write_result(measure(**task))


if __name__ == "__main__":
    main()

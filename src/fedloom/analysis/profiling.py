"""Measure on this machine: training memory and speed of a model, its latency, the best block sizes, and the time of a
round."""

import re
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..client import Batch, Client, Optimizer, PaddedIndices, Step, dummy_loss, fit, gradient
from ..data import DataMissing, Dataset, Examples, Preparation
from ..engines.client_data import block_size
from ..fleet import Device, Fleet, Tier
from ..models import Model, StepSeeds, compute_cost
from ..placement import ON_CPU, Compute, enter
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..runs.build import assemble
from ..runs.data import DataSpec, read_data, read_data_spec
from ..runs.experiment import Experiment
from ..runs.loop import evaluate, rounds, single_thread
from ..seeds import PROFILING_DATA, generator
from ..tensors import Parcel, combine, join

PASSES = 3  # a training step counts as three forward passes' multiply-adds
SHORT, LONG, REPEATS = 2, 8, 3  # steps of the two timed trainings, and how often they are repeated
FEW, MORE = 2, 4  # examples in the two profiled batches
WARM_UPS, TIMED = 10, 100  # forward passes
BLOCK_SIZES = (1, 2, 4, 8, 16)
LARGE_BLOCKS = (32, 64, 128)  # on accelerators
FEW_BATCHES, MORE_BATCHES = 2, 6  # per device, in the two shortened runs
PAIR = 2  # the smallest block, unless devices run one by one
ROUNDS = 4  # of a shortened run; the first, which also finds out how models run best, is not timed

FloatArray = npt.NDArray[np.float64]


def training_memory(model: Model, batch_size: int, optimizer: Optimizer) -> int:
    """Peak bytes of all tensors in a training step: received and trained weights, gradients, optimizer state, a batch
    and saved activations. Torch's own memory is not included.

    Extrapolated from two small batches: the same tensors are allocated with any batch size, and the size of each is a
    linear function of it.
    """
    _train_dummy(model, FEW, optimizer, 1)  # the first run also chooses a batching mode, which is not to be recorded
    few, more = (_record_allocations(model, size, optimizer) for size in (FEW, MORE))
    if [sign for sign, _ in few] != [sign for sign, _ in more]:  # the model computes differently with more examples
        return round(_peak(_record_allocations(model, batch_size, optimizer)))
    share = (batch_size - FEW) / (MORE - FEW)
    pairs = zip(few, more, strict=True)
    return round(_peak([(sign, small + share * (large - small)) for (sign, small), (_, large) in pairs]))


def _peak(log: Sequence[tuple[int, float]]) -> float:
    current = peak = 0.0
    for sign, size in log:
        current += sign * size
        peak = max(peak, current)
    return peak


def _record_allocations(model: Model, batch_size: int, optimizer: Optimizer) -> list[tuple[int, int]]:
    """The allocations of a training step; local variables keep tensors alive as long as training does."""
    with _AllocationLog() as allocations:
        received = _zeros(model)
        batch = Batch(model.zero_inputs(1, batch_size), torch.zeros(1, batch_size), StepSeeds((0,)))
        trained = combine(torch.clone, received), optimizer.start(received)
        gradients = gradient(dummy_loss(model), trained[0], batch)
        copies = combine(torch.clone, gradients)  # for clipping and weight decay
        del copies
        return list(allocations.log)


class _AllocationLog(TorchDispatchMode):
    """Logs the bytes of tensor storages that are allocated (1, bytes) and freed (-1, bytes)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[int, int]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; with True torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.log.append((1, storage.nbytes()))
            weakref.finalize(storage, self.log.append, (-1, storage.nbytes()))


def training_speed(model: Model, batch_size: int, optimizer: Optimizer) -> float:
    """Multiply-adds per second of training steps on one thread of this machine, without the set-up before them."""
    _train_dummy(model, batch_size, optimizer, 1)
    differences = []
    with single_thread():
        for _ in range(REPEATS):
            start = time.perf_counter()
            _train_dummy(model, batch_size, optimizer, SHORT)
            between = time.perf_counter()
            _train_dummy(model, batch_size, optimizer, LONG)
            differences.append((time.perf_counter() - between) - (between - start))
    seconds = max(statistics.median(differences), 1e-9)
    return PASSES * compute_cost(model).macs * batch_size * (LONG - SHORT) / seconds


def _train_dummy(model: Model, batch_size: int, optimizer: Optimizer, steps: int) -> None:
    """Train one device on zeros."""
    examples = Examples(model.zero_inputs(batch_size), torch.zeros(batch_size, dtype=torch.int64))
    step = Step(torch.arange(batch_size)[None], torch.ones(1), {}, StepSeeds((0,)))
    no_tests = PaddedIndices(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    client = Client(
        model=model, optimizer=optimizer, examples=examples, tests=examples, test_indices=no_tests,
        preparation=Preparation(), plan=(step,) * steps,
        seen_labels=torch.ones(1, model.classes, dtype=torch.bool), state={},
    )  # fmt: skip
    fit(client, _zeros(model), dummy_loss(model))


def _zeros(model: Model) -> dict[str, Tensor]:
    return {name: torch.zeros(1, *shape) for name, shape in model.shapes().items()}


@lru_cache(maxsize=4096)
def latency_ms(net: Model) -> float:
    """Milliseconds for one example in the plain module on one thread of this machine: the median of TIMED runs."""
    module, example, times = net.module().eval(), net.zero_inputs(1), []
    with single_thread(), torch.inference_mode():
        for _ in range(WARM_UPS + TIMED):
            start = time.perf_counter()
            module(example)
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[WARM_UPS:])


@dataclass(frozen=True)
class BlockTiming:
    """Milliseconds per device and gradient for each block size, and the best block size."""

    tier: str
    milliseconds: dict[int, float]
    best: int


def calibrate_blocks(fleet: Fleet, batch_size: int, repeats: int = 5, compute: Compute = ON_CPU) -> list[BlockTiming]:
    """Measure how many devices of each tier to run as one network, on a torch device.

    The result is written to the recipe, so that results remain a pure function of the recipe.
    """
    return [_time_blocks(tier, batch_size, repeats, compute) for tier in fleet.tiers]


def _time_blocks(tier: Tier, batch_size: int, repeats: int, compute: Compute) -> BlockTiming:
    """Cycles through the sizes, so that other load on the machine affects all of them alike."""
    model = tier.model.computed(compute.precision, compute.compile)
    sizes = BLOCK_SIZES if compute.is_cpu else (*BLOCK_SIZES, *LARGE_BLOCKS)
    fitting = sizes[: sum(1 for _ in takewhile(lambda size: fits_memory(model, batch_size, size, compute), sizes))]
    times: dict[int, list[float]] = {size: [] for size in fitting}
    for _ in range(repeats):
        for size in fitting:
            times[size].append(1000 * gradient_seconds(model, batch_size, size, compute) / size)
    medians = {size: statistics.median(milliseconds) for size, milliseconds in times.items()}
    return BlockTiming(tier.name, medians, choose_block_size(times))


def choose_block_size(times: Mapping[int, Sequence[float]]) -> int:
    """The block size with the least median time; of sizes that are within noise of it, the smallest.

    The noise of a median is taken as the median distance of the measurements from it. Small blocks need less memory.
    """
    medians = {size: statistics.median(measured) for size, measured in times.items()}
    noise = {size: statistics.median(abs(one - medians[size]) for one in times[size]) for size in times}
    fastest = min(times, key=lambda size: (medians[size], size))
    return min(size for size in times if medians[size] <= medians[fastest] + noise[fastest] + noise[size])


def fits_memory(model: Model, batch_size: int, devices: int, compute: Compute) -> bool:
    """Whether the gradient of a block fits into memory; this also fills caches."""
    try:
        gradient_seconds(model, batch_size, devices, compute)
    except torch.OutOfMemoryError:
        compute.release_memory()
        return False
    return True


def gradient_seconds(model: Model, batch_size: int, devices: int, compute: Compute = ON_CPU) -> float:
    """Seconds for one gradient, which is most of a training step, on zeros."""
    weights = {name: weight.clone() for name, weight in join([{"w": model.initial_weights(0)}] * devices)["w"].items()}
    y = torch.zeros(devices, batch_size, dtype=torch.int64)
    batch = Batch(model.zero_inputs(devices, batch_size), y, StepSeeds((0,) * devices))
    with compute.active():
        weights, batch = enter((weights, batch), compute.torch_device)
        compute.synchronize()
        start = time.perf_counter()
        gradient(dummy_loss(model), weights, batch)
        compute.synchronize()
        return time.perf_counter() - start


def set_devices_per_block(text: str, timings: list[BlockTiming]) -> str:
    """The text of a recipe with the best block sizes set and everything else unchanged."""
    sizes = ", ".join(f"{timing.tier} = {timing.best}" for timing in timings)
    line = f"devices_per_block = {{ {sizes} }}"
    text = re.sub(r"^\[engine\.devices_per_block\]\s*\n(?:[^\[\n].*\n?)*\n*", "", text, flags=re.MULTILINE)
    if re.search(r"^devices_per_block\s*=.*$", text, re.MULTILINE):
        return re.sub(r"^devices_per_block\s*=.*$", line, text, flags=re.MULTILINE)
    if re.search(r"^\[engine\]\s*$", text, re.MULTILINE):
        return re.sub(r"^\[engine\]\s*$", f"[engine]\n{line}", text, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n[engine]\n{line}\n"


@dataclass(frozen=True)
class RoundTime:
    """Seconds of a round. Evaluation comes on top of training, in the rounds in which it is due."""

    training: float
    evaluation: float
    workers: int
    spent: float  # on the estimate
    synthetic_data: bool


def estimate_round_time(loaded: LoadedRecipe, registries: Registries, folder: Path, workers: int) -> RoundTime:
    """How long a round of the recipe takes on this machine, from runs in which every device has only a few batches."""
    start = time.perf_counter()
    dataset, is_synthetic = _read_or_generate(loaded, registries, folder)

    def shortened(batches: int, devices_per_block: int | None = None) -> Experiment:
        return assemble(_shorten(loaded, batches, devices_per_block), registries, folder, dataset, workers)

    experiment = assemble(loaded, registries, folder, dataset, workers)
    with single_thread(), closing(experiment.engine):
        training = _estimate_training(experiment, shortened)
        server = experiment.method.start(experiment.fleet, loaded.recipe.seed, experiment.warm)
        evaluation = _time_evaluation(experiment, server)
    return RoundTime(training, evaluation, workers, time.perf_counter() - start, is_synthetic)


def _estimate_training(experiment: Experiment, shortened: Callable[..., Experiment]) -> float:
    """Extrapolate from two shortened runs with a price per block step and a price per multiply-add.

    If devices hold different numbers of examples, blocks are smaller than in the shortened runs: then two more, with
    blocks of two devices, separate the prices.
    """
    few, more, work = shortened(FEW_BATCHES), shortened(MORE_BATCHES), _work_per_round(experiment)
    times, (start, end) = [_time_rounds(few), _time_rounds(more)], (_work_per_round(few), _work_per_round(more))
    if np.array_equal(start, end):  # no device has more than FEW_BATCHES batches
        return times[1]
    rises, loads = [times[1] - times[0]], [end - start]
    if not np.isclose(end[1] / end[0], work[1] / work[0], rtol=0.1):
        pairs = shortened(FEW_BATCHES, PAIR), shortened(MORE_BATCHES, PAIR)
        rises.append(_time_rounds(pairs[1]) - _time_rounds(pairs[0]))
        loads.append(_work_per_round(pairs[1]) - _work_per_round(pairs[0]))
    return times[1] + float(_solve_prices(np.array(loads), np.array(rises)) @ (work - end))


def _solve_prices(loads: FloatArray, rises: FloatArray) -> FloatArray:
    """Non-negative prices of a step and of a multiply-add; with one measurement only of the multiply-add."""
    if len(rises) == 2 and np.linalg.matrix_rank(loads) == 2:
        solution: FloatArray = np.linalg.solve(loads, rises).astype(np.float64)
        if (solution >= 0).all():
            return solution
        index = 0 if solution[1] < 0 else 1
    else:
        index = 1
    prices = np.zeros(2)
    prices[index] = max(0.0, float(loads[:, index] @ rises / (loads[:, index] @ loads[:, index])))
    return prices


def _time_rounds(experiment: Experiment) -> float:
    with closing(experiment.engine):
        return statistics.median([result.seconds - result.evaluation_seconds for result in rounds(experiment)][1:])


def _time_evaluation(experiment: Experiment, server: Parcel) -> float:
    times = []
    for number in (1, 2):
        start = time.perf_counter()
        evaluate(experiment, server, number, last=False)
        times.append(time.perf_counter() - start)
    return times[-1]


def _shorten(loaded: LoadedRecipe, batches: int, devices_per_block: int | None) -> LoadedRecipe:
    """The recipe with a few batches per device, one epoch, and hardly any evaluation."""
    document, recipe = loaded.recipe.document(), loaded.recipe
    examples = batches * recipe.training.batch_size
    data = {"max_examples": min(examples, recipe.data.max_examples or examples), "test_examples": 1}
    engine = {} if devices_per_block is None else {"devices_per_block": devices_per_block}
    return loaded.with_document(
        {
            **document,
            "rounds": ROUNDS,
            "data": {**document["data"], **data},
            "training": {**document["training"], "epochs": 1},
            "evaluation": {**document["evaluation"], "every": ROUNDS, "per_device": "never"},
            "engine": {**document["engine"], **engine},
        }
    )


def _work_per_round(experiment: Experiment) -> FloatArray:
    """Block steps and multiply-adds of an average round; devices of a block count with the steps of the longest."""
    recipe, steps, work, numbers = experiment.loaded.recipe, 0, 0, range(1, ROUNDS + 1)
    for number in numbers:
        for model, devices, length in _blocks(experiment, experiment.faults.cohort(number)):
            steps += length
            work += length * devices * compute_cost(model).macs * recipe.training.batch_size
    return np.array([steps, work]) * recipe.training.epochs / len(numbers)


def _blocks(experiment: Experiment, cohort: list[Device]) -> Iterator[tuple[Model, int, int]]:
    """The model, the number of devices and the steps of the longest epoch of each block."""
    recipe, rows = experiment.loaded.recipe, experiment.partition.train
    groups: defaultdict[tuple[str, int], list[tuple[int, Device]]] = defaultdict(list)
    for device in cohort:
        examples, batch_size = len(rows[int(device.name)]), recipe.training.batch_size
        has_partial_batches = recipe.training.last_batch == "keep"
        groups[device.tier, examples if has_partial_batches else 0].append((-(-examples // batch_size), device))
    for group in groups.values():
        group.sort(key=lambda item: -item[0])
        size = block_size(recipe.engine.devices_per_block, group[0][1])
        for start in range(0, len(group), size):
            block = group[start : start + size]
            yield block[0][1].model, max(len(block), min(size, PAIR)), block[0][0]


def _read_or_generate(loaded: LoadedRecipe, registries: Registries, folder: Path) -> tuple[Dataset, bool]:
    """The recipe's data, or noise of the same shape if its files are missing; and whether it is noise."""
    try:
        return read_data(loaded, registries, folder), False
    except DataMissing:
        return _generate_noise(read_data_spec(loaded, registries, folder)), True


def _generate_noise(data_spec: DataSpec) -> Dataset:
    labels, draw = data_spec.labels, generator(0, PROFILING_DATA)
    limit, dtype = (256, np.uint8) if data_spec.tokens is None else (data_spec.tokens, np.int64)
    train, test = (
        Examples(
            torch.from_numpy(draw.integers(0, limit, (len(y), *data_spec.stored_shape), dtype=dtype)),
            torch.from_numpy(y.copy()).to(data_spec.task.dtype),
        )
        for y in (labels.train, labels.test)
    )
    first, second = labels.groups or (None, None)
    groups = None if first is None or second is None else (torch.from_numpy(first), torch.from_numpy(second))
    return Dataset(
        "synthetic", train, test, labels.classes, data_spec.preparation, data_spec.tokens, groups, task=data_spec.task
    )

"""What it takes to train a model on one device: memory, found by steps in which nothing is computed, and time, taken of
steps that are.

How long a round of a recipe takes on this machine, from rounds that are cut short.

Two rounds of the recipe itself, in which every device has only a few batches: what the second takes more than the first
is the price of its further steps, the rest is there however many steps there are.

How many devices of each tier to run as one network, measured here; the recipe then says it, so results stay a pure
function of the recipe.

How long a model takes on this machine.
"""

import re
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
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
from ..models import Model, StepSeeds, cost
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..runs.build import Experiment, assemble
from ..runs.data import Outline, outline, read_data
from ..runs.loop import judged, one_thread, rounds
from ..seeds import PROFILING_DATA, generator
from ..tensors import Parcel, combine, join

PASSES = 3  # a step of training counts as so many passes' worth of multiply-adds
SHORT, LONG, REPEATS = 2, 8, 3  # steps, and how often they are timed
FEW, MORE = 2, 4  # examples in a batch


def training_memory(model: Model, batch_size: int, optimizer: Optimizer) -> int:
    """Bytes of all tensors at the worst moment: weights as they came and as they are trained, gradients, what the
    optimizer keeps, a batch, and what the way back needs of the way there. What torch itself takes is not in it.

    Seen in two small batches: the same tensors come and go with any batch, and the size of each is a straight line.
    """
    _train_dummy(model, FEW, optimizer, 1)  # how a model runs is tried once, which is not to be seen
    few, more = (_seen(model, batch, optimizer) for batch in (FEW, MORE))
    if [made for made, _ in few] != [made for made, _ in more]:  # does other things with more examples
        return round(_peak(_seen(model, batch_size, optimizer)))
    share = (batch_size - FEW) / (MORE - FEW)
    pairs = zip(few, more, strict=True)
    return round(_peak([(made, small + share * (large - small)) for (made, small), (_, large) in pairs]))


def _peak(log: Sequence[tuple[int, float]]) -> float:
    now = peak = 0.0
    for made, size in log:
        now += made * size
        peak = max(peak, now)
    return peak


def _seen(model: Model, batch_size: int, optimizer: Optimizer) -> list[tuple[int, int]]:
    with _Living() as living:
        came, batch = _zeros(model), Batch(model.zero_inputs(1, batch_size), torch.zeros(1, batch_size), StepSeeds((0,)))
        held = combine(torch.clone, came), optimizer.start(came)
        slope = gradient(dummy_loss(model), held[0], batch)
        copied = combine(torch.clone, slope)  # clipping and decay work on one
        del copied
        return list(living.log)


def training_speed(model: Model, batch_size: int, optimizer: Optimizer) -> float:
    """Multiply-adds a second on one thread of this machine: of steps alone, without what comes before the first."""
    _train_dummy(model, batch_size, optimizer, 1)
    taken = []
    with one_thread():
        for _ in range(REPEATS):
            began = time.perf_counter()
            _train_dummy(model, batch_size, optimizer, SHORT)
            between = time.perf_counter()
            _train_dummy(model, batch_size, optimizer, LONG)
            taken.append((time.perf_counter() - between) - (between - began))
    seconds = max(statistics.median(taken), 1e-9)
    return PASSES * cost(model).macs * batch_size * (LONG - SHORT) / seconds


def _train_dummy(model: Model, batch_size: int, optimizer: Optimizer, steps: int) -> None:
    """One device's training on made-up examples; nobody wants to know what becomes of it."""
    examples = Examples(model.zero_inputs(batch_size), torch.zeros(batch_size, dtype=torch.int64))
    step = Step(torch.arange(batch_size)[None], torch.ones(1), {}, StepSeeds((0,)))
    nothing = PaddedIndices(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    client = Client(
        model=model, optimizer=optimizer, examples=examples, tests=examples, test_indices=nothing,
        preparation=Preparation(), plan=(step,) * steps,
        seen_labels=torch.ones(1, model.classes, dtype=torch.bool), state={},
    )  # fmt: skip
    fit(client, _zeros(model), dummy_loss(model))


def _zeros(model: Model) -> dict[str, Tensor]:
    return {name: torch.zeros(1, *shape) for name, shape in model.shapes().items()}


class _Living(TorchDispatchMode):
    """Keeps a log of the memory of all tensors that come (1) and go (-1) while it looks, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[int, int]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and torch would import its compiler, for seconds, to be told so."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._note(one.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.log.append((1, storage.nbytes()))
            weakref.finalize(storage, self.log.append, (-1, storage.nbytes()))


FEW_BATCHES, MORE_BATCHES = 2, 6  # a device
PAIR = 2  # no block is smaller, unless devices run one by one
ROUNDS = 4  # of which the first, that also finds out how models run best, does not count


Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RoundTime:
    """Seconds. Judging comes on top of training, in the rounds in which it is due."""

    training: float
    judging: float
    workers: int
    spent: float  # on finding out
    synthetic_data: bool


def estimate_round_time(loaded: LoadedRecipe, registry: Registry, folder: Path, workers: int) -> RoundTime:
    began = time.perf_counter()
    dataset, made_up = _data(loaded, registry, folder)

    def cut(batches: int, block: int | None = None) -> Experiment:
        return assemble(_shortened(loaded, batches, block), registry, folder, dataset, workers)

    whole = assemble(loaded, registry, folder, dataset, workers)
    with one_thread(), closing(whole.engine):
        training = _training_seconds(whole, cut)
        start = whole.method.start(whole.fleet, loaded.recipe.seed, whole.warm)
        judging = _judging_seconds(whole, start)
    return RoundTime(training, judging, workers, time.perf_counter() - began, made_up)


def _training_seconds(whole: Experiment, cut: Callable[..., Experiment]) -> float:
    """A step costs a part that is there whoever shares it, and a part for each multiply-add. Where devices hold
    different numbers of examples fewer share a block than in rounds cut short: then pairs are timed too."""
    few, more, all_of_it = cut(FEW_BATCHES), cut(MORE_BATCHES), _load(whole)
    taken, (start, end) = [_seconds(few), _seconds(more)], (_load(few), _load(more))
    if np.array_equal(start, end):  # nobody has as many examples as that
        return taken[1]
    rises, loads = [taken[1] - taken[0]], [end - start]
    if not np.isclose(end[1] / end[0], all_of_it[1] / all_of_it[0], rtol=0.1):
        pairs = cut(FEW_BATCHES, PAIR), cut(MORE_BATCHES, PAIR)
        rises.append(_seconds(pairs[1]) - _seconds(pairs[0]))
        loads.append(_load(pairs[1]) - _load(pairs[0]))
    return taken[1] + float(_prices(np.array(loads), np.array(rises)) @ (all_of_it - end))


def _prices(loads: Numbers, rises: Numbers) -> Numbers:
    """Of a step and of a multiply-add, none below zero: exact where two were timed, else all is the multiply-adds'."""
    if len(rises) == 2 and np.linalg.matrix_rank(loads) == 2:
        found: Numbers = np.linalg.solve(loads, rises).astype(np.float64)
        if (found >= 0).all():
            return found
        only = 0 if found[1] < 0 else 1
    else:
        only = 1
    alone = np.zeros(2)
    alone[only] = max(0.0, float(loads[:, only] @ rises / (loads[:, only] @ loads[:, only])))
    return alone


def _seconds(experiment: Experiment) -> float:
    with closing(experiment.engine):
        return statistics.median([done.seconds - done.judging for done in rounds(experiment)][1:])


def _judging_seconds(experiment: Experiment, server: Parcel) -> float:
    taken = []
    for number in (1, 2):
        began = time.perf_counter()
        judged(experiment, server, number, last=False)
        taken.append(time.perf_counter() - began)
    return taken[-1]


def _shortened(loaded: LoadedRecipe, batches: int, block: int | None) -> LoadedRecipe:
    """The same recipe with so few examples a device, gone through once, and judged only at its end, on little."""
    document, recipe = loaded.recipe.document(), loaded.recipe
    most = batches * recipe.training.batch_size
    data = {"max_examples": min(most, recipe.data.max_examples or most), "test_examples": 1}
    engine = document["engine"] if block is None else {**document["engine"], "devices_per_block": block}
    return loaded.with_document(
        {
            **document,
            "rounds": ROUNDS,
            "data": {**document["data"], **data},
            "training": {**document["training"], "epochs": 1},
            "evaluation": {**document["evaluation"], "every": ROUNDS, "per_device": "never"},
            "engine": engine,
        }
    )


def _load(experiment: Experiment) -> Numbers:
    """Of an average round: steps of blocks, and multiply-adds, as if every device of a block had as many steps as the
    longest."""
    recipe, steps, work, counted = experiment.loaded.recipe, 0, 0, range(1, ROUNDS + 1)
    for number in counted:
        for model, devices, length in _blocks(experiment, experiment.faults.cohort(number)):
            steps += length
            work += length * devices * cost(model).macs * recipe.training.batch_size
    return np.array([steps, work]) * recipe.training.epochs / len(counted)


def _blocks(experiment: Experiment, cohort: list[Device]) -> Iterator[tuple[Model, int, int]]:
    """Of each block the model, how many sit in it, and how many steps its longest epoch has."""
    recipe, rows = experiment.loaded.recipe, experiment.partition.train
    alike: defaultdict[tuple[str, int], list[tuple[int, Device]]] = defaultdict(list)
    for device in cohort:
        examples, batch = len(rows[int(device.name)]), recipe.training.batch_size
        ragged = recipe.training.last_batch == "keep"
        alike[device.tier, examples if ragged else 0].append((-(-examples // batch), device))
    for (tier, _), group in alike.items():
        group.sort(key=lambda one: -one[0])
        size = block_size(recipe.engine.devices_per_block, group[0][1])
        for start in range(0, len(group), size):
            block = group[start : start + size]
            yield block[0][1].model, max(len(block), min(size, PAIR)), block[0][0]


def _data(loaded: LoadedRecipe, registry: Registry, folder: Path) -> tuple[Dataset, bool]:
    """The recipe's data; where its files are not here, noise of the same shape."""
    try:
        return read_data(loaded, registry, folder), False
    except DataMissing:
        return _noise(outline(loaded, registry, folder)), True


def _noise(seen: Outline) -> Dataset:
    """Data of the same shape and as much of it."""
    draw, kinds = generator(0, PROFILING_DATA), (256, np.uint8) if seen.tokens is None else (seen.tokens, np.int64)
    train, test = (
        Examples(
            torch.from_numpy(draw.integers(0, kinds[0], (len(labels), *seen.stored_shape), dtype=kinds[1])),
            torch.from_numpy(labels.copy()).long(),
        )
        for labels in (seen.labels.train, seen.labels.test)
    )
    first, second = seen.labels.groups or (None, None)
    groups = None if first is None or second is None else (torch.from_numpy(first), torch.from_numpy(second))
    return Dataset("made up", train, test, seen.labels.classes, seen.preparation, seen.tokens, groups)


SIZES = (1, 2, 4, 8, 16)
NO_GAIN = 0.95  # a larger block must save at least a twentieth, or the smaller one is taken


@dataclass(frozen=True)
class BlockTiming:
    """Milliseconds a device and gradient, by the number of devices at once, and the number to take."""

    tier: str
    milliseconds: dict[int, float]
    best: int


def calibrate_blocks(fleet: Fleet, batch_size: int, repeats: int = 5) -> list[BlockTiming]:
    return [_measure(tier, batch_size, repeats) for tier in fleet.tiers]


def _measure(tier: Tier, batch_size: int, repeats: int) -> BlockTiming:
    """Sizes in turn, again and again, so that a busy moment of the machine hits them alike."""
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for context in range(repeats + 1):
        for size in SIZES:
            spent = _gradient_time(tier.model, batch_size, size)
            if context:  # the first call builds what is kept
                times[size].append(1000 * spent / size)
    found = {size: statistics.median(spent) for size, spent in times.items()}
    best = SIZES[0]
    for size in SIZES[1:]:
        best = size if found[size] < NO_GAIN * found[best] else best
    return BlockTiming(tier.name, found, best)


def _gradient_time(model: Model, batch_size: int, devices: int) -> float:
    """Of one gradient, which is most of a step; what is in the batch does not matter."""
    weights = {name: weight.clone() for name, weight in join([{"w": model.initial_weights(0)}] * devices)["w"].items()}
    y = torch.zeros(devices, batch_size, dtype=torch.int64)
    batch = Batch(model.zero_inputs(devices, batch_size), y, StepSeeds((0,) * devices))
    began = time.perf_counter()
    gradient(dummy_loss(model), weights, batch)
    return time.perf_counter() - began


def set_devices_per_block(text: str, measured: list[BlockTiming]) -> str:
    """A recipe's text with the numbers in it, everything else left as it stands."""
    inside = ", ".join(f"{one.tier} = {one.best}" for one in measured)
    line = f"devices_per_block = {{ {inside} }}"
    if re.search(r"^devices_per_block\s*=.*$", text, re.MULTILINE):
        return re.sub(r"^devices_per_block\s*=.*$", line, text, flags=re.MULTILINE)
    if re.search(r"^\[engine\]\s*$", text, re.MULTILINE):
        return re.sub(r"^\[engine\]\s*$", f"[engine]\n{line}", text, flags=re.MULTILINE)
    return f"{text.rstrip()}\n\n[engine]\n{line}\n"


WARM_UPS, TIMED = 10, 100


@lru_cache(maxsize=4096)
def latency_ms(net: Model) -> float:
    """Of one example, in the plain module on one thread of this machine: the median of 100 runs after 10."""
    module, example, spent = net.module().eval(), net.zero_inputs(1), []
    with one_thread(), torch.inference_mode():
        for _ in range(WARM_UPS + TIMED):
            began = time.perf_counter()
            module(example)
            spent.append(1000 * (time.perf_counter() - began))
    return statistics.median(spent[WARM_UPS:])

"""How long a round of a recipe takes on this machine, from rounds that are cut short.

Two rounds of the recipe itself, in which every device has only a few batches: what the second takes more than the first
is the price of its further steps, the rest is there however many steps there are.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...data import DataMissing, Dataset, Examples
from ...engines.holdings import devices_at_once
from ...fleet import Device
from ...models import Model, cost
from ...seeds import PROFILING_DATA, generator
from ...tensors import Parcel
from ..assembly.assemble import Experiment, assemble
from ..assembly.sources import Outline, outline, read_data
from ..recipes.load import Loaded
from ..recipes.tables import Tables
from ..running.run import judged, one_thread, rounds

FEW, MORE = 2, 6  # batches a device
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
    made_up_data: bool


def round_time(loaded: Loaded, tables: Tables, folder: Path, workers: int) -> RoundTime:
    began = time.perf_counter()
    dataset, made_up = _data(loaded, tables, folder)

    def cut(batches: int, block: int | None = None) -> Experiment:
        return assemble(_shortened(loaded, batches, block), tables, folder, dataset, workers)

    whole = assemble(loaded, tables, folder, dataset, workers)
    with one_thread(), closing(whole.engine):
        training = _training_seconds(whole, cut)
        start = whole.method.start(whole.fleet, loaded.recipe.seed, whole.warm)
        judging = _judging_seconds(whole, start)
    return RoundTime(training, judging, workers, time.perf_counter() - began, made_up)


def _training_seconds(whole: Experiment, cut: Callable[..., Experiment]) -> float:
    """A step costs a part that is there whoever shares it, and a part for each multiply-add. Where devices hold
    different numbers of examples fewer share a block than in rounds cut short: then pairs are timed too."""
    few, more, all_of_it = cut(FEW), cut(MORE), _load(whole)
    taken, (start, end) = [_seconds(few), _seconds(more)], (_load(few), _load(more))
    if np.array_equal(start, end):  # nobody has as many examples as that
        return taken[1]
    rises, loads = [taken[1] - taken[0]], [end - start]
    if not np.isclose(end[1] / end[0], all_of_it[1] / all_of_it[0], rtol=0.1):
        pairs = cut(FEW, PAIR), cut(MORE, PAIR)
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


def _shortened(loaded: Loaded, batches: int, block: int | None) -> Loaded:
    """The same recipe with so few examples a device, gone through once, and judged only at its end, on little."""
    document, recipe = loaded.recipe.document(), loaded.recipe
    most = batches * recipe.training.batch_size
    data = {"most_examples": min(most, recipe.data.most_examples or most), "test_examples": 1}
    engine = document["engine"] if block is None else {**document["engine"], "block": block, "blocks": {}}
    return loaded.changed(
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
        size = recipe.engine.blocks.get(tier) or recipe.engine.block or devices_at_once(group[0][1].model)
        for start in range(0, len(group), size):
            block = group[start : start + size]
            yield block[0][1].model, max(len(block), min(size, PAIR)), block[0][0]


def _data(loaded: Loaded, tables: Tables, folder: Path) -> tuple[Dataset, bool]:
    """The recipe's data; where its files are not here, noise of the same shape."""
    try:
        return read_data(loaded, tables, folder), False
    except DataMissing:
        return _noise(outline(loaded, tables, folder)), True


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

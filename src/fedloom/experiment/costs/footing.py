"""What it takes to train a model on one device: memory, found by steps in which nothing is computed, and time, taken of
steps that are."""

import statistics
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...data import Examples, Preparation
from ...models import Draws, Model, cost
from ...tensors import combine
from ...training import Batch, Client, Holdings, Optimiser, Step, fit, gradient, towards_first_class
from ..running.run import one_thread

PASSES = 3  # a step of training counts as so many passes' worth of multiply-adds
SHORT, LONG, REPEATS = 2, 8, 3  # steps, and how often they are timed
FEW, MORE = 2, 4  # examples in a batch


def training_memory(model: Model, batch_size: int, optimiser: Optimiser) -> int:
    """Bytes of all tensors at the worst moment: weights as they came and as they are trained, gradients, what the
    optimiser keeps, a batch, and what the way back needs of the way there. What torch itself takes is not in it.

    Seen in two small batches: the same tensors come and go with any batch, and the size of each is a straight line.
    """
    trained(model, FEW, optimiser, 1)  # how a model runs is tried once, which is not to be seen
    few, more = (_seen(model, batch, optimiser) for batch in (FEW, MORE))
    if [made for made, _ in few] != [made for made, _ in more]:  # does other things with more examples
        return round(_peak(_seen(model, batch_size, optimiser)))
    share = (batch_size - FEW) / (MORE - FEW)
    pairs = zip(few, more, strict=True)
    return round(_peak([(made, small + share * (large - small)) for (made, small), (_, large) in pairs]))


def _peak(log: Sequence[tuple[int, float]]) -> float:
    now = peak = 0.0
    for made, size in log:
        now += made * size
        peak = max(peak, now)
    return peak


def _seen(model: Model, batch_size: int, optimiser: Optimiser) -> list[tuple[int, int]]:
    with _Living() as living:
        came, batch = _zeros(model), Batch(model.blank(1, batch_size), torch.zeros(1, batch_size), Draws((0,)))
        held = combine(torch.clone, came), optimiser.start(came)
        slope = gradient(towards_first_class(model), held[0], batch)
        copied = combine(torch.clone, slope)  # clipping and decay work on one
        del copied
        return list(living.log)


def training_speed(model: Model, batch_size: int, optimiser: Optimiser) -> float:
    """Multiply-adds a second on one thread of this machine: of steps alone, without what comes before the first."""
    trained(model, batch_size, optimiser, 1)
    taken = []
    with one_thread():
        for _ in range(REPEATS):
            began = time.perf_counter()
            trained(model, batch_size, optimiser, SHORT)
            between = time.perf_counter()
            trained(model, batch_size, optimiser, LONG)
            taken.append((time.perf_counter() - between) - (between - began))
    seconds = max(statistics.median(taken), 1e-9)
    return PASSES * cost(model).macs * batch_size * (LONG - SHORT) / seconds


def trained(model: Model, batch_size: int, optimiser: Optimiser, steps: int) -> None:
    """One device's training on made-up examples; nobody wants to know what becomes of it."""
    examples = Examples(model.blank(batch_size), torch.zeros(batch_size, dtype=torch.int64))
    step = Step(torch.arange(batch_size)[None], torch.ones(1), {}, Draws((0,)))
    nothing = Holdings(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool))
    client = Client(
        model=model, optimiser=optimiser, examples=examples, tests=examples, test_holdings=nothing,
        preparation=Preparation(), plan=(step,) * steps,
        seen_labels=torch.ones(1, model.classes, dtype=torch.bool), memory={},
    )  # fmt: skip
    fit(client, _zeros(model), towards_first_class(model))


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

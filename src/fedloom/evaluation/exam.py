"""The test set put to a model that the server holds: a task like any other, so that whoever has time does it."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..models import Model
from ..tensors import Parcel
from ..training import Client, Layout, Outcome, on_device


@lru_cache(maxsize=4096)
def exit_names(model: Model) -> tuple[str, ...]:
    """From shallow to deep."""
    weights = {**model.initial(0), **{name: torch.ones(shape) for name, shape in model.statistics().items()}}
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    with torch.no_grad():
        return tuple(model(block, torch.zeros(1, 2, *model.input_shape)).exits)


def last_exit(model: Model) -> str:
    return exit_names(model)[-1]


def answers(model: Model, inbox: Parcel, examples: int) -> Layout:
    """One row of logits for each question, from every exit."""
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: ((len(inbox["order"]["rows"]), model.classes), dtype) for name in exit_names(model)}


@dataclass(frozen=True)
class Exam:
    """In large batches of the test set, in the order of the inbox."""

    batch_size: int

    @on_device(sends={"exits": answers}, mixes=False)
    @torch.inference_mode()
    def answer(self, client: Client, inbox: Parcel) -> Outcome:
        made: dict[str, list[Tensor]] = {name: [] for name in exit_names(client.model)}
        for rows in inbox["order"]["rows"][0].split(self.batch_size):
            x = client.preparation(client.tests.x[rows]).unsqueeze(0)
            for name, logits in client.model(inbox["weights"], x).exits.items():
                made[name].append(logits)
        return Outcome(send={"exits": {name: torch.cat(parts, 1) for name, parts in made.items()}})

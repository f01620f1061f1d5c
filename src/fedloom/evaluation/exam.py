"""The test set put to a model that the server holds: a task like any other, so that whoever has time does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..models import Model
from ..tensors import Parcel
from ..training import Client, Layout, Outcome, on_device
from .positions import scored


@lru_cache(maxsize=4096)
def exit_names(model: Model) -> tuple[str, ...]:
    """From shallow to deep."""
    weights = {**model.initial(0), **{name: torch.ones(shape) for name, shape in model.statistics().items()}}
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    with torch.no_grad():
        return tuple(model(block, model.blank(1, 2)).exits)


def last_exit(model: Model) -> str:
    return exit_names(model)[-1]


def answers(model: Model, inbox: Parcel, examples: int) -> Layout:
    """One row of logits for each question, from every exit."""
    dtype = next(iter(inbox["weights"].values())).dtype
    return {name: ((len(inbox["order"]["rows"]), model.classes), dtype) for name in exit_names(model)}


def scores(model: Model, inbox: Parcel, examples: int) -> Layout:
    """For each question and position of the last exit, the loss and whether the answer is right."""
    shape = tuple(inbox["order"]["labels"].shape)
    return {"loss": (shape, torch.get_default_dtype()), "right": (shape, torch.bool)}


def batch_lengths(groups: Sequence[int], size: int) -> Tensor:
    """Of batches that hold at most `size` questions, and of one group each."""
    lengths = [min(size, group - start) for group in groups for start in range(0, group, size)]
    return torch.tensor(lengths, dtype=torch.int64)


@dataclass(frozen=True)
class Exam:
    """In large batches of the test set, in the order of the inbox."""

    batch_size: int

    @on_device(sends={"scores": scores}, mixes=False)
    @torch.inference_mode()
    def score(self, client: Client, inbox: Parcel) -> Outcome:
        """Where every position of an example is a question of its own: logits of all of them would fill the memory."""
        made: dict[str, list[Tensor]] = {"loss": [], "right": []}
        for rows in inbox["order"]["rows"][0].split(self.batch_size):
            x, y = client.preparation(client.tests.x[rows]).unsqueeze(0), client.tests.y[rows]
            losses, right = scored(client.model(inbox["weights"], x).logits[0], y)
            made["loss"].append(losses)
            made["right"].append(right)
        return Outcome(send={"scores": {name: torch.cat(parts).unsqueeze(0) for name, parts in made.items()}})

    @on_device(sends={"exits": answers}, mixes=False)
    @torch.inference_mode()
    def answer(self, client: Client, inbox: Parcel) -> Outcome:
        """Which questions make a batch is in the inbox too: some models look at the whole of it."""
        made: dict[str, list[Tensor]] = {name: [] for name in exit_names(client.model)}
        rows_of_all, lengths = (inbox["order"][name][0] for name in ("rows", "lengths"))
        for rows in rows_of_all.split(lengths.tolist()):
            x = client.preparation(client.tests.x[rows]).unsqueeze(0)
            for name, logits in client.model(inbox["weights"], x).exits.items():
                made[name].append(logits)
        return Outcome(send={"exits": {name: torch.cat(parts, 1) for name, parts in made.items()}})

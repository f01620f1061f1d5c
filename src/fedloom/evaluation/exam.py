"""The test set put to a model that the server holds: a task like any other, so that whoever has time does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..models import Model
from ..seeds import PREDICT, SCORE
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
    """In large batches of the test set, in the order of the inbox. Room for all answers is taken first: small results
    kept between large ones that come and go would pin the heap, which then grows by a batch's activations each time."""

    batch_size: int

    @on_device(sends={"scores": scores}, stream=SCORE, mixes=False)
    @torch.inference_mode()
    def score(self, client: Client, inbox: Parcel) -> Outcome:
        """Where every position of an example is a question of its own: logits of all of them would fill the memory."""
        order, labels = inbox["order"]["rows"][0], inbox["order"]["labels"]
        kinds = {"loss": torch.get_default_dtype(), "right": torch.bool}
        made = {name: torch.empty_like(labels, dtype=kind) for name, kind in kinds.items()}
        for number, rows in enumerate(order.split(self.batch_size)):
            x, y = client.preparation(client.tests.x[rows]).unsqueeze(0), client.tests.y[rows]
            here = slice(number * self.batch_size, number * self.batch_size + len(rows))
            made["loss"][0, here], made["right"][0, here] = scored(client.model(inbox["weights"], x).logits[0], y)
        return Outcome(send={"scores": made})

    @on_device(sends={"exits": answers}, stream=PREDICT, mixes=False)
    @torch.inference_mode()
    def answer(self, client: Client, inbox: Parcel) -> Outcome:
        """Which questions make a batch is in the inbox too: some models look at the whole of it."""
        order, lengths = (inbox["order"][name][0] for name in ("rows", "lengths"))
        weights, room = inbox["weights"], (1, len(order), client.model.classes)
        like = next(iter(weights.values()))
        made = {name: like.new_empty(room) for name in exit_names(client.model)}
        start = 0
        for rows in order.split(lengths.tolist()):
            x = client.preparation(client.tests.x[rows]).unsqueeze(0)
            for name, logits in client.model(weights, x).exits.items():
                made[name][:, start : start + len(rows)] = logits
            start += len(rows)
        return Outcome(send={"exits": made})

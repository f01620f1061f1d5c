"""FedIN. Chan, Jiang, Deng & Ngai, Federated Intermediate Layers Learning, 2023, Algorithm 1.

All devices share an extractor and a classifier; what lies between is each one's own. Devices send what enters and what
leaves their middle, and each also learns to make the same of others' features, as far as its own labels allow.

Feature pairs, what enters a net's middle and what leaves it: made on a device, kept and dealt out by the server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, Layout, fit, gradient, label_loss, like, on_device, own_statistics
from ..fleet import Fleet, Reply, RoundContext
from ..models import Model, cost
from ..seeds import FEATURE_PAIRS, generator
from ..settings import Count, NotNegative
from ..tensors import Parcel, Tensors, combine, inner, per_device
from ._net_parts import parts_problem, run_part
from ._partial_sharing import Sharing, parted

PARTS = ("extractor", "intermediate", "classifier")
AT_ONCE = 64  # examples, so that memory does not grow with the number of pairs


def pair_layout(model: Model, count: int) -> Layout:
    shapes = {"enter": model.submodel("intermediate").input_shape, "leave": model.submodel("classifier").input_shape}
    return {name: ((count, *shape), torch.get_default_dtype()) for name, shape in shapes.items()}


@torch.no_grad()
def collected(client: Client, weights: Tensors, count: int) -> dict[str, Tensor]:
    """Of so many examples of each device, drawn at random: as the net is judged, unaugmented."""
    if not count:
        devices = len(client.seen_labels)
        empty = pair_layout(client.model, 0)
        return {name: torch.zeros(devices, *shape, dtype=dtype) for name, (shape, dtype) in empty.items()}
    ready, made = own_statistics(client, weights), list[tuple[Tensor, Tensor]]()
    for rows in _drawn(client, count).split(AT_ONCE, 1):
        enter = run_part(client.model, "extractor", ready, client.preparation(client.examples.x[rows]))
        made.append((enter, run_part(client.model, "intermediate", ready, enter)))
    return {name: torch.cat(parts, 1) for name, parts in zip(("enter", "leave"), zip(*made, strict=True), strict=True)}


def _drawn(client: Client, count: int) -> Tensor:
    """[K, count]: rows out of all that a device holds, whatever its plan visits of them."""
    assert client.holdings is not None
    held = [rows[real] for rows, real in zip(client.holdings.rows, client.holdings.real, strict=True)]
    step_seeds = (generator(seed, FEATURE_PAIRS) for seed in client.plan[0].step_seeds.per_device)
    return torch.stack([own[draw.permutation(len(own))[:count]] for own, draw in zip(held, step_seeds, strict=True)])


def features_loss(client: Client, pairs: Tensors) -> Callable[[Tensors, Batch], Tensor]:
    """[K]: how far a device's middle is from making of others' features what theirs made of them, pairs in turn."""
    middle = client.model.submodel("intermediate")

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        rows = batch.cyclic_rows(batch.y.shape[1], pairs["enter"].shape[1])
        own = client.model.submodel_weights("intermediate", weights)
        made = middle(own, pairs["enter"][:, rows], batch.step_seeds).logits
        return (made - pairs["leave"][:, rows]).square().flatten(1).mean(1)

    return loss


def projected(own: Tensors, other: Tensors) -> Tensors:
    """`other`, less the part of it that points against `own`."""
    size = inner(own, own)
    against = torch.where(size > 0, inner(own, other).clamp_max(0) / size.clamp_min(torch.finfo(size.dtype).tiny), 0)
    return combine(lambda mine, theirs: theirs - per_device(against, mine) * mine, own, other)


def no_pairs(model: Model) -> dict[str, Tensor]:
    """A buffer with nothing in it yet."""
    empty = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in pair_layout(model, 0).items()}
    return {**empty, "round": torch.zeros(0, dtype=torch.int64)}


def refilled(
    buffer: Tensors, replies: Sequence[Reply], round_number: int, most: int, max_age: int
) -> dict[str, Tensor]:
    """First in, first out; what is too old to be dealt out next time goes too. Of devices that together send more than
    there is room for, each loses its share. Where nobody sent anything, nothing changes."""
    if not replies:
        return dict(buffer)
    sent = sum(len(reply.sent["pairs"]["enter"]) for reply in replies)
    room = sent if sent <= most else -(-most // len(replies))
    new = {name: torch.cat([reply.sent["pairs"][name][:room] for reply in replies]) for name in ("enter", "leave")}
    new["round"] = torch.full((len(new["enter"]),), round_number)
    young = buffer["round"] > round_number - max_age
    return {name: torch.cat([old[young], new[name]])[-most:].clone() for name, old in buffer.items()}


def dealt(buffer: Tensors, count: int, since: int, draw: np.random.Generator) -> Parcel:
    """Some of the pairs made since a round, for everybody; nothing, before the first have come in."""
    young = torch.nonzero(buffer["round"] >= since).squeeze(1)
    rows = young[torch.from_numpy(draw.permutation(len(young))[:count])]
    return {"pairs": {name: buffer[name][rows] for name in ("enter", "leave")}} if len(rows) else {}


@dataclass(frozen=True)
class FedIN(Sharing):
    """`middle` learns by the sum of the labels' gradient, `local` (the paper's lambda) halves of it, and the features'
    (Eq. 16); by the features' projected onto what does not harm the labels (Eq. 15), tensor by tensor or in all; by one
    update after the other; or from labels alone. A device sends `pairs` of its examples, or "all". The server keeps
    `buffer` of them, none older than `max_age` rounds, and deals out `batch`. `aggregation`: of the ends."""

    paper = "Chan et al., 2023"
    leaves = "weights of both ends, features of its examples (near-raw: see fedloom audit)"
    keeps, gives, admits, ships = "its middle layers", "personalized", "any models", "extractor"

    middle: Literal["sum", "project", "project_all", "sequential", "none"] = "sum"
    local: NotNegative = 2.0
    aggregation: bool = True
    pairs: Count | Literal["all"] = 128
    buffer: Count = 5000
    max_age: Count = 1
    batch: Count = 512

    @property
    def shared(self) -> tuple[str, ...]:
        return ("extractor", "classifier") if self.aggregation else ()

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {**super().start(fleet, seed, warm), "pairs": no_pairs(fleet.global_model)}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        others = dealt(server["pairs"], self.batch, context.number - self.max_age, context.draw(FEATURE_PAIRS))
        replies = context.ask(
            self.train, {device: {**self.inbox(server, device), **others} for device in context.cohort}
        )
        kept = refilled(server["pairs"], replies, context.number, self.buffer, self.max_age)
        return {"weights": self.averaged(server, context, replies, by_examples=False), "pairs": kept}

    @on_device(sends={"weights": like("weights"), "pairs": "sent_pairs"}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        labels = label_loss(client)

        def from_features(weights: Tensors, batch: Batch) -> Tensors:
            middle = {name: weight for name, weight in weights.items() if name.startswith("intermediate.")}
            return gradient(features_loss(client, inbox["pairs"]), middle, batch, all_weights=weights)

        def from_both(weights: Tensors, batch: Batch) -> Tensors:
            own, other = gradient(labels, weights, batch), from_features(weights, batch)
            return {**own, **self.agreed({name: own[name] for name in other}, other)}

        updates = (labels, from_features) if self.middle == "sequential" else (from_both,)
        weights = fit(client, self.whole(client, inbox), *(updates if "pairs" in inbox else (labels,)))
        shared, private = parted(weights, inbox)
        sent = {"weights": shared, "pairs": collected(client, weights, self._count(client.held))}
        return ClientResult(upload=sent, state={"weights": private})

    def agreed(self, own: Tensors, other: Tensors) -> Tensors:
        """The step that learns from features as far as the labels agree."""
        if self.middle == "sum":
            return combine(lambda mine, theirs: theirs + self.local / 2 * mine, own, other)
        if self.middle == "project":
            return {name: projected({name: own[name]}, {name: other[name]})[name] for name in own}
        return projected(own, other)

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        both = 3.0 * cost(model.submodel("intermediate")).macs * examples if self.middle != "none" else 0.0
        return super().device_macs(model, examples, steps) + both

    def sent_pairs(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return pair_layout(model, self._count(examples))

    def _count(self, examples: int) -> int:
        return 0 if self.middle == "none" else examples if self.pairs == "all" else min(self.pairs, examples)

    def check_fleet(self, fleet: Fleet) -> str | None:
        return parts_problem("fedin", fleet, PARTS, ends=self.shared) or super().check_fleet(fleet)

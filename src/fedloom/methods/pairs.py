"""Feature pairs, what enters a net's middle and what leaves it: made on a device, kept and dealt out by the server."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..fleet import Fleet, Reply
from ..models import Model
from ..seeds import FEATURE_PAIRS, generator
from ..tensors import Parcel, Tensors, beside, combine, inner
from ..training import Batch, Client, Layout, own_statistics

PARTS = ("extractor", "intermediate", "classifier")
AT_ONCE = 64  # examples, so that memory does not grow with the number of pairs


def pair_layout(model: Model, count: int) -> Layout:
    shapes = {"enter": model.part("intermediate").input_shape, "leave": model.part("classifier").input_shape}
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
    draws = (generator(seed, FEATURE_PAIRS) for seed in client.plan[0].draws.seeds)
    return torch.stack([own[draw.permutation(len(own))[:count]] for own, draw in zip(held, draws, strict=True)])


def run_part(model: Model, part: str, weights: Tensors, x: Tensor) -> Tensor:
    """One part of a net, as it is judged."""
    return model.part(part)(model.part_weights(part, weights), x).logits


def features_loss(client: Client, pairs: Tensors) -> Callable[[Tensors, Batch], Tensor]:
    """[K]: how far a device's middle is from making of others' features what theirs made of them, pairs in turn."""
    middle = client.model.part("intermediate")

    def loss(weights: Tensors, batch: Batch) -> Tensor:
        rows = batch.turn_of(batch.y.shape[1], pairs["enter"].shape[1])
        own = client.model.part_weights("intermediate", weights)
        made = middle(own, pairs["enter"][:, rows], batch.draws).logits
        return (made - pairs["leave"][:, rows]).square().flatten(1).mean(1)

    return loss


def projected(own: Tensors, other: Tensors) -> Tensors:
    """`other`, less the part of it that points against `own`."""
    size = inner(own, own)
    against = torch.where(size > 0, inner(own, other).clamp_max(0) / size.clamp_min(torch.finfo(size.dtype).tiny), 0)
    return combine(lambda mine, theirs: theirs - beside(against, mine) * mine, own, other)


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


@lru_cache(maxsize=1024)
def feature_shape(model: Model) -> tuple[int, ...]:
    """What leaves the extractor for one example."""
    part = model.part("extractor")
    with torch.no_grad():
        return tuple(part.module().eval()(part.blank(2)).shape[1:])


def parts_problem(method: str, fleet: Fleet, parts: Sequence[str], ends: Sequence[str] = ()) -> str | None:
    """Why nets cannot be taken apart, or what they pass on is not of one shape."""
    for tier in fleet.served:
        if not tier.model.has_parts(*parts):
            said = ", ".join(parts)
            return f"{method} needs nets with children named {said}; {tier.model.family} has others (try splitnet)"
        try:
            own, first = (_passed_on(one.model, parts) for one in (tier, fleet.served[0]))
        except ValueError as reason:  # a part that is not run once
            return f"{method} cannot take {tier.model.family} apart: {reason}"
        if own != first:
            return f"{method} needs features of one shape; those of tier {tier.name!r} are {own}, others' {first}"
    return _ends_problem(method, fleet, ends)


def _ends_problem(method: str, fleet: Fleet, ends: Sequence[str]) -> str | None:
    """Why the ends that all share are not the same in every tier."""
    whole = fleet.whole.shapes()
    for tier in fleet.served:
        shapes = tier.model.shapes()
        for name in {*shapes, *whole}:
            if name.split(".")[0] in ends and shapes.get(name) != whole.get(name):
                return f"{method} needs the same ends everywhere; {name} of tier {tier.name!r} is not as the others'"
    return None


def _passed_on(model: Model, parts: Sequence[str]) -> list[tuple[int, ...]]:
    return [feature_shape(model), *(model.part(name).input_shape for name in parts[1:])]

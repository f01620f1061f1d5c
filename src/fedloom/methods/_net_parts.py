"""Nets that are run part by part, as FedIN and FedGKT do: extractor, middle and classifier."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..fleet import Fleet
from ..models import Model
from ..tensors import Tensors


def run_part(model: Model, part: str, weights: Tensors, x: Tensor) -> Tensor:
    """One part of a net, as it is judged."""
    return model.submodel(part)(model.submodel_weights(part, weights), x).logits


@lru_cache(maxsize=1024)
def feature_shape(model: Model) -> tuple[int, ...]:
    """What leaves the extractor for one example."""
    part = model.submodel("extractor")
    with torch.no_grad():
        return tuple(part.module().eval()(part.zero_inputs(2)).shape[1:])


def parts_problem(method: str, fleet: Fleet, parts: Sequence[str], ends: Sequence[str] = ()) -> str | None:
    """Why nets cannot be taken apart, or what they pass on is not of one shape."""
    for tier in fleet.active_tiers:
        if not tier.model.has_children(*parts):
            said = ", ".join(parts)
            return f"{method} needs nets with children named {said}; {tier.model.family} has others (try splitnet)"
        try:
            own, first = (_passed_on(one.model, parts) for one in (tier, fleet.active_tiers[0]))
        except ValueError as reason:  # a part that is not run once
            return f"{method} cannot take {tier.model.family} apart: {reason}"
        if own != first:
            return f"{method} needs features of one shape; those of tier {tier.name!r} are {own}, others' {first}"
    return _ends_problem(method, fleet, ends)


def _ends_problem(method: str, fleet: Fleet, ends: Sequence[str]) -> str | None:
    """Why the ends that all share are not the same in every tier."""
    whole = fleet.global_model.shapes()
    for tier in fleet.active_tiers:
        shapes = tier.model.shapes()
        for name in {*shapes, *whole}:
            if name.split(".")[0] in ends and shapes.get(name) != whole.get(name):
                return f"{method} needs the same ends everywhere; {name} of tier {tier.name!r} is not as the others'"
    return None


def _passed_on(model: Model, parts: Sequence[str]) -> list[tuple[int, ...]]:
    return [feature_shape(model), *(model.submodel(name).input_shape for name in parts[1:])]

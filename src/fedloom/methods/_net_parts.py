"""Models that are run part by part, as in FedIN and FedGKT: extractor, intermediate layers and classifier."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..fleet import Fleet
from ..models import Model
from ..tensors import Tensors


def run_part(model: Model, part: str, weights: Tensors, x: Tensor) -> Tensor:
    """Run one part of a model in evaluation mode."""
    return model.submodel(part)(model.submodel_weights(part, weights), x).logits


@lru_cache(maxsize=1024)
def feature_shape(model: Model) -> tuple[int, ...]:
    """The shape of the extractor's output for one example."""
    part = model.submodel("extractor")
    with torch.no_grad():
        return tuple(part.module().eval()(part.zero_inputs(2)).shape[1:])


def parts_problem(method: str, fleet: Fleet, parts: Sequence[str], ends: Sequence[str] = ()) -> str | None:
    """Why the tiers' models cannot be split into `parts` with interfaces of one shape, and equal `ends`."""
    for tier in fleet.active_tiers:
        if not tier.model.has_children(*parts):
            names = ", ".join(parts)
            return f"{method} needs nets with children named {names}; {tier.model.family} has others (try splitnet)"
        try:
            shapes, expected = (_interface_shapes(one.model, parts) for one in (tier, fleet.active_tiers[0]))
        except ValueError as reason:  # a part that is not run exactly once
            return f"{method} cannot split {tier.model.family}: {reason}"
        if shapes != expected:
            return f"{method} needs features of one shape; tier {tier.name!r} has {shapes}, others {expected}"
    return _ends_problem(method, fleet, ends)


def _ends_problem(method: str, fleet: Fleet, ends: Sequence[str]) -> str | None:
    expected = fleet.global_model.shapes()
    for tier in fleet.active_tiers:
        shapes = tier.model.shapes()
        for name in {*shapes, *expected}:
            if name.split(".")[0] in ends and shapes.get(name) != expected.get(name):
                return f"{method} needs the same ends in every tier; {name} of tier {tier.name!r} has another shape"
    return None


def _interface_shapes(model: Model, parts: Sequence[str]) -> list[tuple[int, ...]]:
    return [feature_shape(model), *(model.submodel(name).input_shape for name in parts[1:])]

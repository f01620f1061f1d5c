"""The subnets that FedSup and E-FedSup train: combinations of what the tiers differ in, a named or a custom space."""

from collections.abc import Mapping, Sequence

from ..fleet import Fleet
from ..footprints import find_slicing_problem, subnet_footprint
from ..models import SPACES, Model, SearchSpace, make_space, space_from_models
from ..seeds import SEARCH_SPACE_CHECK, generator
from ..settings import Count, Positive

SpaceValue = Count | Positive | str
SpaceChoice = str | Mapping[str, tuple[SpaceValue, ...] | tuple[tuple[SpaceValue | tuple[Count, ...], ...], ...]]
"""`"tiers"`, a name in `SPACES`, or lists of choices for each setting of the model."""

CHECKED_SUBNETS = 10  # random ones, besides the smallest and the largest


def build_space(choice: SpaceChoice, tier_models: Sequence[Model]) -> SearchSpace:
    if choice == "tiers":
        return space_from_models(tier_models)
    return make_space(SPACES[choice] if isinstance(choice, str) else choice)


def space_problem(method: str, choice: SpaceChoice, fleet: Fleet) -> str | None:
    """Why subnets cannot be cut out of the global model; the extremes and some random ones are tried.

    That a subnet is a smaller net is proved of the smallest, which is narrower wherever others are.
    """
    if isinstance(choice, str) and choice not in (known := ("tiers", *SPACES)):
        return f"{method} knows the spaces {', '.join(known)}, not {choice!r}; or give lists of choices"
    supernet, draw = fleet.global_model, generator(0, SEARCH_SPACE_CHECK)
    try:
        subnets = build_space(choice, [tier.model for tier in fleet.active_tiers])
        sampled = (subnets.sample(supernet, draw) for _ in range(CHECKED_SUBNETS))
        for subnet in (subnets.smallest(supernet), subnets.largest(supernet), *sampled):
            subnet_footprint(subnet, supernet)
            subnet.check_output_size()
        problem = find_slicing_problem(subnets.smallest(supernet), supernet)
    except Exception as error:  # a family may raise anything for sizes it cannot be built in
        return f"{method} cannot cut its subnets out of the largest tier's model: {error}; set method.space"
    return f"{method}: of the smallest subnet, {problem}" if problem else None

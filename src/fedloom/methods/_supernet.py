"""Which sub-nets a supernet method may draw: what the tiers differ in, mixed; a named space; or a user's own."""

from collections.abc import Mapping, Sequence

from ..fleet import Fleet
from ..footprints import part_of
from ..models import SPACES, Model, SearchSpace, space, space_from_models
from ..seeds import SEARCH_SPACE_CHECK, generator
from ..settings import Count, Positive

Value = Count | Positive | str
Choice = str | Mapping[str, tuple[Value, ...] | tuple[tuple[Value | tuple[Count, ...], ...], ...]]
"""`"tiers"`: what the fleet's tiers differ in."""

TRIED = 10


def chosen(choice: Choice, sizes: Sequence[Model]) -> SearchSpace:
    if choice == "tiers":
        return space_from_models(sizes)
    return space(SPACES[choice] if isinstance(choice, str) else choice)


def space_problem(method: str, choice: Choice, fleet: Fleet) -> str | None:
    """Why sub-nets cannot be drawn out of this fleet's global model, by its extremes and some in between."""
    if isinstance(choice, str) and choice not in (known := ("tiers", *SPACES)):
        return f"{method} knows the spaces {', '.join(known)}, not {choice!r}; or give lists of choices"
    whole, draw = fleet.global_model, generator(0, SEARCH_SPACE_CHECK)
    try:
        nets = chosen(choice, [tier.model for tier in fleet.active_tiers])
        for net in (nets.smallest(whole), nets.largest(whole), *(nets.sample(whole, draw) for _ in range(TRIED))):
            part_of(net, whole)
            net.check_output_size()
    except Exception as error:  # whatever a family says of sizes it cannot be built in
        return f"{method} cannot cut its sub-nets out of the largest tier's model: {error}; set method.space"
    return None

"""The controls a comparison needs: what would have come of treating the fleet in the ordinary ways."""

from collections.abc import Callable, Sequence
from typing import Any

from ..fleet import Fleet
from ..reporting import Serving
from .load import Loaded
from .problems import Problem, nearest

Document = dict[str, Any]


def standalone(document: Document, fleet: Fleet) -> Document:
    """Every device alone with the model it can carry."""
    return {**document, "method": {"name": "standalone"}, "fleet": {**document["fleet"], "assignment": "fixed"}}


def small_for_all(document: Document, fleet: Fleet) -> Document:
    """The smallest model on every device."""
    return _one_tier(document, fleet.smallest.name)


def drop_the_small(document: Document, fleet: Fleet) -> Document:
    """The largest model, trained by the devices that can carry it; the others are left out."""
    return {**document, "fleet": {**document["fleet"], "eligible": [fleet.largest.name]}}


def all_large(document: Document, fleet: Fleet) -> Document:
    """The largest model on every device, as if all could carry it: a ceiling."""
    return _one_tier(document, fleet.largest.name)


CONTROLS: dict[str, Callable[[Document, Fleet], Document]] = {
    "standalone": standalone,
    "small-for-all": small_for_all,
    "drop-the-small": drop_the_small,
    "all-large": all_large,
}


def arms(loaded: Loaded, fleet: Fleet, names: Sequence[str]) -> dict[str, Loaded]:
    """The recipe itself, under its method's name, and the controls that differ from it."""
    found = {loaded.recipe.method.name: loaded}
    for name in names:
        if name not in CONTROLS:
            raise loaded.error(Problem((), "CONTROL_NAME", f"there is no control {name!r}", nearest(name, CONTROLS)))
        if name not in found and (name == "standalone" or len(fleet.tiers) > 1):
            found[name] = loaded.changed(CONTROLS[name](loaded.recipe.document(), fleet))
    return found


def serving(name: str, fleet: Fleet) -> dict[str, Serving]:
    """Which model of an arm a device of each tier ends up with, and whether it can carry it."""
    large, small = fleet.largest.name, fleet.smallest.name
    match name:
        case "small-for-all":
            return {tier.name: Serving(small, True) for tier in fleet.tiers}
        case "drop-the-small" | "all-large":
            return {tier.name: Serving(large, tier.name == large) for tier in fleet.tiers}
        case _:
            return {tier.name: Serving(tier.name, True) for tier in fleet.tiers}


def _one_tier(document: Document, name: str) -> Document:
    (kept,) = [tier for tier in document["tiers"] if tier["name"] == name]
    fleet = {**document["fleet"], "assignment": "fixed", "eligible": []}
    return {**document, "tiers": [{**kept, "share": 1.0}], "fleet": fleet}

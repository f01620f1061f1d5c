"""The arms of a comparison: the recipe, those it names, and controls that treat the fleet in the ordinary ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..fleet import Fleet, parameters
from ..recipe.errors import RecipeError, RecipeIssue, dotted, nearest
from ..recipe.load import Loaded, load
from ..recipe.registry import Registry
from ..reporting import Serving
from ..runs.build import build
from ..runs.data import outline_of, read_data

Document = dict[str, Any]
NOBODY: Mapping[str, Loaded] = MappingProxyType({})
LENGTH = ("rounds", "evaluation.every")  # an arm that says so may have its own, as for equal bytes; a file by mistake


def standalone(document: Document, fleet: Fleet) -> Document:
    """Every device alone with the model it can carry."""
    return {**document, "method": {"name": "standalone"}, "fleet": {**document["fleet"], "assignment": "fixed"}}


def small_for_all(document: Document, fleet: Fleet) -> Document:
    """The smallest model on every device."""
    return _one_tier(document, _extremes(fleet)[0])


def drop_the_small(document: Document, fleet: Fleet) -> Document:
    """The largest model, trained by the devices that can carry it; the others are left out."""
    return {**document, "fleet": {**document["fleet"], "eligible": [_extremes(fleet)[1]]}}


def all_large(document: Document, fleet: Fleet) -> Document:
    """The largest model on every device, as if all could carry it: a ceiling."""
    return _one_tier(document, _extremes(fleet)[1])


CONTROLS: dict[str, Callable[[Document, Fleet], Document]] = {
    "standalone": standalone,
    "small-for-all": small_for_all,
    "drop-the-small": drop_the_small,
    "all-large": all_large,
}


def arms(
    loaded: Loaded, tables: Registry, fleet: Fleet, controls: Sequence[str] = (), beside: Mapping[str, Loaded] = NOBODY
) -> dict[str, Loaded]:
    """The recipe itself, under its method's name, its own arms, other recipes, and the controls that differ from it."""
    found = {loaded.recipe.method.name: loaded}
    for name, changes in loaded.recipe.compare.arms.items():
        with told_at_its_line(loaded, name):
            found[name] = _paired(loaded, name, load(loaded.recipe.document(), tables, changes), but=LENGTH)
    for name, other in beside.items():
        if name in found:
            raise loaded.error(
                RecipeIssue((), "ARM_NAME", f"there is an arm {name!r} already", "give the file another name")
            )
        found[name] = _paired(loaded, name, other)
    for name in controls:
        if name not in CONTROLS:
            raise loaded.error(
                RecipeIssue((), "CONTROL_NAME", f"there is no control {name!r}", nearest(name, CONTROLS))
            )
        if name not in found and (name == "standalone" or len(fleet.tiers) > 1):
            found[name] = loaded.changed(CONTROLS[name](loaded.recipe.document(), fleet))
    return found


def with_methods(loaded: Loaded, tables: Registry, names: Sequence[str]) -> dict[str, Loaded]:
    """The same recipe with other methods, as they are by default."""
    others = [name for name in names if name != loaded.recipe.method.name]
    return {name: load({**loaded.recipe.document(), "method": {"name": name}}, tables) for name in others}


def admitted(loaded: Loaded, tables: Registry, data: Path) -> tuple[list[str], dict[str, str]]:
    """The methods that this recipe can be run with, as they are by default, and why not the others."""
    found, refused = [], {}
    seen = outline_of(read_data(loaded, tables, data))
    for name in tables.methods:
        try:
            build(loaded.changed({**loaded.recipe.document(), "method": {"name": name}}), tables, seen)
            found.append(name)
        except (RecipeError, TypeError) as error:
            refused[name] = error.problems[0].message if isinstance(error, RecipeError) else str(error)
    return found, refused


def _paired(loaded: Loaded, name: str, other: Loaded, but: Sequence[str] = ()) -> Loaded:
    before, after = loaded.recipe.document(), other.recipe.document()
    tiers, known = ([tier.name for tier in one.recipe.tiers] for one in (other, loaded))
    if name in CONTROLS and name != other.recipe.method.name:
        raise loaded.error(RecipeIssue((), "ARM_NAME", "a control has that name"))
    if _pairing(before, but) != _pairing(after, but) or sorted(tiers) != sorted(known):
        kept = ", ".join(["seed", "data", "evaluation", *(() if but else ["rounds"])])
        said = f"an arm has the recipe's {kept} and names of tiers, so that it can be compared seed by seed"
        raise loaded.error(RecipeIssue((), "ARM_DIFFERS", said))
    return loaded.changed(after)


def _pairing(document: Document, but: Sequence[str]) -> Document:
    """What arms must have in common: else they would not be paired, or not judged alike."""
    judged = {f"evaluation.{key}": value for key, value in document["evaluation"].items()}
    whole = {**{key: document[key] for key in ("seed", "rounds", "data")}, **judged}
    return {key: value for key, value in whole.items() if key not in but}


@contextmanager
def told_at_its_line(loaded: Loaded, arm: str) -> Iterator[None]:
    """What is wrong with an arm that the recipe names is said where it is named."""
    try:
        yield
    except RecipeError as error:
        if arm not in loaded.recipe.compare.arms:
            raise
        raise loaded.error(*(_at_arm(arm, one) for one in error.problems)) from error


def _at_arm(arm: str, problem: RecipeIssue) -> RecipeIssue:
    where = f"{dotted(problem.place)}: " if problem.place else ""
    return replace(problem, place=("compare", "arms", arm), message=where + problem.message)


def serving(name: str, fleet: Fleet, own: Fleet) -> dict[str, Serving]:
    """Which model of an arm, whose own fleet it is, a device of each tier ends up with, and whether it can carry it."""
    small, large = _extremes(fleet)
    match name:
        case "small-for-all":
            return {tier.name: Serving(small, True) for tier in fleet.tiers}
        case "drop-the-small" | "all-large":
            return {tier.name: Serving(large, tier.name == large) for tier in fleet.tiers}
        case _:
            trained, instead = {tier.name for tier in own.active_tiers}, own.largest
            smaller = parameters(instead.model.shapes())
            return {
                tier.name: Serving(tier.name, True)
                if tier.name in trained
                else Serving(instead.name, smaller < parameters(tier.model.shapes()))
                for tier in fleet.tiers
            }


def _extremes(fleet: Fleet) -> tuple[str, str]:
    """The tiers with the smallest and the largest model, of all there are."""
    by_size = sorted(fleet.tiers, key=lambda tier: parameters(tier.model.shapes()))
    return by_size[0].name, by_size[-1].name


def _one_tier(document: Document, name: str) -> Document:
    (kept,) = [tier for tier in document["tiers"] if tier["name"] == name]
    fleet = {**document["fleet"], "assignment": "fixed", "eligible": []}
    return {**document, "tiers": [{**kept, "share": 1.0}], "fleet": fleet}

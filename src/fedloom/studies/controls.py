"""The arms of a comparison: the recipe, those it names, and controls that treat the fleet in the ordinary ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..fleet import Fleet, count_parameters
from ..recipe.errors import RecipeError, RecipeIssue, dotted, suggest
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..reporting import ServedModel
from ..runs.build import build
from ..runs.data import outline_of, read_data

Document = dict[str, Any]
NO_ARMS: Mapping[str, LoadedRecipe] = MappingProxyType({})
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


def build_arms(
    loaded: LoadedRecipe, registry: Registry, fleet: Fleet, controls: Sequence[str] = (), beside: Mapping[str, LoadedRecipe] = NO_ARMS
) -> dict[str, LoadedRecipe]:
    """The recipe itself, under its method's name, its own arms, other recipes, and the controls that differ from it."""
    found = {loaded.recipe.method.name: loaded}
    for name, changes in loaded.recipe.compare.arms.items():
        with errors_at_arm(loaded, name):
            found[name] = _paired(loaded, name, load(loaded.recipe.document(), registry, changes), but=LENGTH)
    for name, other in beside.items():
        if name in found:
            raise loaded.error(
                RecipeIssue((), "ARM_NAME", f"there is an arm {name!r} already", "give the file another name")
            )
        found[name] = _paired(loaded, name, other)
    for name in controls:
        if name not in CONTROLS:
            raise loaded.error(
                RecipeIssue((), "CONTROL_NAME", f"there is no control {name!r}", suggest(name, CONTROLS))
            )
        if name not in found and (name == "standalone" or len(fleet.tiers) > 1):
            found[name] = loaded.with_document(CONTROLS[name](loaded.recipe.document(), fleet))
    return found


def arms_with_methods(loaded: LoadedRecipe, registry: Registry, names: Sequence[str]) -> dict[str, LoadedRecipe]:
    """The same recipe with other methods, as they are by default."""
    others = [name for name in names if name != loaded.recipe.method.name]
    return {name: load({**loaded.recipe.document(), "method": {"name": name}}, registry) for name in others}


def supported_methods(loaded: LoadedRecipe, registry: Registry, data: Path) -> tuple[list[str], dict[str, str]]:
    """The methods that this recipe can be run with, as they are by default, and why not the others."""
    found, refused = [], {}
    seen = outline_of(read_data(loaded, registry, data))
    for name in registry.methods:
        try:
            build(loaded.with_document({**loaded.recipe.document(), "method": {"name": name}}), registry, seen)
            found.append(name)
        except (RecipeError, TypeError) as error:
            refused[name] = error.issues[0].message if isinstance(error, RecipeError) else str(error)
    return found, refused


def _paired(loaded: LoadedRecipe, name: str, other: LoadedRecipe, but: Sequence[str] = ()) -> LoadedRecipe:
    before, after = loaded.recipe.document(), other.recipe.document()
    tiers, known = ([tier.name for tier in one.recipe.tiers] for one in (other, loaded))
    if name in CONTROLS and name != other.recipe.method.name:
        raise loaded.error(RecipeIssue((), "ARM_NAME", "a control has that name"))
    if _pairing(before, but) != _pairing(after, but) or sorted(tiers) != sorted(known):
        kept = ", ".join(["seed", "data", "evaluation", *(() if but else ["rounds"])])
        said = f"an arm has the recipe's {kept} and names of tiers, so that it can be compared seed by seed"
        raise loaded.error(RecipeIssue((), "ARM_DIFFERS", said))
    return loaded.with_document(after)


def _pairing(document: Document, but: Sequence[str]) -> Document:
    """What arms must have in common: else they would not be paired, or not judged alike."""
    judged = {f"evaluation.{key}": value for key, value in document["evaluation"].items()}
    whole = {**{key: document[key] for key in ("seed", "rounds", "data")}, **judged}
    return {key: value for key, value in whole.items() if key not in but}


@contextmanager
def errors_at_arm(loaded: LoadedRecipe, arm: str) -> Iterator[None]:
    """What is wrong with an arm that the recipe names is said where it is named."""
    try:
        yield
    except RecipeError as error:
        if arm not in loaded.recipe.compare.arms:
            raise
        raise loaded.error(*(_at_arm(arm, one) for one in error.issues)) from error


def _at_arm(arm: str, problem: RecipeIssue) -> RecipeIssue:
    where = f"{dotted(problem.key_path)}: " if problem.key_path else ""
    return replace(problem, key_path=("compare", "arms", arm), message=where + problem.message)


def served_models(name: str, fleet: Fleet, own: Fleet) -> dict[str, ServedModel]:
    """Which model of an arm, whose own fleet it is, a device of each tier ends up with, and whether it can carry it."""
    small, large = _extremes(fleet)
    match name:
        case "small-for-all":
            return {tier.name: ServedModel(small, True) for tier in fleet.tiers}
        case "drop-the-small" | "all-large":
            return {tier.name: ServedModel(large, tier.name == large) for tier in fleet.tiers}
        case _:
            trained, instead = {tier.name for tier in own.active_tiers}, own.largest
            smaller = count_parameters(instead.model.shapes())
            return {
                tier.name: ServedModel(tier.name, True)
                if tier.name in trained
                else ServedModel(instead.name, smaller < count_parameters(tier.model.shapes()))
                for tier in fleet.tiers
            }


def _extremes(fleet: Fleet) -> tuple[str, str]:
    """The tiers with the smallest and the largest model, of all there are."""
    by_size = sorted(fleet.tiers, key=lambda tier: count_parameters(tier.model.shapes()))
    return by_size[0].name, by_size[-1].name


def _one_tier(document: Document, name: str) -> Document:
    (kept,) = [tier for tier in document["tiers"] if tier["name"] == name]
    fleet = {**document["fleet"], "assignment": "fixed", "eligible": []}
    return {**document, "tiers": [{**kept, "share": 1.0}], "fleet": fleet}

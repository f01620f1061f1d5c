"""The arms of a comparison: the recipe, the arms it names, and controls (the usual ways to handle unequal devices)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..fleet import Fleet, count_parameters
from ..recipe.errors import RecipeError, RecipeIssue, dotted
from ..recipe.load import LoadedRecipe, load
from ..recipe.registries import Registries
from ..registry import suggest
from ..reporting import ServedModel
from ..runs.build import build
from ..runs.data import data_spec_of, read_data

Document = dict[str, Any]
NO_ARMS: Mapping[str, LoadedRecipe] = MappingProxyType({})
# an arm may change these, for comparisons at equal bytes
LENGTH_KEYS = ("rounds", "evaluation.every", "evaluation.dense_last")


def standalone(document: Document, fleet: Fleet) -> Document:
    """Every device trains alone, with the model of its tier. Nothing is sent, so nothing is compressed or defended."""
    unused = {"faults": "min_coverage", "admission": "norm"}
    document = {key: value for key, value in document.items() if key not in ("aggregation", "compression")}
    document |= {
        section: {key: value for key, value in document[section].items() if key != idle}
        for section, idle in unused.items()
        if section in document
    }
    return {**document, "method": {"name": "standalone"}, "fleet": {**document["fleet"], "assignment": "fixed"}}


def small_for_all(document: Document, fleet: Fleet) -> Document:
    """The smallest model on every device."""
    return _one_tier(document, _extremes(fleet)[0])


def drop_the_small(document: Document, fleet: Fleet) -> Document:
    """The largest model, trained only by the devices that can run it."""
    return {**document, "fleet": {**document["fleet"], "eligible": [_extremes(fleet)[1]]}}


def all_large(document: Document, fleet: Fleet) -> Document:
    """The largest model on every device, as if all could run it: an upper bound."""
    return _one_tier(document, _extremes(fleet)[1])


CONTROLS: dict[str, Callable[[Document, Fleet], Document]] = {
    "standalone": standalone,
    "small-for-all": small_for_all,
    "drop-the-small": drop_the_small,
    "all-large": all_large,
}


def build_arms(
    loaded: LoadedRecipe,
    registries: Registries,
    fleet: Fleet,
    controls: Sequence[str] = (),
    beside: Mapping[str, LoadedRecipe] = NO_ARMS,
) -> dict[str, LoadedRecipe]:
    """The recipe under its method's name, the arms it names, other recipes, and controls.

    Controls that need a smallest and a largest model are left out where all tiers have equally large ones.
    """
    arms = {loaded.recipe.method.name: loaded}
    for name, changes in loaded.recipe.compare.arms.items():
        with errors_at_arm(loaded, name):
            arms[name] = _check_pairing(loaded, name, load(loaded.recipe.document(), registries, changes), LENGTH_KEYS)
    for name, other in beside.items():
        if name in arms:
            of_recipe = ": the recipe itself, named after its method" if name == loaded.recipe.method.name else ""
            message = f"there is an arm {name!r} already{of_recipe}"
            raise loaded.error(RecipeIssue((), "ARM_NAME", message, "give the file another name"))
        arms[name] = _check_pairing(loaded, name, other)
    plain = _with_control_changes(loaded, registries) if controls else loaded
    for name in controls:
        if name not in CONTROLS:
            raise loaded.error(
                RecipeIssue((), "CONTROL_NAME", f"there is no control {name!r}", suggest(name, CONTROLS))
            )
        if name not in arms and (name == "standalone" or _has_sizes(fleet)):
            arms[name] = loaded.with_document(CONTROLS[name](plain.recipe.document(), fleet))
    return arms


def _with_control_changes(loaded: LoadedRecipe, registries: Registries) -> LoadedRecipe:
    """The recipe that controls start from."""
    changes = loaded.recipe.compare.control_changes
    if not changes:
        return loaded
    try:
        return _check_pairing(loaded, "", load(loaded.recipe.document(), registries, changes))
    except RecipeError as error:
        raise loaded.error(*(_move_to(("compare", "control_changes"), issue) for issue in error.issues)) from error


def arms_with_methods(loaded: LoadedRecipe, registries: Registries, names: Sequence[str]) -> dict[str, LoadedRecipe]:
    """The same recipe with other methods, at their default settings."""
    others = [name for name in names if name != loaded.recipe.method.name]
    return {name: load({**loaded.recipe.document(), "method": {"name": name}}, registries) for name in others}


def supported_methods(loaded: LoadedRecipe, registries: Registries, data: Path) -> tuple[list[str], dict[str, str]]:
    """The methods that support this recipe at their default settings, and why the others do not."""
    supported, refused = [], {}
    data_spec = data_spec_of(read_data(loaded, registries, data))
    for name in registries.methods:
        try:
            build(loaded.with_document({**loaded.recipe.document(), "method": {"name": name}}), registries, data_spec)
            supported.append(name)
        except (RecipeError, TypeError) as error:
            message = error.issues[0].message if isinstance(error, RecipeError) else str(error)
            refused[name] = message.removeprefix(f"{name} ").partition(";")[0]
    return supported, refused


def _check_pairing(
    loaded: LoadedRecipe, name: str, other: LoadedRecipe, except_keys: Sequence[str] = ()
) -> LoadedRecipe:
    before, after = loaded.recipe.document(), other.recipe.document()
    tiers, expected = ([tier.name for tier in one.recipe.tiers] for one in (other, loaded))
    if name in CONTROLS and name != other.recipe.method.name:
        raise loaded.error(RecipeIssue((), "ARM_NAME", "the name belongs to a control"))
    differs = _paired_settings(before, except_keys) != _paired_settings(after, except_keys)
    if differs or sorted(tiers) != sorted(expected):
        same = ", ".join(["seed", "data", "evaluation", *(() if except_keys else ["rounds"])])
        message = f"an arm must have the recipe's {same} and tier names, or seeds could not be paired"
        raise loaded.error(RecipeIssue((), "ARM_DIFFERS", message))
    return loaded.with_document(after)


def _paired_settings(document: Document, except_keys: Sequence[str]) -> Document:
    """Settings that all arms must share to be paired by seed and evaluated alike."""
    evaluation = {f"evaluation.{key}": value for key, value in document["evaluation"].items()}
    settings = {**{key: document[key] for key in ("seed", "rounds", "data")}, **evaluation}
    return {key: value for key, value in settings.items() if key not in except_keys}


@contextmanager
def errors_at_arm(loaded: LoadedRecipe, arm: str) -> Iterator[None]:
    """Report errors in an arm at the line of the recipe that names it."""
    try:
        yield
    except RecipeError as error:
        if arm not in loaded.recipe.compare.arms:
            raise
        raise loaded.error(*(_move_to(("compare", "arms", arm), issue) for issue in error.issues)) from error


def _move_to(key_path: tuple[str, ...], issue: RecipeIssue) -> RecipeIssue:
    where = f"{dotted(issue.key_path)}: " if issue.key_path else ""
    return replace(issue, key_path=key_path, message=where + issue.message)


def served_models(name: str, fleet: Fleet, arm_fleet: Fleet) -> dict[str, ServedModel]:
    """The model that a device of each tier of `fleet` ends up with in an arm, whose own fleet may have other tiers."""
    small, large = _extremes(fleet)
    match name:
        case "small-for-all":
            return {tier.name: ServedModel(small, True) for tier in fleet.tiers}
        case "drop-the-small" | "all-large":
            return {tier.name: ServedModel(large, tier.name == large) for tier in fleet.tiers}
        case _:
            trained, fallback = {tier.name for tier in arm_fleet.active_tiers}, arm_fleet.largest
            size = count_parameters(fallback.model.shapes())
            return {
                tier.name: ServedModel(tier.name, True)
                if tier.name in trained
                else ServedModel(fallback.name, size < count_parameters(tier.model.shapes()))
                for tier in fleet.tiers
            }


def _extremes(fleet: Fleet) -> tuple[str, str]:
    """The names of the tiers with the smallest and the largest model."""
    by_size = sorted(fleet.tiers, key=lambda tier: count_parameters(tier.model.shapes()))
    return by_size[0].name, by_size[-1].name


def _has_sizes(fleet: Fleet) -> bool:
    """Whether some tier's model is larger than another's: FIARSE's tiers, for example, all have the whole one."""
    return len({count_parameters(tier.model.shapes()) for tier in fleet.tiers}) > 1


def _one_tier(document: Document, name: str) -> Document:
    (kept,) = [tier for tier in document["tiers"] if tier["name"] == name]
    fleet = {**document["fleet"], "assignment": "fixed", "eligible": []}
    return {**document, "tiers": [{**kept, "share": 1.0}], "fleet": fleet}

"""What a search for good settings may change in a recipe: keys and ranges.

Optimizers and methods declare them beside the types of their settings (`SearchRange`, `SearchChoices`), learning-rate
schedules by an attribute `searchable`. A user names keys, with ranges of their own if need be.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ..registry import settable_parameters, suggest
from ..settings import SearchChoices, SearchRange
from .errors import RecipeError, RecipeIssue
from .load import LoadedRecipe, dumps_value, load
from .registries import Registries
from .schema import TrainingConfig
from .validation import type_hints

Domain = SearchRange | SearchChoices
Space = Mapping[str, Domain]  # by dotted key of the recipe


@dataclass(frozen=True)
class SearchedSetting:
    """A key that a user wants searched; without a domain, where it is declared to be."""

    key: str
    domain: Domain | None = None


def declared_space(loaded: LoadedRecipe, registries: Registries) -> dict[str, Domain]:
    """The settings that the recipe's training, optimizer and method declare, by key."""
    training, method = loaded.recipe.training, loaded.recipe.method
    space = {f"training.{name}": found for name, field in TrainingConfig.model_fields.items()
             if (found := _find_domain(field.metadata))}  # fmt: skip
    space |= _declared("training.optimizer", registries.optimizers[training.optimizer["kind"]])
    schedules = _searchable_schedules(loaded, registries)
    if len(schedules) > 1:
        space["training.lr_schedule"] = SearchChoices(tuple(schedules))
    return space | _declared("method", registries.methods[method.name])


def _declared(prefix: str, function: Callable[..., Any]) -> dict[str, Domain]:
    return {f"{prefix}.{name}": domain for name, domain in declared_domains(function).items()}


def declared_domains(function: Callable[..., Any]) -> dict[str, Domain]:
    """Where a class or function declares that its settings are searched, by name."""
    hints, known = type_hints(function), settable_parameters(function)
    found = {name: _find_domain(getattr(hints.get(name), "__metadata__", ())) for name in known}
    return {name: domain for name, domain in found.items() if domain}


def _find_domain(metadata: Sequence[Any]) -> Domain | None:
    return next((one for one in metadata if isinstance(one, get_args(Domain))), None)


def _searchable_schedules(loaded: LoadedRecipe, registries: Registries) -> list[dict[str, Any]]:
    """The recipe's own schedule, then the others that can be tried."""
    own, table = dict(loaded.recipe.training.lr_schedule), registries.lr_schedules
    found = [own]
    for name in table:
        if getattr(table[name], "searchable", False) and name != own["kind"]:
            has_rounds = "rounds" in settable_parameters(table[name])
            found.append({"kind": name, **({"rounds": loaded.recipe.rounds} if has_rounds else {})})
    return found


def parse_searched(text: str) -> SearchedSetting:
    """Read `key`, `key=low..high`, `key=low..high:log` or `key=value,value`.

    Raises
    ------
    ValueError: if it is none of them.
    """
    key, equals, domain = (part.strip() for part in text.partition("="))
    if not equals:
        return SearchedSetting(key)
    low, dots, high = domain.partition("..")
    if not dots:
        return SearchedSetting(key, SearchChoices(_parse_values(domain)))
    high, _, scale = high.partition(":")
    if scale not in ("", "log"):
        raise ValueError(f"a range ends in :log or in its highest value, not in :{scale}")
    return SearchedSetting(key, SearchRange(_parse_number(low), _parse_number(high), scale == "log"))


def _parse_number(text: str) -> float:
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = float(text)  # such as 1e-3 or .5
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{text!r} is not a number")
    return value


def _parse_values(text: str) -> tuple[Any, ...]:
    """TOML values, or words without quotes, between commas."""
    try:
        return tuple(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return tuple(word.strip() for word in text.split(","))


def build_space(
    arms: Mapping[str, LoadedRecipe], registries: Registries, searched: Sequence[str]
) -> dict[str, dict[str, Domain]]:
    """What is searched in each arm: all that is declared, or the keys of `searched` that the arm has.

    Raises
    ------
    RecipeError: if no arm has a key, if an arm has none of them, or if a value is not valid.
    """
    declared = {name: declared_space(loaded, registries) for name, loaded in arms.items()}
    first = next(iter(arms.values()))
    spaces: dict[str, dict[str, Domain]] = {name: {} for name in arms} if searched else declared
    for text in searched:
        try:
            wanted = parse_searched(text)
        except ValueError as error:
            hint = "write training.optimizer.lr=0.01..1:log or training.epochs=1,2,4"
            raise first.error(RecipeIssue(("tune", "search"), "SEARCH_FORM", str(error), hint, text)) from error
        refusals = []
        for name, loaded in arms.items():
            domain = wanted.domain or declared[name].get(wanted.key)
            refusal = _refusal(loaded, registries, wanted.key, domain)
            refusals.append(refusal)
            if domain is not None and refusal is None:
                spaces[name][wanted.key] = domain
        if all(refusals):
            known = suggest(wanted.key, {key for space in declared.values() for key in space})
            reason = next((str(one) for one in refusals if one), "")
            message = f"{wanted.key} cannot be searched: {reason}"
            raise first.error(RecipeIssue(("tune", "search"), "SEARCH_KEY", message, known, text))
    for name, space in spaces.items():
        if not space:
            hint = "name keys of this arm with --search, or leave the arm out"
            raise first.error(RecipeIssue((), "SEARCH_EMPTY", f"{name} has nothing to search", hint))
    return spaces


def _refusal(loaded: LoadedRecipe, registries: Registries, key: str, domain: Domain | None) -> str | None:
    """Why an arm cannot have a key searched; None if it can."""
    if domain is None:
        return "it is not declared, so it needs a range: KEY=LOW..HIGH"
    if key.partition(".")[0] in ("seed", "rounds", "data", "evaluation", "compare", "tune", "tiers", "fleet"):
        return "trials must have the same seed, rounds, data, devices and evaluation"
    ends = (domain.low, domain.high) if isinstance(domain, SearchRange) else domain.values
    for value in ends:
        try:
            load(loaded.recipe.document(), registries, [f"{key}={dumps_value(value)}"])
        except RecipeError as error:
            return error.issues[0].message
    return None


def read_value(document: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key."""
    value: Any = document
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def with_values(document: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A document with the values of some dotted keys changed."""
    changed = dict(document)
    for key, value in values.items():
        head, _, rest = key.partition(".")
        changed[head] = with_values(changed.get(head, {}), {rest: value}) if rest else value
    return changed


def own_values(loaded: LoadedRecipe, registries: Registries, space: Space) -> dict[str, Any]:
    """What the recipe itself has for the settings of a space; a default where it says nothing."""
    document, values = loaded.recipe.document(), {}
    tables: dict[str, Callable[..., Any]] = {
        "training.optimizer": registries.optimizers[loaded.recipe.training.optimizer["kind"]],
        "method": registries.methods[loaded.recipe.method.name],
    }
    for key in space:
        section, _, name = key.rpartition(".")
        parameter = settable_parameters(tables[section]).get(name) if section in tables else None
        values[key] = read_value(document, key, parameter.default if parameter else None)
    return values

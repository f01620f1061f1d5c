"""Checks of a recipe's words: every name is known, and every setting is one its thing has, in type and range.

Settings checked against the function or dataclass they are for: its own signature is the only schema.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..client import LR_SCHEDULES, OPTIMIZERS
from ..data import PARTITIONS, PREPARATIONS
from ..engines.compression import DOWN, UP
from ..evaluation import FineTune, StaticBatchNorm
from ..fleet.speed import STRAGGLERS
from ..footprints import RULES
from .errors import Place, RecipeIssue, from_pydantic, nearest
from .registry import Registry
from .schema import AggregationPart, Data, ModelPart, TierPart

Table = Mapping[str, Callable[..., Any]]


def settings_of(function: Callable[..., Any], given: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """What a user may set: the named parameters that are not handed over by the project itself."""
    handed = set(given)
    return {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if name not in handed and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def setting_problems(
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    place: Place,
    given: Iterable[str] = (),
    beside: Iterable[str] = (),
) -> list[RecipeIssue]:
    """What is wrong with settings; `beside` names keys of the same section that are somebody else's."""
    allowed, hints = settings_of(function, given), _hints(function)
    found = []
    for name, value in settings.items():
        if name in allowed:
            found += _value_problems(hints.get(name, Any), value, (*place, name))
        elif not _takes_anything(function) or not isinstance(name, str):
            hint = nearest(str(name), [*allowed, *beside])
            found.append(RecipeIssue((*place, name), "RECIPE_KEY", f"there is no key {name!r} here", hint, value))
    required = [name for name, p in allowed.items() if p.default is p.empty and name not in settings]
    return found + [RecipeIssue((*place, name), "RECIPE_MISSING", f"{name} is required") for name in required]


def choice_problems(
    table: Table,
    settings: Mapping[str, Any],
    place: Place,
    key: str = "kind",
    given: Iterable[str] = (),
    beside: Iterable[str] = (),
) -> list[RecipeIssue]:
    """What is wrong with the choice of a table's entry by its name, and with the entry's settings."""
    name, rest = settings.get(key), {one: value for one, value in settings.items() if one != key}
    if name is None:
        return [RecipeIssue((*place, key), "RECIPE_MISSING", f"{key} is required", nearest("", table))]
    if not isinstance(name, str) or name not in table:
        what = place[-1] if key != "dataset" else "data set"
        return [
            RecipeIssue(
                (*place, key), "RECIPE_NAME", f"there is no {what} of that name", nearest(str(name), table), name
            )
        ]
    return setting_problems(table[name], rest, place, given, [key, *beside])


def instantiate(
    table: Mapping[str, Callable[..., Any]], settings: Mapping[str, Any], key: str = "kind"
) -> Callable[..., Any]:
    """An entry of a table with its settings filled in; they were checked when the recipe was read."""
    rest = {name: value for name, value in settings.items() if name != key}
    return partial(table[settings[key]], **rest)


def plain(value: Any) -> Any:
    """TOML has arrays where Python's settings have tuples."""
    if isinstance(value, list | tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return value


def _value_problems(hint: Any, value: Any, place: Place) -> list[RecipeIssue]:
    try:
        TypeAdapter(hint).validate_python(plain(value), strict=True)
    except ValidationError as error:
        if _is_union(hint) and len(error.errors()) > 1:  # pydantic says of every form why it is not that one
            return [RecipeIssue(place, "RECIPE_TYPE", f"{place[-1]} has none of the forms it can have", value=value)]
        return [from_pydantic(one, (), place) for one in error.errors()]
    return []


def _is_union(hint: Any) -> bool:
    """Of more than a type and nothing."""
    return len([one for one in get_args(hint) if one is not NoneType]) > 1 and get_origin(hint) in (Union, UnionType)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    function = function.func if isinstance(function, partial) else function
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    except (NameError, TypeError):  # a user's annotation that names what is not there; then any value may do
        return {}


def _takes_anything(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


HANDED_TO_FAMILIES = ("input_shape", "classes", "widest", "tokens")
HANDED_TO_PARTITIONS = ("labels", "devices", "generator")


def wording_problems(document: Mapping[str, Any], tables: Registry) -> list[RecipeIssue]:
    """On the document as it was read, so that one bad part does not hide another."""
    parts = {name: value for name, value in document.items() if isinstance(value, Mapping)}
    said = document.get("tiers", ())
    tiers = [tier for tier in said if isinstance(tier, Mapping)] if isinstance(said, list | tuple) else []
    problems = _data(parts.get("data", {}), tables)
    problems += _training(parts.get("training", {}))
    problems += _models(parts.get("model", {}), tiers, tables)
    problems += _tiers(tiers, parts.get("fleet", {}), parts.get("engine", {}))
    if "method" in parts:
        problems += choice_problems(tables.methods, parts["method"], ("method",), key="name")
        problems += _parts(parts["method"], [str(tier.get("name")) for tier in tiers], tables)
    problems += _defence(parts.get("aggregation", {}))
    problems += _codec(parts.get("compression", {}))
    problems += _faults(parts.get("faults", {}), [str(tier.get("name")) for tier in tiers])
    statistics = parts.get("evaluation", {}).get("statistics", {})
    if isinstance(statistics, Mapping):
        problems += setting_problems(StaticBatchNorm, statistics, ("evaluation", "statistics"))
    fine_tune = parts.get("evaluation", {}).get("fine_tune", {})
    if isinstance(fine_tune, dict):
        problems += setting_problems(FineTune, fine_tune, ("evaluation", "fine_tune"))
    return problems


def _parts(method: Mapping[str, Any], tiers: Sequence[str], tables: Registry) -> list[RecipeIssue]:
    """Of a method that is made of others: each has tiers and a method with its own settings."""
    problems = []
    said = method.get("parts", ())
    for number, part in enumerate(said if isinstance(said, list | tuple) else ()):
        place = ("method", "parts", number)
        if not isinstance(part, Mapping):
            problems.append(RecipeIssue(place, "RECIPE_TYPE", "a part is a table with tiers and a method", value=part))
            continue
        own = {key: value for key, value in part.items() if key not in ("tiers", "align")}
        problems += choice_problems(tables.methods, own, place, key="method", beside=("tiers", "align"))
        problems += setting_problems(_part, {key: part[key] for key in ("tiers", "align") if key in part}, place)
        for name in part.get("tiers", ()) if isinstance(part.get("tiers"), list | tuple) else ():
            if name not in tiers:
                hint = nearest(str(name), tiers)
                problems.append(
                    RecipeIssue((*place, "tiers"), "RECIPE_NAME", "there is no tier of that name", hint, name)
                )
    return problems


def _faults(faults: Mapping[str, Any], tiers: Sequence[str]) -> list[RecipeIssue]:
    problems = []
    if isinstance(faults.get("stragglers"), Mapping):
        place = ("faults", "stragglers")
        problems += choice_problems(STRAGGLERS, faults["stragglers"], place, given=("fleet",))
    said = faults.get("outages")
    for number, window in enumerate(said if isinstance(said, list | tuple) else ()):
        if isinstance(window, Mapping) and "tier" in window and window["tier"] not in tiers:
            hint, name = nearest(str(window["tier"]), tiers), window["tier"]
            there = ("faults", "outages", number, "tier")
            problems.append(RecipeIssue(there, "RECIPE_NAME", "there is no tier of that name", hint, name))
    return problems


def _part(tiers: tuple[str, ...], align: bool = False) -> None:
    """What every part has beside its method."""


def _data(data: Mapping[str, Any], tables: Registry) -> list[RecipeIssue]:
    problems = []
    own = {key: value for key, value in data.items() if key == "dataset" or key not in Data.model_fields}
    own.setdefault("dataset", Data.model_fields["dataset"].default)
    problems += choice_problems(tables.datasets, own, ("data",), "dataset", ("folder",), Data.model_fields)
    if isinstance(data.get("partition"), Mapping):
        problems += choice_problems(PARTITIONS, data["partition"], ("data", "partition"), given=HANDED_TO_PARTITIONS)
    public = data.get("public")
    if isinstance(public, Mapping) and public.get("source") == "dataset":
        said = public.get("dataset")
        if not isinstance(said, str) or said not in tables.datasets:
            hint = nearest(str(said), tables.datasets)
            there = ("data", "public", "dataset")
            problems.append(RecipeIssue(there, "RECIPE_NAME", "there is no data set of that name", hint, said))
    preparation = data.get("preparation")
    if isinstance(preparation, str) and preparation not in PREPARATIONS:
        hint = nearest(str(preparation), PREPARATIONS)
        place = ("data", "preparation")
        problems.append(RecipeIssue(place, "RECIPE_NAME", "there is no preparation of that name", hint, preparation))
    return problems


def _defence(defence: Mapping[str, Any]) -> list[RecipeIssue]:
    known = AggregationPart.model_fields
    own = {key: value for key, value in defence.items() if key == "rule" or key not in known}
    return choice_problems(RULES, {"rule": known["rule"].default, **own}, ("aggregation",), "rule", beside=known)


def _codec(codec: Mapping[str, Any]) -> list[RecipeIssue]:
    problems = []
    for key, table in (("uplink", UP), ("downlink", DOWN)):
        said = codec.get(key)
        if not isinstance(said, Mapping):
            continue
        found = choice_problems(table, said, ("compression", key))
        whole_updates = key == "downlink" and said.get("kind") == "top_k"
        why = "top_k is for updates, and those only come up" if whole_updates else "there is no codec of that name"
        problems += [replace(one, message=why) if one.code == "RECIPE_NAME" else one for one in found]
    return problems


def _training(training: Mapping[str, Any]) -> list[RecipeIssue]:
    problems = []
    for key, table in (("optimizer", OPTIMIZERS), ("lr_schedule", LR_SCHEDULES)):
        if isinstance(training.get(key), Mapping):
            problems += choice_problems(table, training[key], ("training", key))
    return problems


def _models(model: Mapping[str, Any], tiers: Sequence[Mapping[str, Any]], tables: Registry) -> list[RecipeIssue]:
    """The common settings, and every tier's own; a tier with a family of its own has no part in the common ones."""
    family = model.get("family", ModelPart.model_fields["family"].default)
    unknown = [_family_problem(family, ("model", "family"), tables)]
    unknown += [
        _family_problem(t["family"], ("tiers", n, "family"), tables) for n, t in enumerate(tiers) if "family" in t
    ]
    if any(unknown):
        return [one for one in unknown if one]
    common = {key: value for key, value in model.items() if key != "family"}
    problems = setting_problems(tables.models[family], common, ("model",), HANDED_TO_FAMILIES, ["family"])
    missing = {problem.place[-1]: problem for problem in problems if problem.code == "RECIPE_MISSING"}
    problems = [problem for problem in problems if problem.code != "RECIPE_MISSING"]
    for number, tier in enumerate(tiers):
        own = {key: value for key, value in tier.items() if key not in TierPart.model_fields}
        build = tables.models[tier.get("family", family)]
        found = setting_problems(build, own, ("tiers", number), HANDED_TO_FAMILIES, TierPart.model_fields)
        if "family" in tier:
            problems += found
            continue
        problems += [problem for problem in found if problem.code != "RECIPE_MISSING"]
        problems += [problem for name, problem in missing.items() if name not in own]
    return problems


def _family_problem(family: Any, place: tuple[str | int, ...], tables: Registry) -> RecipeIssue | None:
    if isinstance(family, str) and family in tables.models:
        return None
    hint = nearest(str(family), tables.models)
    return RecipeIssue(place, "RECIPE_NAME", "there is no model family of that name", hint, family)


def _tiers(
    tiers: Sequence[Mapping[str, Any]], fleet: Mapping[str, Any], engine: Mapping[str, Any]
) -> list[RecipeIssue]:
    problems = []
    names = [str(tier.get("name")) for tier in tiers]
    shares = [tier.get("share") for tier in tiers]
    if shares and all(isinstance(share, int | float) and not isinstance(share, bool) for share in shares):
        total = math.fsum(float(share) for share in shares)  # type: ignore[arg-type]
        if abs(total - 1) > 1e-6:
            hint = f"they sum to {total:g}; a share is the part of all devices that belongs to the tier"
            problems.append(RecipeIssue(("tiers",), "RECIPE_SHARES", "the tiers' shares must sum to 1", hint))
    for number, name in enumerate(names):
        if name in names[:number] and "name" in tiers[number]:
            problems.append(RecipeIssue(("tiers", number, "name"), "RECIPE_VALUE", "two tiers of one name", value=name))
    named = (
        (("fleet", "eligible"), fleet),
        (("fleet", "device_tiers"), fleet),
        (("engine", "devices_per_block"), engine),
    )
    for place, said in ((place, part.get(place[1])) for place, part in named):
        for name in said if isinstance(said, list | tuple | Mapping) else ():
            if name not in names:
                hint = nearest(str(name), names)
                problems.append(RecipeIssue(place, "RECIPE_NAME", "there is no tier of that name", hint, name))
    return problems

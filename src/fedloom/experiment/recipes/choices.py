"""Settings checked against the function or dataclass they are for: its own signature is the only schema."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .problems import Place, Problem, from_pydantic, nearest

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
) -> list[Problem]:
    """What is wrong with settings; `beside` names keys of the same section that are somebody else's."""
    allowed, hints = settings_of(function, given), _hints(function)
    found = []
    for name, value in settings.items():
        if name in allowed:
            found += _value_problems(hints.get(name, Any), value, (*place, name))
        elif not _takes_anything(function) or not isinstance(name, str):
            hint = nearest(str(name), [*allowed, *beside])
            found.append(Problem((*place, name), "RECIPE_KEY", f"there is no key {name!r} here", hint, value))
    required = [name for name, p in allowed.items() if p.default is p.empty and name not in settings]
    return found + [Problem((*place, name), "RECIPE_MISSING", f"{name} is required") for name in required]


def choice_problems(
    table: Table,
    settings: Mapping[str, Any],
    place: Place,
    key: str = "kind",
    given: Iterable[str] = (),
    beside: Iterable[str] = (),
) -> list[Problem]:
    """What is wrong with the choice of a table's entry by its name, and with the entry's settings."""
    name, rest = settings.get(key), {one: value for one, value in settings.items() if one != key}
    if name is None:
        return [Problem((*place, key), "RECIPE_MISSING", f"{key} is required", nearest("", table))]
    if not isinstance(name, str) or name not in table:
        what = place[-1] if key != "dataset" else "data set"
        return [
            Problem((*place, key), "RECIPE_NAME", f"there is no {what} of that name", nearest(str(name), table), name)
        ]
    return setting_problems(table[name], rest, place, given, [key, *beside])


def picked(
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


def _value_problems(hint: Any, value: Any, place: Place) -> list[Problem]:
    try:
        TypeAdapter(hint).validate_python(plain(value), strict=True)
    except ValidationError as error:
        if _is_union(hint) and len(error.errors()) > 1:  # pydantic says of every form why it is not that one
            return [Problem(place, "RECIPE_TYPE", f"{place[-1]} has none of the forms it can have", value=value)]
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

"""Settings checked against the function or dataclass they are for: its own signature is the only schema."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from .problems import Place, Problem, from_pydantic, nearest


def settings_of(function: Callable[..., Any], given: Iterable[str] = ()) -> dict[str, inspect.Parameter]:
    """What a user may set: the parameters that are not handed over by the project itself."""
    handed = set(given)
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in handed}


def checked(
    function: Callable[..., Any], settings: Mapping[str, Any], place: Place, given: Iterable[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Settings with their types, and what is wrong with them."""
    allowed = settings_of(function, given)
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if p.default is inspect.Parameter.empty else p.default)
        for name, p in allowed.items()
    }
    schema = create_model("Settings", __config__=ConfigDict(extra="forbid", strict=True), **fields)
    try:
        valid = schema(**{key: plain(value) for key, value in settings.items()})
    except ValidationError as error:
        return {}, [from_pydantic(one, allowed, place) for one in error.errors()]
    return {name: getattr(valid, name) for name in settings}, []


def chosen(
    table: Mapping[str, Callable[..., Any]],
    settings: Mapping[str, Any],
    place: Place,
    key: str = "kind",
    given: Iterable[str] = (),
) -> tuple[Callable[..., Any] | None, dict[str, Any], list[Problem]]:
    """An entry of a table by its name, and its settings."""
    rest = dict(settings)
    name = rest.pop(key, None)
    if name is None:
        return None, {}, [Problem((*place, key), "RECIPE_MISSING", f"{key} is required", nearest("", table))]
    if name not in table:
        known = nearest(str(name), table)
        return None, {}, [Problem((*place, key), "RECIPE_NAME", f"there is no {place[-1]} of that name", known, name)]
    valid, problems = checked(table[name], rest, place, given)
    return table[name], valid, problems


def plain(value: Any) -> Any:
    """TOML has arrays where Python's settings have tuples."""
    if isinstance(value, list | tuple):
        return tuple(plain(one) for one in value)
    return value

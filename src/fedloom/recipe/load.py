"""Read a recipe: one TOML file, the user's --set on top, every problem found before anything runs."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .errors import Place, RecipeError, RecipeIssue, from_pydantic
from .registry import Registry
from .schema import Part, Recipe
from .validation import plain, wording_problems

SECTIONS: dict[str, type[Part]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Part)
}


@dataclass(frozen=True)
class Loaded:
    """A recipe, and its text for messages that come later."""

    recipe: Recipe
    source: str = "recipe"
    text: str = ""
    sets: tuple[Place, ...] = ()

    def error(self, *problems: RecipeIssue) -> RecipeError:
        return RecipeError(problems, self.source, self.text, self.sets)

    def changed(self, document: Mapping[str, Any]) -> "Loaded":
        """Another recipe of the same source."""
        return replace(self, recipe=Recipe.model_validate(_as_python(document)))


def load(recipe: str | Path | Mapping[str, Any], tables: Registry, sets: Sequence[str] = ()) -> Loaded:
    """A recipe from a file or from a mapping; raises RecipeError with all that is wrong."""
    source, text, document = _read(recipe)
    places = tuple(_assign(document, assignment) for assignment in sets)
    problems = _shape_problems(document) + wording_problems(document, tables)
    if problems:
        raise RecipeError(_once_each(problems), source, text, places)
    return Loaded(Recipe.model_validate(_as_python(document)), source, text, places)


def _read(recipe: str | Path | Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    if isinstance(recipe, Mapping):
        return "recipe", "", _copy(recipe)
    path = Path(recipe)
    if not path.is_file():
        near = sorted(str(one) for one in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"there are: {', '.join(near[:8])}" if near else "fedloom init heterofl --out my.toml writes one"
        raise RecipeError([RecipeIssue((), "FILE_MISSING", f"there is no file {path}", hint)], str(path))
    try:
        text = path.read_text(encoding="utf-8")
        return str(path), text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([RecipeIssue((), "RECIPE_TOML", str(error))], str(path)) from error


def _assign(document: dict[str, Any], assignment: str) -> Place:
    """`a.b=c` on top of the document; c is a TOML value, or else a word."""
    path, equals, said = assignment.partition("=")
    keys = path.strip().replace("[", ".").replace("]", "").split(".")
    if not equals or not all(keys):
        hint = "write --set training.epochs=2"
        raise RecipeError([RecipeIssue((), "SET_FORM", f"{assignment!r} is not of the form key=value", hint)], "--set")
    try:
        value = tomllib.loads(f"value = {said}")["value"]
    except tomllib.TOMLDecodeError:
        value = said
    target: Any = document
    place: list[str | int] = []
    try:
        for key in keys[:-1]:
            place.append(_key(target, key))
            target = target[int(key)] if isinstance(target, list) else target.setdefault(key, {})
        place.append(_key(target, keys[-1]))
        target[place[-1]] = value
    except (IndexError, TypeError, ValueError, AttributeError):
        raise RecipeError([RecipeIssue((), "SET_PLACE", f"there is no place {path} in the recipe")], "--set") from None
    return tuple(place)


def _key(target: Any, key: str) -> str | int:
    """A key of a table, or a place in a list, which may be counted from its end."""
    return range(len(target))[int(key)] if isinstance(target, list) else key


def _shape_problems(document: Mapping[str, Any]) -> list[RecipeIssue]:
    try:
        Recipe.model_validate(_as_python(document))
    except ValidationError as error:
        found = [from_pydantic(one, _known_keys(tuple(one["loc"]))) for one in error.errors()]
        # a list whose entries are all wrong is also too short, which says nothing new
        return [one for one in found if not any(_inside(other.place, one.place) for other in found)]
    return []


def _inside(place: Place, outer: Place) -> bool:
    return len(place) > len(outer) and place[: len(outer)] == outer


def _known_keys(place: Place) -> list[str]:
    section = SECTIONS.get(str(place[0])) if len(place) > 1 else Recipe
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _as_python(value: Any) -> Any:
    """TOML's arrays as tuples, all the way down."""
    if isinstance(value, Mapping):
        return {key: _as_python(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_python(one) for one in value)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list | tuple) else value


def _once_each(problems: Sequence[RecipeIssue]) -> list[RecipeIssue]:
    """The first finding at each place; two values can be wrong at one place."""
    return list({(one.place, repr(plain(one.value))): one for one in reversed(problems)}.values())[::-1]

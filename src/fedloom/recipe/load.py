"""Load a recipe: a TOML file, with `--set` overrides on top, checked completely before anything runs."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from ..registry import EntryPointError
from .errors import KeyPath, RecipeError, RecipeIssue, issue_from_pydantic, recipe_error
from .registries import Registries
from .schema import Recipe, Section
from .validation import as_tuples, validate_recipe

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Recipe.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe together with its source, so that errors found later can still point to a line."""

    recipe: Recipe
    source: str = "recipe"
    text: str = ""
    overrides: tuple[KeyPath, ...] = ()

    def error(self, *issues: RecipeIssue) -> RecipeError:
        return RecipeError(issues, self.source, self.text, self.overrides)

    def with_document(self, document: Mapping[str, Any]) -> "LoadedRecipe":
        """A changed recipe with the same source."""
        return replace(self, recipe=Recipe.model_validate(as_tuples(document)))


def load(recipe: str | Path | Mapping[str, Any], registries: Registries, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe from a file or a mapping.

    Parameters
    ----------
    overrides: assignments as for `--set`, such as "training.epochs=2".

    Raises
    ------
    RecipeError: with everything that is wrong.
    """
    source, text, document = _read(recipe)
    assigned = tuple(_assign(document, override) for override in overrides)
    try:
        issues = _find_wide_integers(document) + _validate_schema(document) + validate_recipe(document, registries)
    except EntryPointError as error:
        raise recipe_error(source, "ENTRY_POINT", str(error), error.hint) from error
    if issues:
        raise RecipeError(_deduplicate(issues), source, text, assigned)
    return LoadedRecipe(Recipe.model_validate(as_tuples(document)), source, text, assigned)


def _read(recipe: str | Path | Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    if isinstance(recipe, Mapping):
        return "recipe", "", _copy(recipe)
    path = Path(recipe)
    if not path.is_file():
        others = sorted(str(file) for file in path.parent.glob("*.toml")) if path.parent.is_dir() else []
        hint = f"there are: {', '.join(others[:8])}" if others else "fedloom init heterofl --out my.toml writes one"
        raise recipe_error(path, "FILE_MISSING", f"there is no file {path}", hint)
    try:
        text = path.read_text(encoding="utf-8")
        return str(path), text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise recipe_error(path, "RECIPE_TOML", str(error)) from error


def _assign(document: dict[str, Any], override: str) -> KeyPath:
    """Apply `a.b=c` to the document, where c is a TOML value or an unquoted string; returns the key path."""
    dotted_key, equals, text = override.partition("=")
    keys = dotted_key.strip().replace("[", ".").replace("]", "").split(".")
    if not equals or not all(keys):
        message = f"{override!r} is not of the form key=value"
        raise recipe_error("--set", "SET_FORM", message, "write --set training.epochs=2")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    target: Any = document
    key_path: list[str | int] = []
    try:
        for key in keys[:-1]:
            key_path.append(_key(target, key))
            missing = _default_table(tuple(key_path))
            target = target[int(key)] if isinstance(target, list) else target.setdefault(key, missing)
        key_path.append(_key(target, keys[-1]))
        target[key_path[-1]] = value
    except (IndexError, TypeError, ValueError, AttributeError):
        raise recipe_error("--set", "SET_PLACE", f"there is no key {dotted_key} in the recipe") from None
    return tuple(key_path)


def _default_table(key_path: KeyPath) -> dict[str, Any]:
    """What a table is by default, so that `--set training.optimizer.lr=1` changes the default optimizer."""
    if len(key_path) != 2 or str(key_path[0]) not in SECTIONS:
        return {}
    field = SECTIONS[str(key_path[0])].model_fields.get(str(key_path[1]))
    default = field.get_default(call_default_factory=True) if field else None
    if field and default is None and isinstance(field.json_schema_extra, dict):
        default = field.json_schema_extra.get("table")  # of a default that depends on the rest of the recipe
    return dict(default) if isinstance(default, dict) else {}


def _key(target: Any, key: str) -> str | int:
    """A key of a table, or an index of a list; negative indices count from its end."""
    return range(len(target))[int(key)] if isinstance(target, list) else key


def _validate_schema(document: Mapping[str, Any]) -> list[RecipeIssue]:
    try:
        Recipe.model_validate(as_tuples(document))
    except ValidationError as error:
        issues = [issue_from_pydantic(detail, _known_keys(tuple(detail["loc"]))) for detail in error.errors()]
        # a list whose entries are all wrong is also reported as too short, which adds nothing
        return [issue for issue in issues if not any(_is_inside(o.key_path, issue.key_path) for o in issues)]
    return []


def _find_wide_integers(value: Any, key_path: KeyPath = ()) -> list[RecipeIssue]:
    """Whole numbers that no TOML file can portably hold, and that no tensor can; only the seed may have any size."""
    if isinstance(value, Mapping):
        return [issue for key, item in value.items() for issue in _find_wide_integers(item, (*key_path, key))]
    if isinstance(value, list | tuple):
        return [issue for number, item in enumerate(value) for issue in _find_wide_integers(item, (*key_path, number))]
    if isinstance(value, int) and not -(2**63) <= value < 2**63 and key_path != ("seed",):
        return [RecipeIssue(key_path, "RECIPE_RANGE", f"{key_path[-1]} must fit into 64 bits", value=value)]
    return []


def _is_inside(key_path: KeyPath, outer: KeyPath) -> bool:
    return len(key_path) > len(outer) and key_path[: len(outer)] == outer


def _known_keys(key_path: KeyPath) -> list[str]:
    section = SECTIONS.get(str(key_path[0])) if len(key_path) > 1 else Recipe
    return [field.alias or name for name, field in section.model_fields.items()] if section else []


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _deduplicate(issues: Sequence[RecipeIssue]) -> list[RecipeIssue]:
    """The first issue for each key and value; a key can have issues for several values."""
    return list({(issue.key_path, repr(as_tuples(issue.value))): issue for issue in reversed(issues)}.values())[::-1]


def dumps(document: Mapping[str, Any]) -> str:
    """A document as TOML, which has no null: keys whose value is None are left out."""
    return tomli_w.dumps(_without_none(document))


def dumps_value(value: Any) -> str:
    """A single value on one line, as it stands behind `key = `. tomli-w escapes line breaks inside strings."""
    text = tomli_w.dumps({"key": [[_without_none(value)]]}, indent=0).strip()
    for broken, joined in ((",\n]", "]"), ("[\n", "["), (",\n", ", ")):
        text = text.replace(broken, joined)
    return text.removeprefix("key = [[").removesuffix("]]")


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value

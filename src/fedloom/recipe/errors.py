"""Recipe errors: all problems of a recipe reported at once, each with its key, its line and a hint."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from ..registry import suggest

KeyPath = tuple[str | int, ...]

CODES = {
    "extra_forbidden": "RECIPE_KEY",
    "missing": "RECIPE_MISSING",
    "literal_error": "RECIPE_VALUE",
    "greater_than": "RECIPE_RANGE",
    "greater_than_equal": "RECIPE_RANGE",
    "less_than": "RECIPE_RANGE",
    "less_than_equal": "RECIPE_RANGE",
    "too_short": "RECIPE_RANGE",
    "value_error": "RECIPE_VALUE",
    "string_pattern_mismatch": "RECIPE_VALUE",
}
FILE_NAME_RULE = (
    "must consist of letters from a to z, digits and . _ + -, start with a letter, a digit or _, and have at most 100 "
    "characters"
)
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}


@dataclass(frozen=True)
class RecipeIssue:
    """One thing that is wrong with a recipe.

    Parameters
    ----------
    key_path : the key, such as ("tiers", 2, "width"); (): the recipe as a whole.
    code : such as "RECIPE_RANGE".
    message : what is wrong.
    hint : what to do about it; "": nothing better is known than the message says.
    value : the value of the key.
    """

    key_path: KeyPath
    code: str
    message: str
    hint: str = ""
    value: Any = None


class RecipeError(Exception):
    """A recipe or an argument that cannot be used.

    Parameters
    ----------
    issues : everything that is wrong.
    source : the file or option the issues are in.
    text : its content, in which keys have their lines.
    overrides : keys that `--set` assigned; their issues refer to `--set` instead of a line.
    """

    def __init__(
        self, issues: Sequence[RecipeIssue], source: str = "recipe", text: str = "", overrides: Sequence[KeyPath] = ()
    ):
        self.issues, self.source, self.text, self.overrides = list(issues), source, text, overrides
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The message: for every issue its place, the reason, and a hint."""
        numbers = find_key_lines(self.text)
        return [line for issue in self.issues for line in _format(issue, self._locate(issue.key_path, numbers))]

    def _locate(self, key_path: KeyPath, numbers: dict[KeyPath, int]) -> str:
        """The source with the line of the key, or else of the innermost table around it."""
        if any(key_path[: len(override)] == override for override in self.overrides):
            return "--set"
        while key_path and key_path not in numbers:
            key_path = key_path[:-1]
        return f"{self.source}:{numbers[key_path]}" if key_path else self.source


def recipe_error(source: str | Path, code: str, message: str, hint: str = "") -> RecipeError:
    """An error with one issue that belongs to no key: a file, a folder or an option as a whole."""
    return RecipeError([RecipeIssue((), code, message, hint)], str(source))


def dotted(key_path: KeyPath) -> str:
    """("tiers", 2, "width") -> tiers[2].width"""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in key_path).removeprefix(".")


def issue_from_pydantic(error: ErrorDetails, known: Iterable[str] = (), above: KeyPath = ()) -> RecipeIssue:
    """Translate one of pydantic's errors. `known` are keys to suggest; `above` is prepended to its key path."""
    key_path, value, context = (*above, *error["loc"]), error["input"], error.get("ctx", {})
    code, name = CODES.get(error["type"], "RECIPE_TYPE"), str(key_path[-1])
    match code:
        case "RECIPE_KEY":
            return RecipeIssue(key_path, code, f"there is no key {name!r} here", suggest(name, known), value)
        case "RECIPE_MISSING":
            return RecipeIssue(key_path, code, f"{name} is required")
        case "RECIPE_VALUE" if "expected" in context:
            options = re.findall(r"'([^']*)'", context["expected"])
            message = f"{name} must be one of {', '.join(options)}"
            return RecipeIssue(key_path, code, message, suggest(str(value), options), value)
        case "RECIPE_RANGE" if context.keys() & BOUNDS.keys():
            bound = " and ".join(f"{sign} {context[key]}" for key, sign in BOUNDS.items() if key in context)
            return RecipeIssue(key_path, code, f"{name} must be {bound}", value=value)
    if error["type"] == "string_pattern_mismatch":
        return RecipeIssue(key_path, code, f"{name} {FILE_NAME_RULE}", value=value)
    if error["type"] == "too_short":
        return RecipeIssue(key_path, code, f"{name} needs at least {context['min_length']}")
    kind = KINDS.get(error["type"])
    message = f"{name} must be {kind}" if kind else f"{name}: {error['msg']}"
    return RecipeIssue(key_path, code, message, value=value)


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """The line of each key in a TOML text. Good enough for messages: keys of inline tables have their table's line."""
    numbers: dict[KeyPath, int] = {}
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([\w.\"-]+)\s*\]", line)
        if header:
            table = tuple(key.strip('"') for key in header[2].split("."))
            if header[1] == "[[":
                numbers.setdefault(table, number)
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            numbers.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            numbers.setdefault((*table, *(part.strip('"') for part in key[1].split("."))), number)
    return numbers


def _format(issue: RecipeIssue, location: str) -> list[str]:
    value = "" if issue.value is None or isinstance(issue.value, dict | list | tuple) else f" = {issue.value!r}"
    lines = [f"{location}  {dotted(issue.key_path)}{value}".rstrip(), f"  error {issue.code}: {issue.message}"]
    return [*lines, f"  hint: {issue.hint}"] if issue.hint else lines

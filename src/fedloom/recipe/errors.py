"""What is wrong with a recipe: every problem at once, each with its place, its line and how to mend it."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

Place = tuple[str | int, ...]

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
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text in quotes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "finite_number": "a finite number",
}


@dataclass(frozen=True)
class RecipeIssue:
    place: Place
    code: str
    message: str
    hint: str = ""
    value: Any = None


class RecipeError(Exception):
    """A recipe that cannot be run, with all that is wrong with it."""

    def __init__(
        self, problems: Sequence[RecipeIssue], source: str = "recipe", text: str = "", sets: Sequence[Place] = ()
    ):
        self.problems, self.source, self.text, self.sets = list(problems), source, text, sets
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        found = lines_of(self.text)
        return [line for problem in self.problems for line in _describe(problem, self._where(problem.place, found))]

    def _where(self, place: Place, found: dict[Place, int]) -> str:
        if any(place[: len(said)] == said for said in self.sets):
            return "--set"
        while place and place not in found:
            place = place[:-1]
        return f"{self.source}:{found[place]}" if place else self.source


def dotted(place: Place) -> str:
    """("tiers", 2, "width") -> tiers[2].width"""
    said = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return said.removeprefix(".")


def nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def from_pydantic(error: ErrorDetails, known: Iterable[str] = (), above: Place = ()) -> RecipeIssue:
    """One of pydantic's findings in the project's words."""
    place, value, context = (*above, *error["loc"]), error["input"], error.get("ctx", {})
    code, name = CODES.get(error["type"], "RECIPE_TYPE"), str(place[-1])
    match code:
        case "RECIPE_KEY":
            return RecipeIssue(place, code, f"there is no key {name!r} here", nearest(name, known), value)
        case "RECIPE_MISSING":
            return RecipeIssue(place, code, f"{name} is required")
        case "RECIPE_VALUE" if "expected" in context:
            options = re.findall(r"'([^']*)'", context["expected"])
            return RecipeIssue(
                place, code, f"{name} must be one of {', '.join(options)}", nearest(str(value), options), value
            )
        case "RECIPE_RANGE" if context.keys() & BOUNDS.keys():
            bound = " and ".join(f"{sign} {context[key]}" for key, sign in BOUNDS.items() if key in context)
            return RecipeIssue(place, code, f"{name} must be {bound}", value=value)
    if error["type"] == "string_pattern_mismatch":
        return RecipeIssue(
            place, code, f"{name} must be of letters, digits and . _ + -, and open with one of them", value=value
        )
    if error["type"] == "too_short":
        return RecipeIssue(place, code, f"{name} needs at least {context['min_length']}")
    wanted = KINDS.get(error["type"])
    said = f"{name} must be {wanted}" if wanted else f"{name}: {error['msg']}"
    return RecipeIssue(place, code, said, value=value)


def lines_of(text: str) -> dict[Place, int]:
    """Where each key of a TOML text stands. Good enough for messages: keys of inline tables have their table's line."""
    found: dict[Place, int] = {}
    table: Place = ()
    counts: dict[Place, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([\w.\"-]+)\s*\]", line)
        if header:
            table = tuple(part.strip('"') for part in header[2].split("."))
            if header[1] == "[[":
                found.setdefault(table, number)
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            found.setdefault((*table, *(part.strip('"') for part in key[1].split("."))), number)
    return found


def _describe(problem: RecipeIssue, where: str) -> list[str]:
    value = "" if problem.value is None or isinstance(problem.value, dict | list | tuple) else f" = {problem.value!r}"
    lines = [f"{where}  {dotted(problem.place)}{value}".rstrip(), f"  error {problem.code}: {problem.message}"]
    return [*lines, f"  hint: {problem.hint}"] if problem.hint else lines

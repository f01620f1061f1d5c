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
}


@dataclass(frozen=True)
class Problem:
    place: Place
    code: str
    message: str
    hint: str = ""
    value: Any = None


class RecipeError(Exception):
    """A recipe that cannot be run, with all that is wrong with it."""

    def __init__(self, problems: Sequence[Problem], source: str = "recipe", text: str = ""):
        self.problems, self.source, self.text = list(problems), source, text
        super().__init__("\n".join(self.lines()))

    def lines(self) -> list[str]:
        found = lines_of(self.text)
        return [line for problem in self.problems for line in _describe(problem, self.source, found)]


def spell(place: Place) -> str:
    """("tiers", 2, "width") -> tiers[2].width"""
    said = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return said.removeprefix(".")


def nearest(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def from_pydantic(error: ErrorDetails, known: Iterable[str] = (), above: Place = ()) -> Problem:
    """One of pydantic's findings in the project's words."""
    place, value = (*above, *error["loc"]), error["input"]
    code, said = CODES.get(error["type"], "RECIPE_TYPE"), error["msg"]
    hint = ""
    if code == "RECIPE_KEY":
        said, hint = "there is no such key", nearest(str(place[-1]), known)
    elif code == "RECIPE_MISSING":
        said, value = f"{place[-1]} is required", None
    elif code == "RECIPE_VALUE" and isinstance(value, str):
        options = re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", ""))
        said, hint = f"{value!r} is not one of them", nearest(value, options) if options else ""
    else:
        said = f"{place[-1]}: {said[0].lower()}{said[1:]}"
    return Problem(place, code, said, hint, value)


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
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            found.setdefault((*table, *(part.strip('"') for part in key[1].split("."))), number)
    return found


def _describe(problem: Problem, source: str, found: dict[Place, int]) -> list[str]:
    place = problem.place
    while place and place not in found:
        place = place[:-1]
    where = f"{source}:{found[place]}" if place else source
    value = "" if problem.value is None or isinstance(problem.value, dict | list | tuple) else f" = {problem.value!r}"
    lines = [f"{where}  {spell(problem.place)}{value}".rstrip(), f"  error {problem.code}: {problem.message}"]
    return [*lines, f"  hint: {problem.hint}"] if problem.hint else lines

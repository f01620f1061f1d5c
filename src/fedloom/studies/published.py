"""What papers published: every row of their tables and every curve of their figures, as a recipe and its changes.

A table names one recipe; a row is some words, and each word stands for changes to that recipe. So rows that differ in
one value differ in one word, and no recipe is written twice.
"""

import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Len
from pydantic import Field, StringConstraints, model_validator

from ..evaluation import Row
from ..recipe.errors import recipe_error, suggest
from ..recipe.paths import TomlModel, read_toml_model
from ..recipe.schema import FILE_NAME
from ..reporting.ledger import ALL, ClaimSide, ClaimTerms, side_curve
from ..reporting.paired_stats import ACCURACY, METRICS
from ..reporting.targets import bytes_to, cumulative_cost, mean_round_seconds, rounds_to
from ..settings import Share

FOLDER, CLAIMS = "ledger", "claims"
Selection = Literal[
    "last",
    "best",
    "at best global",
    "mean of last 10",
    "rounds to",
    "bytes to",
    "within seconds",
    "seconds per round",
    "cost",
]
Changes = tuple[str, ...]
MODE = re.compile(r"([a-z]\d*)(-[a-z]\d*)*")  # levels and how many of so many devices have them, such as a3-e7


class PublishedNumber(TomlModel):
    """What of a run stands beside a published number. Tier "": the first; "*": all devices, by their shares."""

    tier: str = ""
    candidate: str = ""
    test: str = "global"
    metric: str = "accuracy"
    selection: Selection = "last"
    target: float | None = None

    @property
    def label(self) -> str:
        if self.selection in ("cost", "seconds per round"):
            return f"{self._of} {self.metric}".strip() if self.selection == "cost" else "simulated seconds of a round"
        who = " ".join(word for word in (self.candidate, self._of) if word)
        unit = "" if self.selection == "within seconds" else " %"
        how = self.selection if self.target is None else f"{self.selection} {self.target:g}{unit}"
        return f"{who} {self.metric}, {self.test}, {how}".strip()

    @property
    def _of(self) -> str:
        return "all devices" if self.tier == ALL else self.tier


class PublishedTable(TomlModel):
    """`rows` are words -> published numbers, in the order of `numbers`; "-": not printed. `axes`, of words or one
    of the paper's by name, make rows of all combinations: curves, of which no number is printed."""

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]
    source: str
    recipe: str
    numbers: tuple[PublishedNumber, ...]
    choices: dict[str, Changes] = Field(default_factory=dict)
    rows: dict[str, tuple[float | Literal["-"], ...]] = Field(default_factory=dict)
    axes: tuple[str | Annotated[tuple[str, ...], Len(1)], ...] = ()

    @model_validator(mode="after")
    def _every_number_has_its_place(self) -> "PublishedTable":
        for words, printed in self.rows.items():
            if len(printed) != len(self.numbers):
                raise ValueError(f"the row {words!r} has {len(printed)} numbers, the table {len(self.numbers)}")
        if bool(self.rows) == bool(self.axes):
            raise ValueError("a table has rows or axes")
        return self


class Paper(TomlModel):
    """`levels` are widths by letter; a word such as a-c or a3-e7 then stands for tiers of these widths."""

    paper: str
    levels: dict[str, Share] = Field(default_factory=dict)
    choices: dict[str, Changes] = Field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    registry: Annotated[tuple[PublishedTable, ...], Len(1)]


@dataclass(frozen=True)
class PublishedRow:
    """One row or curve: how to run it, and what was printed."""

    name: str
    source: str
    recipe: Path
    changes: Changes
    numbers: tuple[tuple[PublishedNumber, float | None], ...]

    @property
    def costs_only(self) -> bool:
        return all(number.selection == "cost" for number, _ in self.numbers)


def read_published(recipes: Path) -> dict[str, PublishedRow]:
    """All rows of all papers, by name."""
    found: dict[str, PublishedRow] = {}
    for path in sorted((recipes / FOLDER).glob("*.toml")):
        if path.stem == CLAIMS:
            continue
        for row in expand_rows(read_toml_model(Paper, path), recipes, path):
            if row.name in found:
                raise recipe_error(path, "LIST_FORM", f"there are two rows {row.name!r}")
            found[row.name] = row
    return found


def expand_rows(paper: Paper, recipes: Path, path: Path) -> Iterator[PublishedRow]:
    for table in paper.registry:
        spread: list[tuple[str, Sequence[float | str]]] = list(table.rows.items())
        if table.axes:
            axes = (paper.axes[axis] if isinstance(axis, str) else axis for axis in table.axes)
            spread = [(" ".join(words), ["-"] * len(table.numbers)) for words in product(*axes)]
        for row, printed in spread:
            words = row.split()
            changes = [change for word in words for change in word_changes(word, paper, table, recipes, path)]
            numbers = [(number, said) for number, said in zip(table.numbers, printed, strict=True)]
            yield PublishedRow(
                "_".join((table.name, *words)), f"{paper.paper}, {table.source}", recipes / table.recipe,
                ("compare={}", *changes),  # what stands beside a recipe is no part of one row
                tuple((number, None if isinstance(said, str) else float(said)) for number, said in numbers),
            )  # fmt: skip


def word_changes(word: str, paper: Paper, table: PublishedTable, recipes: Path, path: Path) -> Changes:
    """A word of the table, or of the paper, or levels of width, or an arm that the recipe itself names."""
    arms = arms_of(recipes / table.recipe)
    for known in (table.choices, paper.choices):
        if word in known:
            return known[word]
    if MODE.fullmatch(word) and all(part[0] in paper.levels for part in word.split("-")):
        return (levels(word, paper.levels),)
    if word in arms:
        return tuple(arms[word])
    known_words = {**table.choices, **paper.choices, **arms}
    said = f"nothing says what {word!r} means in {table.name}"
    raise recipe_error(path, "LIST_FORM", said, suggest(word, known_words))


def levels(mode: str, widths: Mapping[str, float]) -> str:
    parts = [(part[0], int(part[1:] or 1)) for part in mode.split("-")]
    total = sum(count for _, count in parts)
    tiers = (f"{{name='{letter}', share={count / total!r}, width={widths[letter]!r}}}" for letter, count in parts)
    return f"tiers=[{', '.join(tiers)}]"


@cache
def arms_of(recipe: Path) -> Mapping[str, Sequence[str]]:
    said = tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
    arms: Mapping[str, Sequence[str]] = said.get("compare", {}).get("arms", {})
    return arms


def measure_number(number: PublishedNumber, rows: Sequence[Row], shares: Mapping[str, float]) -> float | None:
    """The same of a run; None: there is nothing of the kind, or the target was not reached."""
    if number.selection == "seconds per round":
        return mean_round_seconds(rows)
    side = ClaimSide("", number.tier or next(iter(shares)), number.candidate)
    curve = side_curve(rows, side, ClaimTerms("last", "more", number.test, number.metric), shares)
    judged = {round_number: value for round_number, value in curve.items() if math.isfinite(value)}
    if not judged:
        return None
    match number.selection:
        case "best":
            return best(judged, number.metric)[1]
        case "at best global":
            everywhere = side_curve(rows, side, ClaimTerms("last", "more", "global", number.metric), shares)
            return judged.get(best(everywhere, number.metric)[0])
        case "mean of last 10":
            return statistics.fmean(list(judged.values())[-10:])
        case "rounds to" | "bytes to":
            reached = rounds_to(number.target or 0.0, judged, METRICS.get(number.metric, ACCURACY))
            return reached if reached is None or number.selection == "rounds to" else bytes_to(reached, rows)
        case "within seconds":
            spent = cumulative_cost(rows, "seconds")
            in_time = [value for at, value in judged.items() if spent[at] <= (number.target or 0.0)]
            return in_time[-1] if in_time else None
        case _:
            return list(judged.values())[-1]


def best(curve: Mapping[int, float], metric: str) -> tuple[int, float]:
    """The round with the best value, and the value; of perplexities the lowest."""
    sign = -1 if metric.startswith("perplexity") else 1
    return max(curve.items(), key=lambda one: sign * one[1], default=(0, math.nan))

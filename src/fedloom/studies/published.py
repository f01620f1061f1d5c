"""Read recipes/ledger: the rows and curves that papers published, and the list of claims that can be checked quickly.

A table names one recipe; a row is a few words, each of which stands for changes to that recipe, so that rows that
differ in one value differ in one word and no recipe is written twice.
"""

import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Len
from pydantic import Field, StringConstraints, model_validator

from ..evaluation import Row
from ..evaluation.metrics import metric_sign
from ..recipe.errors import recipe_error
from ..recipe.paths import TomlModel, read_toml_model
from ..recipe.schema import FILE_NAME
from ..registry import suggest
from ..reporting.ledger import ALL, ClaimSide, ClaimTerms, Measure, Relation, side_curve
from ..reporting.targets import bytes_to, cumulative_cost, mean_round_seconds, rounds_to
from ..settings import Count, NonNegative, Share

FOLDER, CLAIMS = "ledger", "claims"
Selection = Literal[
    "last", "best", "best of each device", "at best global", "mean of last 10", "rounds to", "bytes to",
    "within seconds", "seconds per round", "cost",
]  # fmt: skip
Changes = tuple[str, ...]
LEVELS = re.compile(r"([a-z]\d*)(-[a-z]\d*)*")  # width levels with the number of devices at each, such as a3-e7
TARGET_MEASURES = ("rounds", "bytes", "gain")  # measures that need a target


class PublishedNumber(TomlModel):
    """The value of a run that corresponds to a published number. Tier "": the first; "*": all devices, by share."""

    tier: str = ""
    candidate: str = ""
    test: str = "global"
    metric: str = "accuracy"
    selection: Selection = "last"
    target: float | None = None

    @property
    def label(self) -> str:
        tier = "all devices" if self.tier == ALL else self.tier
        if self.selection == "cost":
            return f"{tier} {self.metric}".strip()
        if self.selection == "seconds per round":
            return "simulated seconds of a round"
        model = " ".join(word for word in (self.candidate, tier) if word)
        unit = "" if self.selection == "within seconds" else " %"
        selection = self.selection if self.target is None else f"{self.selection} {self.target:g}{unit}"
        return f"{model} {self.metric}, {self.test}, {selection}".strip()


class PublishedTable(TomlModel):
    """A table or figure of a paper.

    `rows` maps words to published numbers, in the order of `numbers`; "-" means not printed. `axes`, each a list of
    words or the name of one of the paper's axes, make a row of every combination: curves without printed numbers.
    `starts` has words whose rows start from the model of another run: that of the row's other words, so
    changed.
    Several tables of one name are parts of it, with numbers of their own.
    """

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]
    source: str
    recipe: str
    numbers: tuple[PublishedNumber, ...]
    choices: dict[str, Changes] = Field(default_factory=dict)
    starts: dict[str, Changes] = Field(default_factory=dict)
    rows: dict[str, tuple[float | Literal["-"], ...]] = Field(default_factory=dict)
    axes: tuple[str | Annotated[tuple[str, ...], Len(1)], ...] = ()

    @model_validator(mode="after")
    def _check_rows(self) -> "PublishedTable":
        for words, printed in self.rows.items():
            if len(printed) != len(self.numbers):
                raise ValueError(f"the row {words!r} has {len(printed)} numbers, the table {len(self.numbers)}")
        if bool(self.rows) == bool(self.axes):
            raise ValueError("a table has either rows or axes")
        return self


class Paper(TomlModel):
    """`levels` are widths by letter; a word such as a-c or a3-e7 then stands for tiers of these widths."""

    paper: str
    levels: dict[str, Share] = Field(default_factory=dict)
    choices: dict[str, Changes] = Field(default_factory=dict)
    axes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    tables: Annotated[tuple[PublishedTable, ...], Len(1)]


@dataclass(frozen=True)
class PublishedRow:
    """A row or curve of a table: the recipe with its changes, and the printed numbers."""

    name: str
    table: str
    source: str
    recipe: Path
    changes: Changes
    numbers: tuple[tuple[PublishedNumber, float | None], ...]
    start: "PublishedRow | None" = None  # the run whose model it starts from

    @property
    def costs_only(self) -> bool:
        return bool(self.numbers) and all(number.selection == "cost" for number, _ in self.numbers)


def read_published(recipes: Path) -> dict[str, PublishedRow]:
    """All rows of all papers, by name."""
    rows: dict[str, PublishedRow] = {}
    for path in sorted((recipes / FOLDER).glob("*.toml")):
        if path.stem == CLAIMS:
            continue
        for row in expand_rows(read_toml_model(Paper, path), recipes, path):
            if row.name in rows:
                raise recipe_error(path, "LIST_FORM", f"there are two rows {row.name!r}")
            rows[row.name] = row
    return rows


def expand_rows(paper: Paper, recipes: Path, path: Path) -> Iterator[PublishedRow]:
    for table in paper.tables:
        rows: list[tuple[str, Sequence[float | str]]] = list(table.rows.items())
        if table.axes:
            axes = (paper.axes[axis] if isinstance(axis, str) else axis for axis in table.axes)
            rows = [(" ".join(words), ["-"] * len(table.numbers)) for words in product(*axes)]
        for row, printed in rows:
            words = row.split()
            changes = {word: word_changes(word, paper, table, recipes, path) for word in words}
            values = [None if isinstance(value, str) else float(value) for value in printed]
            made = PublishedRow(
                "_".join((table.name, *words)), table.name, f"{paper.paper}, {table.source}", recipes / table.recipe,
                ("compare={}", *(change for word in words for change in changes[word])),  # one run, without arms
                tuple(zip(table.numbers, values, strict=True)),
            )  # fmt: skip
            late = [word for word in words if word in table.starts]
            early = [change for word in words for change in (table.starts[word] if word in late else changes[word])]
            before = replace(made, name=f"{made.name}_start", changes=("compare={}", *early), numbers=())
            yield replace(made, start=before if late else None)


def word_changes(word: str, paper: Paper, table: PublishedTable, recipes: Path, path: Path) -> Changes:
    """The changes that a word stands for: a choice of the table or paper, width levels, or an arm of the recipe."""
    arms = _recipe_arms(recipes / table.recipe)
    for choices in (table.choices, paper.choices):
        if word in choices:
            return choices[word]
    if LEVELS.fullmatch(word) and all(part[0] in paper.levels for part in word.split("-")):
        return (_tiers_of_levels(word, paper.levels),)
    if word in arms:
        return tuple(arms[word])
    hint = suggest(word, {**table.choices, **paper.choices, **arms})
    raise recipe_error(path, "LIST_FORM", f"the word {word!r} in {table.name} is not defined", hint)


def _tiers_of_levels(word: str, widths: Mapping[str, float]) -> str:
    parts = [(part[0], int(part[1:] or 1)) for part in word.split("-")]
    total = sum(count for _, count in parts)
    tiers = (f"{{name='{letter}', share={count / total!r}, width={widths[letter]!r}}}" for letter, count in parts)
    return f"tiers=[{', '.join(tiers)}]"


@cache
def _recipe_arms(recipe: Path) -> Mapping[str, Sequence[str]]:
    document = tomllib.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {}
    arms: Mapping[str, Sequence[str]] = document.get("compare", {}).get("arms", {})
    return arms


def measure_number(number: PublishedNumber, rows: Sequence[Row], shares: Mapping[str, float]) -> float | None:
    """The value of a run for a published number; None if it was not measured or the target not reached."""
    if number.selection == "seconds per round":
        return mean_round_seconds(rows)
    side = ClaimSide("", number.tier or next(iter(shares)), number.candidate)
    curve = side_curve(rows, side, ClaimTerms("last", "more", number.test, number.metric), shares)
    values = {round_number: value for round_number, value in curve.items() if math.isfinite(value)}
    if not values:
        return None
    match number.selection:
        case "best":
            return _best_round(values, number.metric)[1]
        case "best of each device":
            return _mean_of_best(number, rows)
        case "at best global":
            on_global = side_curve(rows, side, ClaimTerms("last", "more", "global", number.metric), shares)
            return values.get(_best_round(on_global, number.metric)[0])
        case "mean of last 10":
            return statistics.fmean(list(values.values())[-10:])
        case "rounds to" | "bytes to":
            reached = rounds_to(number.target or 0.0, values, metric_sign(number.metric))
            return reached if reached is None or number.selection == "rounds to" else bytes_to(reached, rows)
        case "within seconds":
            spent = cumulative_cost(rows, "seconds")
            in_time = [value for at, value in values.items() if spent[at] <= (number.target or 0.0)]
            return in_time[-1] if in_time else None
        case _:
            return list(values.values())[-1]


def _mean_of_best(number: PublishedNumber, rows: Sequence[Row]) -> float | None:
    """Every device's best value over rounds, averaged over devices; None if single devices were not evaluated."""
    wanted = (number.test, number.metric, number.candidate)
    by_device: dict[str, list[float]] = {}
    for row in rows:
        if row.device and (row.test, row.metric, number.candidate and row.candidate) == wanted:
            by_device.setdefault(row.device, []).append(row.value)
    best = max if metric_sign(number.metric) > 0 else min
    return statistics.fmean(best(values) for values in by_device.values()) if by_device else None


def _best_round(curve: Mapping[int, float], metric: str) -> tuple[int, float]:
    """The round with the best value, and the value."""
    return max(curve.items(), key=lambda item: metric_sign(metric) * item[1], default=(0, math.nan))


class Claim(TomlModel):
    """A paper's claim that one side is more, less, at least or as much as the other, and how it is measured."""

    name: Annotated[str, StringConstraints(pattern=FILE_NAME)]
    paper: str
    statement: str
    published: str  # the paper's figures and where they are printed
    recipe: str
    this: ClaimSide
    other: ClaimSide
    measure: Measure = "last"
    relation: Relation = "more"
    test: str = "global"
    metric: str = "accuracy"
    within: NonNegative = 0.0
    baseline: ClaimSide | None = None  # its final value, less the margin, is the target
    margin: NonNegative = 1.0

    @model_validator(mode="after")
    def _check_measure(self) -> "Claim":
        if (self.measure in TARGET_MEASURES) != (self.baseline is not None):
            raise ValueError(f"a baseline is needed by the measures {', '.join(TARGET_MEASURES)}, and by no other")
        if self.measure == "gain" and not (self.this.others and self.other.others):
            raise ValueError("a gain is relative to another arm, so both sides need minus")
        if (self.relation == "alike") != (self.within > 0):
            raise ValueError("within is needed by the relation alike, and by no other")
        return self

    @property
    def terms(self) -> ClaimTerms:
        return ClaimTerms(self.measure, self.relation, self.test, self.metric, self.within)

    @property
    def arms(self) -> set[str]:
        sides = [side for side in (self.this, self.other, self.baseline) if side is not None]
        return {arm for side in sides for arm in (side.arm, *side.others)}


class ClaimList(TomlModel):
    seeds: Count = 5
    claims: Annotated[tuple[Claim, ...], Len(1)]

    @cached_property
    def by_name(self) -> Mapping[str, Claim]:
        return {claim.name: claim for claim in self.claims}

    @model_validator(mode="after")
    def _check_names(self) -> "ClaimList":
        if len({claim.name for claim in self.claims}) < len(self.claims):
            raise ValueError("two claims have the same name")
        return self

    def named(self, name: str) -> Claim:
        if name not in self.by_name:
            raise recipe_error("--claim", "CLAIM_NAME", f"there is no claim {name!r}", suggest(name, self.by_name))
        return self.by_name[name]

    def decided_with(self, claim: Claim) -> list[Claim]:
        """All claims that the same comparison decides."""
        return [other for other in self.claims if other.recipe == claim.recipe]

    def comparisons(self) -> Sequence[Claim]:
        """One claim of each comparison."""
        return list({claim.recipe: claim for claim in reversed(self.claims)}.values())[::-1]


def read_claims(recipes: Path) -> ClaimList:
    return read_toml_model(ClaimList, recipes / FOLDER / f"{CLAIMS}.toml")

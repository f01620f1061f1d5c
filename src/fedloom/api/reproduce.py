"""Published results, run again: one row of a paper's table at full size, or claims in minutes."""

import json
import logging
import math
import shlex
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..data import DataError
from ..deploy.remote import attach_engine
from ..engines import keep_freed_memory
from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe, load
from ..recipe.paths import resolve_data_folder
from ..recipe.registries import Registries
from ..registry import suggest
from ..reporting.ledger import (
    full_size_gap,
    read_ledger,
    update_claim_texts,
    update_full_size,
    update_ledger,
    write_claims_section,
    write_full_size_section,
)
from ..results import Record, Result
from ..runs.folder import read_manifest
from ..studies.published import Claim, ClaimList, PublishedRow, read_claims, read_published
from ..studies.reproduce import (
    ReproduceContext,
    RunsFailed,
    check_arms,
    collect_manifests,
    current_commit,
    finished_seeds,
    full_size_entries,
    is_finished,
    ledger_entry,
    read_evidence,
    record_wall_time,
    row_folder,
    row_numbers,
    seed_folder,
    start_comparison,
    start_row,
    wall_folder,
    wall_seconds,
)
from ..wording import format_seconds, pluralize
from .progress import Progress, run_experiment, run_group

__all__ = ["ClaimsResult", "FullSizeResult", "RowResult", "TableResult", "reproduce"]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class RowResult(Result):
    """A row of a paper's table: each number as published and as measured.

    Parameters
    ----------
    row : its name.
    source : the paper and table.
    run : the folder of the run; a row of costs alone has none.
    changes : to the published recipe.
    numbers : with `what`, `published` and `measured`.
    costs_only : no run was needed.
    deviation : how the data differs from the published data set; "" if it does not.
    """

    row: str
    source: str
    run: Path
    changes: tuple[str, ...]
    numbers: tuple[Record, ...]
    costs_only: bool = False
    deviation: str = ""

    @property
    def title(self) -> str:
        changed = f" (changed: {', '.join(self.changes)})" if self.changes else ""
        return f"{self.source}{changed}{f' ({self.deviation})' if self.deviation else ''}"

    def records(self) -> list[Record]:
        return list(self.numbers)

    def content(self) -> dict[str, Any]:
        return {
            "row": self.row, "source": self.source, "run": str(self.run), "changes": list(self.changes),
            "numbers": list(self.numbers), **({"deviation": self.deviation} if self.deviation else {}),
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class TableResult(Result):
    """All rows of a paper's table.

    Parameters
    ----------
    table : its name.
    rows : the result of each row.
    """

    table: str
    rows: tuple[RowResult, ...]

    @property
    def title(self) -> str:
        return f"{self.table}: {pluralize(len(self.rows), 'row')}"

    def records(self) -> list[Record]:
        return [{"row": row.row, **number} for row in self.rows for number in row.numbers]

    def content(self) -> dict[str, Any]:
        return {"table": self.table, "rows": [row.content() for row in self.rows]}


@dataclass(frozen=True, repr=False)
class ClaimsResult(Result):
    """The verdicts on claims of the papers.

    Parameters
    ----------
    claims : entries of the ledger, with `claim`, `published`, `measured`, `seeds` and `verdict`.
    failed : recipes that could not be run, with the reason.
    left : recipes for which the hours were too short, with the reason.
    """

    claims: tuple[Record, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        if self.claims or not self.left:
            return "verdicts on published claims" if self.claims else "every claim has been decided"
        return "no claim could be decided in this time"

    def records(self) -> list[Record]:
        return [
            {"claim": one["claim"], "verdict": one["verdict"], "published": one["published"], **_agreeing(one)}
            for one in self.claims
        ]

    def content(self) -> dict[str, Any]:
        return {"claims": list(self.claims), "failed": self.failed, **({"left": self.left} if self.left else {})}


@dataclass(frozen=True, repr=False)
class FullSizeResult(Result):
    """Rows of papers' tables at full size, as they are in the ledger.

    Parameters
    ----------
    rows : one for each published number, with `row`, `what`, `published`, `measured`, `last`, `rounds` and `seeds`.
    unfinished : the rows for which the time was too short, with the rounds that they have.
    """

    rows: tuple[Record, ...] = ()
    unfinished: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{pluralize(len({one['row'] for one in self.rows}), 'row')} at full size"

    def records(self) -> list[Record]:
        keys = ("row", "what", "published", "measured", "last", "rounds")
        return [{**{key: one[key] for key in keys}, "difference": full_size_gap(one)} for one in self.rows]

    def content(self) -> dict[str, Any]:
        return {"full_size": list(self.rows), "unfinished": self.unfinished}


def _agreeing(entry: Record) -> Record:
    return {"agreeing_seeds": f"{entry['measured']['agreeing_seeds']} of {len(entry['seeds'])}"}


def reproduce(
    name: str | None = None,
    *,
    claim: str | None = None,
    everything: bool = False,
    full: bool = False,
    seeds: int = 1,
    first_seed: int = 0,
    hours: float | None = None,
    recipes: str | Path = "recipes",
    runs: str | Path = "runs/reproduce",
    results: str | Path = "docs/results.json",
    sets: Sequence[str] = (),
    data_dir: str | Path | None = None,
    workers: int = 1,
    progress: Progress = None,
    registries: Registries | None = None,
) -> RowResult | TableResult | FullSizeResult | ClaimsResult:
    """Run one row of a paper's table or all of them, or decide claims over five seeds.

    Parameters
    ----------
    name : a row or a curve; or a table, whose rows are run one after the other.
    claim : or a claim; those that its runs decide too are decided with it.
    everything : or all claims that are not decided yet.
    full : whether the rows are written to the ledger, each over `seeds` seeds; what is there is resumed.
    seeds : of a row with `full`: how many, from `first_seed` on.
    first_seed : the first of them. The ledger keeps the seeds that it has, so machines can share a table.
    hours : with `full` or `everything`: how long to run. Comparisons that are known to take longer are left out, the
        shortest come first; what is unfinished then is resumed by the next call.
    recipes : the folder of recipes, rows and claims.
    runs : where runs are kept and resumed.
    results : the ledger, next to its page.
    sets : changes of a trial; its verdicts are not written to the ledger.
    data_dir, workers, progress, registries : as for `run`.

    Returns
    -------
    RowResult, TableResult, FullSizeResult or ClaimsResult
    """
    if sum((name is not None, claim is not None, everything)) != 1:
        raise RecipeError([RecipeIssue((), "ARGUMENTS", "name a row, or a claim, or ask for everything")], "reproduce")
    _check_full_size(name, everything, full, seeds, first_seed, hours)
    keep_freed_memory()
    context = ReproduceContext(registries or Registries(), resolve_data_folder(data_dir), workers, attach_engine)
    until = None if hours is None else time.monotonic() + 3600 * hours
    if name is not None and full:
        paths = ClaimPaths(Path(recipes), Path(runs), Path(results), list(sets))
        return _reproduce_full_size(name, first_seed, seeds, paths, context, progress, until)
    if name is not None:
        return _reproduce_rows(name, Path(recipes), Path(runs), list(sets), context, progress)
    paths = ClaimPaths(Path(recipes), Path(runs) / "claims", Path(results), list(sets))
    return _decide_claims(claim, paths, context, progress, until)


def _check_full_size(
    name: str | None, everything: bool, full: bool, seeds: int, first_seed: int, hours: float | None
) -> None:
    problems = {
        "--full is about rows: name one, or a table": full and name is None,
        "--seeds needs --full, and at least one": seeds < 1 or (seeds > 1 and not full),
        "--first-seed needs --full, and none below 0": first_seed < 0 or (first_seed > 0 and not full),
        "--hours needs --full or --all, and more than none": hours is not None
        and (hours <= 0 or not (full or everything)),
    }
    found = [message for message, is_one in problems.items() if is_one]
    if found:
        raise RecipeError([RecipeIssue((), "ARGUMENTS", message) for message in found], "reproduce")


@dataclass(frozen=True)
class ClaimPaths:
    """Folder of the recipes of claims or rows, folder of their runs, the ledger; and the changes of a trial."""

    recipes: Path
    runs: Path
    results: Path
    sets: list[str]


def _reproduce_rows(
    name: str, recipes: Path, runs: Path, sets: list[str], context: ReproduceContext, progress: Progress
) -> RowResult | TableResult:
    """A row, or all rows of a table; those that are finished are not run again."""
    rows = _named_rows(name, read_published(recipes))
    results = tuple(_reproduce_row(row, runs, sets, context, progress) for row in rows)
    return results[0] if rows[0].name == name else TableResult(name, results)


def _named_rows(name: str, known: Mapping[str, PublishedRow]) -> list[PublishedRow]:
    """The row, or the rows of the table."""
    rows = [known[name]] if name in known else [row for row in known.values() if row.table == name]
    if not rows:
        hint = suggest(name, known)
        short = hint if len(hint) < 200 else "fedloom reproduce --list shows all"  # too many to name them here
        raise RecipeError([RecipeIssue((), "ROW_NAME", f"there is no row {name!r}", short)], "NAME")
    return rows


def _reproduce_full_size(
    name: str,
    first_seed: int,
    seeds: int,
    paths: ClaimPaths,
    context: ReproduceContext,
    progress: Progress,
    until: float | None,
) -> FullSizeResult:
    """Run rows at full size, seed by seed, and write them to the ledger after each. Trials are not written."""
    known = read_published(paths.recipes)
    rows = [row for row in _named_rows(name, known) if not row.costs_only]
    if not rows:
        message = f"{name} has only the costs of models, which need no run"
        raise RecipeError([RecipeIssue((), "ARGUMENTS", message, "leave out --full")], "reproduce")
    entries, unfinished = list[Record](), dict[str, int]()
    for row in rows:
        finished = True
        for seed in range(first_seed, first_seed + seeds):
            if not finished or (until is not None and time.monotonic() >= until):
                finished = False
                break
            folder = seed_folder(paths.runs, row_folder(paths.runs, row.name, paths.sets).name, seed)
            sets = [*paths.sets, *([f"seed={seed}"] if seed else [])]
            with record_wall_time(wall_folder(folder), _commit(paths)):
                finished = _run_row(row, sets, folder, context, progress, until) is not None
        measured = finished_seeds(paths.runs, row_folder(paths.runs, row.name, paths.sets).name)
        made = full_size_entries(row, measured, context)
        if not finished:
            unfinished[row.name] = min((one["rounds"] for one in made), default=0)
        entries += made
        if made and not paths.sets:
            table = update_full_size(paths.results, made, list(known))
            write_full_size_section(paths.results.with_suffix(".md"), table, _read_analyses(paths.results))
    return FullSizeResult(tuple(entries), unfinished)


def _commit(paths: ClaimPaths) -> str | None:
    return current_commit(paths.recipes, [paths.results, paths.results.with_suffix(".md")])


def _reproduce_row(
    row: PublishedRow, runs: Path, sets: list[str], context: ReproduceContext, progress: Progress
) -> RowResult:
    folder = row_folder(runs, row.name, sets)
    loaded = _run_row(row, sets, folder, context, progress)
    assert loaded is not None  # without a limit in time it is finished
    numbers = row_numbers(row, loaded, folder, context)
    deviation = "" if row.costs_only else str(read_manifest(folder).get("data_deviation", ""))
    return RowResult(row.name, row.source, folder, tuple(sets), tuple(numbers), row.costs_only, deviation)


def _run_row(
    row: PublishedRow,
    sets: list[str],
    folder: Path,
    context: ReproduceContext,
    progress: Progress,
    until: float | None = None,
) -> LoadedRecipe | None:
    """Run the row's recipe, or finish its run; a row of costs alone needs none. None if the time was too short."""
    if row.costs_only:
        return load(row.recipe, context.registries, [*row.changes, *sets])
    if row.start is not None:
        before = folder.with_name(f"{folder.name}_start")
        if _run_row(row.start, sets, before, context, progress, until) is None:
            return None
        row = replace(row, changes=(*row.changes, f"start.from={json.dumps(str(before))}"), start=None)
    started = start_row(row, sets, folder, context)
    if started.experiment is None:
        return started.loaded
    experiment, since = started.experiment, started.since
    finished = run_experiment(experiment, folder, row.name, since, progress=progress, until=until)
    return started.loaded if finished else None


def _decide_claims(
    name: str | None, paths: ClaimPaths, context: ReproduceContext, progress: Progress, until: float | None = None
) -> ClaimsResult:
    """Run the comparison of the named claim, or all comparisons whose claims are not in the ledger yet."""
    known = read_claims(paths.recipes)
    decided = {entry["claim"] for entry in read_ledger(paths.results)["claims"]}
    selected = (
        [known.named(name)]
        if name
        else [
            claim
            for claim in known.comparisons()
            if any(other.name not in decided for other in known.decided_with(claim))
        ]
    )
    if not name and not paths.sets and paths.results.is_file():
        rewrite_page(paths.results, known)  # the list may have changed, whether or not its comparisons can be run here
    entries, failures, left = list[Record](), dict[str, str](), dict[str, str]()
    for claim in selected if until is None else _shortest_first(selected, paths):
        needed = 0.0 if until is None else _expected_seconds(claim, paths)
        if until is not None and time.monotonic() + needed >= until:
            left[claim.recipe] = f"takes {format_seconds(needed)}" if needed else "not started"
            continue
        try:
            decided_now = _decide(claim, known, paths, context, progress, until)
            if decided_now is None:
                left[claim.recipe] = "not finished; the next call goes on"
            entries += decided_now or []
        except (DataError, RunsFailed) as error:
            if name:
                raise
            failures[claim.recipe] = error.message
            logger.warning("%s could not be run: %s", claim.recipe, error.message)
    return ClaimsResult(tuple(entries), failures, left)


def _shortest_first(claims: Sequence[Claim], paths: ClaimPaths) -> list[Claim]:
    """Comparisons by the time that they are known to take; those of which nothing is known come last."""
    return sorted(claims, key=lambda claim: _expected_seconds(claim, paths) or math.inf)


def _expected_seconds(claim: Claim, paths: ClaimPaths) -> float:
    """What is left of the time that the claim's comparison took before, by the ledger; 0 if it never ran."""
    took = [entry["wall_seconds"] for entry in read_ledger(paths.results)["claims"] if entry["recipe"] == claim.recipe]
    spent = wall_seconds(row_folder(paths.runs, Path(claim.recipe).stem, paths.sets))
    return max(took[0] - spent, 0.0) if took else 0.0


def _decide(
    claim: Claim,
    known: ClaimList,
    paths: ClaimPaths,
    context: ReproduceContext,
    progress: Progress,
    until: float | None = None,
) -> list[Record] | None:
    """Finish a comparison and write all verdicts that it gives to the ledger. A trial with changes is not written.

    None if the time was too short.
    """
    recorded = read_ledger(paths.results)["comparisons"].get(claim.recipe)
    planned = start_comparison(claim, paths.recipes, paths.runs, known.seeds, paths.sets, context, recorded)
    decided = known.decided_with(claim)
    for other in decided:
        check_arms(other, list(planned.experiments))
    if not is_finished(planned):
        with record_wall_time(planned.home, _commit(paths)):
            run_group(planned, progress, until)
        if read_manifest(planned.home)["status"] == "interrupted":
            return None
        if planned.unfinished_runs():
            raise RunsFailed(planned)
    evidence = read_evidence(planned)
    entries = [ledger_entry(other, planned, evidence, _command(other.name, paths)) for other in decided]
    if not paths.sets:
        manifests = {claim.recipe: collect_manifests(planned)}
        update_ledger(paths.results, entries, manifests, [other.name for other in known.claims])
        rewrite_page(paths.results, known)
    return entries


def rewrite_page(results: Path, known: ClaimList) -> None:
    """Write the section of claims of the page beside a ledger, with the texts and the number of claims of today."""
    texts = {
        claim.name: {"paper": claim.paper, "statement": claim.statement, "published": claim.published}
        for claim in known.claims
    }
    claims = update_claim_texts(results, texts)
    undecided = len(known.by_name.keys() - {entry["claim"] for entry in claims})
    write_claims_section(results.with_suffix(".md"), claims, undecided, _read_analyses(results))


def _read_analyses(results: Path) -> dict[str, str]:
    file = results.with_name("analyses.toml")
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _command(name: str, paths: ClaimPaths) -> str:
    changes = "".join(f" --set {shlex.quote(change)}" for change in paths.sets)
    return f"fedloom reproduce --claim {name}{changes}"

"""Published results, run again: one row of a paper's table at full size, or claims in minutes."""

import json
import logging
import shlex
import tomllib
from collections.abc import Sequence
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
from ..reporting.ledger import read_ledger, update_claim_texts, update_ledger, write_claims_section
from ..results import Record, Result
from ..runs.folder import read_manifest
from ..studies.published import Claim, ClaimList, PublishedRow, read_claims, read_published
from ..studies.reproduce import (
    ReproduceContext,
    RunsFailed,
    check_arms,
    collect_manifests,
    current_commit,
    is_finished,
    ledger_entry,
    read_evidence,
    record_wall_time,
    row_folder,
    row_numbers,
    start_comparison,
    start_row,
)
from ..wording import pluralize
from .progress import Progress, run_experiment, run_group

__all__ = ["ClaimsResult", "RowResult", "TableResult", "reproduce"]
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
    """

    claims: tuple[Record, ...] = ()
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return "verdicts on published claims" if self.claims else "every claim has been decided"

    def records(self) -> list[Record]:
        return [
            {"claim": one["claim"], "verdict": one["verdict"], "published": one["published"], **_agreeing(one)}
            for one in self.claims
        ]

    def content(self) -> dict[str, Any]:
        return {"claims": list(self.claims), "failed": self.failed}


def _agreeing(entry: Record) -> Record:
    return {"agreeing_seeds": f"{entry['measured']['agreeing_seeds']} of {len(entry['seeds'])}"}


def reproduce(
    name: str | None = None,
    *,
    claim: str | None = None,
    everything: bool = False,
    recipes: str | Path = "recipes",
    runs: str | Path = "runs/reproduce",
    results: str | Path = "docs/results.json",
    sets: Sequence[str] = (),
    data_dir: str | Path | None = None,
    workers: int = 1,
    progress: Progress = None,
    registries: Registries | None = None,
) -> RowResult | TableResult | ClaimsResult:
    """Run one row of a paper's table or all of them, or decide claims over five seeds.

    Parameters
    ----------
    name : a row or a curve; or a table, whose rows are run one after the other.
    claim : or a claim; those that its runs decide too are decided with it.
    everything : or all claims that are not decided yet.
    recipes : the folder of recipes, rows and claims.
    runs : where runs are kept and resumed.
    results : the ledger, next to its page.
    sets : changes of a trial; its verdicts are not written to the ledger.
    data_dir, workers, progress, registries : as for `run`.

    Returns
    -------
    RowResult, TableResult or ClaimsResult
    """
    if sum((name is not None, claim is not None, everything)) != 1:
        raise RecipeError([RecipeIssue((), "ARGUMENTS", "name a row, or a claim, or ask for everything")], "reproduce")
    keep_freed_memory()
    context = ReproduceContext(registries or Registries(), resolve_data_folder(data_dir), workers, attach_engine)
    if name is not None:
        return _reproduce_rows(name, Path(recipes), Path(runs), list(sets), context, progress)
    paths = ClaimPaths(Path(recipes), Path(runs) / "claims", Path(results), list(sets))
    return _decide_claims(claim, paths, context, progress)


@dataclass(frozen=True)
class ClaimPaths:
    """Folder of the claims' recipes, folder of their runs, the ledger; and the changes of a trial."""

    recipes: Path
    runs: Path
    results: Path
    sets: list[str]


def _reproduce_rows(
    name: str, recipes: Path, runs: Path, sets: list[str], context: ReproduceContext, progress: Progress
) -> RowResult | TableResult:
    """A row, or all rows of a table; those that are finished are not run again."""
    known = read_published(recipes)
    rows = [known[name]] if name in known else [row for row in known.values() if row.table == name]
    if not rows:
        hint = suggest(name, known)
        short = hint if len(hint) < 200 else "fedloom reproduce --list shows all"  # too many to name them here
        raise RecipeError([RecipeIssue((), "ROW_NAME", f"there is no row {name!r}", short)], "NAME")
    results = tuple(_reproduce_row(row, runs, sets, context, progress) for row in rows)
    return results[0] if name in known else TableResult(name, results)


def _reproduce_row(
    row: PublishedRow, runs: Path, sets: list[str], context: ReproduceContext, progress: Progress
) -> RowResult:
    folder = row_folder(runs, row.name, sets)
    numbers = row_numbers(row, _run_row(row, sets, folder, context, progress), folder, context)
    deviation = "" if row.costs_only else str(read_manifest(folder).get("data_deviation", ""))
    return RowResult(row.name, row.source, folder, tuple(sets), tuple(numbers), row.costs_only, deviation)


def _run_row(
    row: PublishedRow, sets: list[str], folder: Path, context: ReproduceContext, progress: Progress
) -> LoadedRecipe:
    """Run the row's recipe, or finish its run; a row of costs alone needs none."""
    if row.costs_only:
        return load(row.recipe, context.registries, [*row.changes, *sets])
    if row.start is not None:
        before = folder.with_name(f"{folder.name}_start")
        _run_row(row.start, sets, before, context, progress)
        row = replace(row, changes=(*row.changes, f"start.from={json.dumps(str(before))}"), start=None)
    started = start_row(row, sets, folder, context)
    if started.experiment is not None:
        run_experiment(started.experiment, folder, row.name, started.since, progress=progress)
    return started.loaded


def _decide_claims(name: str | None, paths: ClaimPaths, context: ReproduceContext, progress: Progress) -> ClaimsResult:
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
    entries, failures = list[Record](), dict[str, str]()
    for claim in selected:
        try:
            entries += _decide(claim, known, paths, context, progress)
        except (DataError, RunsFailed) as error:
            if name:
                raise
            failures[claim.recipe] = error.message
            logger.warning("%s could not be run: %s", claim.recipe, error.message)
    if not selected:
        _rewrite_page(paths.results, known)  # the texts of claims may have changed
    return ClaimsResult(tuple(entries), failures)


def _decide(
    claim: Claim, known: ClaimList, paths: ClaimPaths, context: ReproduceContext, progress: Progress
) -> list[Record]:
    """Finish a comparison and write all verdicts that it gives to the ledger. A trial with changes is not written."""
    recorded = read_ledger(paths.results)["comparisons"].get(claim.recipe)
    planned = start_comparison(claim, paths.recipes, paths.runs, known.seeds, paths.sets, context, recorded)
    decided = known.decided_with(claim)
    for other in decided:
        check_arms(other, list(planned.experiments))
    if not is_finished(planned):
        commit = current_commit(paths.recipes, [paths.results, paths.results.with_suffix(".md")])
        with record_wall_time(planned.home, commit):
            run_group(planned, progress)
        if planned.unfinished_runs():
            raise RunsFailed(planned)
    evidence = read_evidence(planned)
    entries = [ledger_entry(other, planned, evidence, _command(other.name, paths)) for other in decided]
    if not paths.sets:
        manifests = {claim.recipe: collect_manifests(planned)}
        update_ledger(paths.results, entries, manifests, [other.name for other in known.claims])
        _rewrite_page(paths.results, known)
    return entries


def _rewrite_page(results: Path, known: ClaimList) -> None:
    texts = {
        claim.name: {"paper": claim.paper, "statement": claim.statement, "published": claim.published}
        for claim in known.claims
    }
    file, claims = results.with_name("analyses.toml"), update_claim_texts(results, texts)
    analyses = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    undecided = len(known.by_name.keys() - {entry["claim"] for entry in claims})
    write_claims_section(results.with_suffix(".md"), claims, undecided, analyses)


def _command(name: str, paths: ClaimPaths) -> str:
    changes = "".join(f" --set {shlex.quote(change)}" for change in paths.sets)
    return f"fedloom reproduce --claim {name}{changes}"

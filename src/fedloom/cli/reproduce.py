"""fedloom reproduce: published results, run again: one row at full size, or a claim in minutes."""

import logging
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, verb
from .output import RUN_FAILED, Exit, columns
from .progress import run_experiment, run_group

if TYPE_CHECKING:
    from ..recipe.load import LoadedRecipe
    from ..studies.published import Claim, ClaimList, PublishedRow
    from ..studies.reproduce import ReproduceContext


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClaimPaths:
    """Folder of the claims' recipes, folder of their runs, the ledger; and the changes of a trial."""

    recipes: Path
    runs: Path
    results: Path
    sets: list[str]


@verb("sets", "data_dir", "workers", "files", "format", "quiet")
def reproduce(
    options: Options,
    name: Annotated[str | None, typer.Argument(help="A row or a curve; with --list, a prefix of names.")] = None,
    claim: Annotated[str | None, typer.Option("--claim", help="Decide a claim, and those its runs decide too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Decide all claims that are not decided yet.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Show rows and claims.")] = False,
    recipes: Annotated[Path, typer.Option("--recipes", help="The folder of recipes and lists.")] = Path("recipes"),
    runs: Annotated[Path, typer.Option("--runs", help="Where runs are kept and resumed.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option("--results", help="The ledger, next to its page.")] = Path(
        "docs/results.json"
    ),
) -> None:
    """Run one row of a paper's table and print published next to measured; or decide claims over five seeds."""
    from ..deploy.remote import attach_engine
    from ..engines import keep_freed_memory
    from ..recipe.errors import RecipeError, RecipeIssue
    from ..studies.reproduce import ReproduceContext

    keep_freed_memory()
    context = ReproduceContext(options.registry, options.data, options.processes, attach_engine)
    if sum((listing, claim is not None, everything, name is not None and not listing)) != 1:
        raise RecipeError([RecipeIssue((), "ARGUMENTS", "name a row, --claim, --all or --list")], "reproduce")
    if listing:
        _list(options, recipes, results, name or "")
    elif name is not None:
        _reproduce_row(options, name, recipes, runs, context)
    else:
        _decide_claims(options, claim, ClaimPaths(recipes, runs / "claims", results, options.sets), context)


def _list(options: Options, recipes: Path, results: Path, prefix: str) -> None:
    from ..reporting.ledger import read_ledger
    from ..studies.published import read_claims, read_published

    rows = [row for row in read_published(recipes).values() if row.name.startswith(prefix)]
    claims = [claim for claim in read_claims(recipes).claims if claim.name.startswith(prefix)]
    verdicts = {entry["claim"]: entry["verdict"] for entry in read_ledger(results)["claims"]}
    row_cells = [(row.name, row.source, " ".join(_cell(value) for _, value in row.numbers)) for row in rows]
    claim_cells = [(claim.name, claim.paper, verdicts.get(claim.name, "not yet"), claim.statement) for claim in claims]
    texts = (
        columns(("row", "source", "published"), row_cells) if rows else "no such row",
        columns(("claim", "paper", "verdict", "statement"), claim_cells) if claims else "no such claim",
    )
    data = {"rows": [_row_record(row) for row in rows], "claims": [_claim_record(one, verdicts) for one in claims]}
    options.show(data, "\n\n".join(texts))


def _row_record(row: "PublishedRow") -> dict[str, Any]:
    return {
        "name": row.name, "source": row.source, "recipe": row.recipe.as_posix(), "changes": list(row.changes),
        "numbers": [{"what": number.label, "published": value} for number, value in row.numbers],
    }  # fmt: skip


def _claim_record(claim: "Claim", verdicts: dict[str, str]) -> dict[str, Any]:
    about = {key: getattr(claim, key) for key in ("name", "paper", "statement", "published", "recipe")}
    return {**about, "arms": sorted(claim.arms), "verdict": verdicts.get(claim.name)}


def _reproduce_row(options: Options, name: str, recipes: Path, runs: Path, context: "ReproduceContext") -> None:
    from ..studies.reproduce import row_folder, row_numbers

    row, folder, changes = _find_row(name, recipes), row_folder(runs, name, options.sets), options.sets
    numbers = row_numbers(row, _run_row(row, changes, folder, context), folder, context)
    title = f"{row.source}{' (changed: ' + ', '.join(changes) + ')' if changes else ''}"
    cells = [(number["what"], _cell(number["published"]), _cell(number["measured"])) for number in numbers]
    table = columns(("number", "published", "measured"), cells)
    options.show(
        {"row": name, "source": row.source, "run": str(folder), "changes": changes, "numbers": numbers},
        f"{title}\n{table}" + ("" if row.costs_only else f"\n\nrun: {folder}"),
    )


def _find_row(name: str, recipes: Path) -> "PublishedRow":
    from ..recipe.errors import RecipeError, RecipeIssue, suggest
    from ..studies.published import read_published

    known = read_published(recipes)
    if name not in known:
        hint = suggest(name, known)
        short = hint if len(hint) < 200 else "fedloom reproduce --list shows all"  # too many to name them here
        raise RecipeError([RecipeIssue((), "ROW_NAME", f"there is no row {name!r}", short)], "NAME")
    return known[name]


def _run_row(row: "PublishedRow", sets: list[str], folder: Path, context: "ReproduceContext") -> "LoadedRecipe":
    """Run the row's recipe, or finish its run; a row of costs alone needs none."""
    from ..recipe.load import load
    from ..studies.reproduce import start_row

    if row.costs_only:
        return load(row.recipe, context.registry, [*row.changes, *sets])
    started = start_row(row, sets, folder, context)
    if started.experiment is not None:
        run_experiment(started.experiment, folder, row.name, started.since)
    return started.loaded


def _decide_claims(options: Options, name: str | None, paths: ClaimPaths, context: "ReproduceContext") -> None:
    """Run the comparison of the named claim, or all comparisons whose claims are not in the ledger yet."""
    from ..data import DataError
    from ..reporting.ledger import read_ledger
    from ..studies.published import read_claims
    from ..studies.reproduce import RunsFailed

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
    entries, failures = [], {}
    for claim in selected:
        try:
            entries += _decide(claim, known, paths, context)
        except (DataError, RunsFailed) as error:
            if name:
                raise
            failures[claim.recipe] = error.message
            logger.warning("%s could not be run: %s", claim.recipe, error.message)
    results = None if paths.sets else str(paths.results)
    text = "\n".join(_entry_text(entry) for entry in entries) if selected else "every claim has been decided"
    options.show({"claims": entries, "failed": failures, "results": results}, text)
    if not selected:
        _rewrite_page(paths.results, known)  # the texts of claims may have changed
    if failures:
        raise Exit(RUN_FAILED)


def _decide(claim: "Claim", known: "ClaimList", paths: ClaimPaths, context: "ReproduceContext") -> list[dict[str, Any]]:
    """Finish a comparison and write all verdicts that it gives to the ledger. A trial with changes is not written."""
    from ..reporting.ledger import update_ledger
    from ..studies.reproduce import (
        RunsFailed,
        check_arms,
        collect_manifests,
        current_commit,
        is_finished,
        ledger_entry,
        read_evidence,
        record_wall_time,
        start_comparison,
    )

    planned = start_comparison(claim, paths.recipes, paths.runs, known.seeds, paths.sets, context)
    decided = known.decided_with(claim)
    for other in decided:
        check_arms(other, list(planned.experiments))
    if not is_finished(planned):
        commit = current_commit(paths.recipes, [paths.results, paths.results.with_suffix(".md")])
        with record_wall_time(planned.home, commit):
            run_group(planned)
        if planned.unfinished_runs():
            raise RunsFailed(planned)
    evidence = read_evidence(planned)
    entries = [ledger_entry(other, planned, evidence, _command(other.name, paths)) for other in decided]
    if not paths.sets:
        manifests = {claim.recipe: collect_manifests(planned)}
        update_ledger(paths.results, entries, manifests, [other.name for other in known.claims])
        _rewrite_page(paths.results, known)
    return entries


def _rewrite_page(results: Path, known: "ClaimList") -> None:
    import tomllib

    from ..reporting.ledger import update_claim_texts, write_claims_section

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


def _entry_text(entry: dict[str, Any]) -> str:
    measured = entry["measured"]
    title = f"{entry['claim']}: {entry['verdict']} ({measured['agreeing_seeds']} of {len(entry['seeds'])} seeds)"
    return f"{title}\n  published: {entry['published']}\n  measured:  {measured['text']}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")

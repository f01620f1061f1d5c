"""fedloom reproduce: what papers published, run again: one row at full size, or a claim in minutes."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, OutputFormat, Quiet, Sets, With, Workers, own_tables, processes
from .output import RUN_FAILED, Exit, Format, columns, exits, note, say, say_json
from .progress import follow, follow_several

if TYPE_CHECKING:
    from ..recipe.load import Loaded
    from ..studies.claims import Claim, Claims
    from ..studies.published import Published
    from ..studies.reproduce import Place


Row = Annotated[str | None, typer.Argument(help="A row or a curve; with --list, how names begin.")]
ClaimName = Annotated[str | None, typer.Option("--claim", help="Decide a claim, and those its runs decide too.")]
Everything = Annotated[bool, typer.Option("--all", help="Decide all claims that are not decided yet.")]
Listing = Annotated[bool, typer.Option("--list", help="Show rows and claims.")]
Recipes = Annotated[Path, typer.Option("--recipes", help="The folder of recipes and lists.")]
Runs = Annotated[Path, typer.Option("--runs", help="Where runs are kept, and go on.")]
Results = Annotated[Path, typer.Option("--results", help="The ledger; the page beside it is rewritten too.")]


def reproduce(
    name: Row = None,
    claim: ClaimName = None,
    everything: Everything = False,
    listing: Listing = False,
    sets: Sets = [],  # noqa: B006 - typer reads it, nobody changes it
    recipes: Recipes = Path("recipes"),
    runs: Runs = Path("runs/reproduce"),
    results: Results = Path("docs/results.json"),
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
    quiet: Quiet = False,
) -> None:
    """Run one row of a paper's table and print published beside measured; or decide claims over five seeds."""
    with exits(format):
        from ..deploy.remote import engaged
        from ..engines import keep_the_heap
        from ..recipe.errors import RecipeError, RecipeIssue
        from ..recipe.paths import data_folder
        from ..studies.reproduce import Place

        keep_the_heap()
        place = Place(
            own_tables(files), data_folder(data_dir), processes(workers), lambda said: note(said, quiet), engaged
        )
        if sum((listing, claim is not None, everything, name is not None and not listing)) != 1:
            raise RecipeError([RecipeIssue((), "ARGUMENTS", "say a row, --claim, --all or --list")], "reproduce")
        if listing:
            show(recipes, results, name or "", format)
        elif name is not None:
            run_row(name, recipes, sets, runs, place, format, quiet)
        else:
            run_claims(claim, Where(recipes, runs / "claims", results, sets), place, format, quiet)


@dataclass(frozen=True)
class Where:
    """Where the list of claims, their runs and the ledger are; and what a trial changes."""

    recipes: Path
    runs: Path
    results: Path
    sets: list[str]


def show(recipes: Path, results: Path, beginning: str, format: Format) -> None:
    from ..reporting.ledger import read_ledger
    from ..studies.claims import read_claims
    from ..studies.published import read_published

    rows = [row for row in read_published(recipes).values() if row.name.startswith(beginning)]
    claims = [claim for claim in read_claims(recipes).claims if claim.name.startswith(beginning)]
    verdicts = {one["claim"]: one["verdict"] for one in read_ledger(results)["claims"]}
    if format is Format.json:
        say_json({"rows": [_row(row) for row in rows], "claims": [_claim(one, verdicts) for one in claims]})
        return
    lines = [(row.name, row.source, " ".join(_cell(said) for _, said in row.numbers)) for row in rows]
    say(columns(("row", "source", "published"), lines) if lines else "no such row")
    told = [(one.name, one.paper, verdicts.get(one.name, "not yet"), one.statement) for one in claims]
    say("\n" + columns(("claim", "paper", "verdict", "statement"), told) if told else "\nno such claim")


def _row(row: "Published") -> dict[str, Any]:
    numbers = [{"what": number.said, "published": said} for number, said in row.numbers]
    return {
        "name": row.name, "source": row.source, "recipe": row.recipe.as_posix(), "changes": list(row.changes),
        "numbers": numbers,
    }  # fmt: skip


def _claim(claim: "Claim", verdicts: dict[str, str]) -> dict[str, Any]:
    about = {key: getattr(claim, key) for key in ("name", "paper", "statement", "published", "recipe")}
    return {**about, "arms": sorted(claim.arms), "verdict": verdicts.get(claim.name)}


def run_row(name: str, recipes: Path, sets: list[str], runs: Path, place: "Place", format: Format, quiet: bool) -> None:
    from ..studies.reproduce import row_folder, row_result

    row, folder = named_row(name, recipes), row_folder(runs, name, sets)
    found = row_result(row, row_run(row, sets, folder, place, quiet), folder, place)
    if format is Format.json:
        say_json({"row": name, "source": row.source, "run": str(folder), "changes": sets, "numbers": found})
        return
    say(f"{row.source}{' (changed: ' + ', '.join(sets) + ')' if sets else ''}")
    cells = [(one["what"], _cell(one["published"]), _cell(one["measured"])) for one in found]
    say(columns(("number", "published", "measured"), cells))
    if not row.costs_only:
        say(f"\nrun: {folder}")


def named_row(name: str, recipes: Path) -> "Published":
    from ..recipe.errors import RecipeError, RecipeIssue, nearest
    from ..studies.published import read_published

    known = read_published(recipes)
    if name not in known:
        hint = nearest(name, known)
        short = hint if len(hint) < 200 else "fedloom reproduce --list shows all"  # there are too many to name them
        raise RecipeError([RecipeIssue((), "ROW_NAME", f"there is no row {name!r}", short)], "NAME")
    return known[name]


def row_run(row: "Published", sets: list[str], folder: Path, place: "Place", quiet: bool) -> "Loaded":
    """Have a row's run finished, where it needs one; its recipe."""
    from ..recipe.load import load
    from ..studies.reproduce import begin_row

    if row.costs_only:
        return load(row.recipe, place.tables, [*row.changes, *sets])
    begun = begin_row(row, sets, folder, place)
    if begun.experiment is not None:
        follow(begun.experiment, folder, row.name, quiet, begun.since)
    return begun.loaded


def run_claims(name: str | None, where: Where, place: "Place", format: Format, quiet: bool) -> None:
    """The named claim's comparison, or all that decide a claim which the ledger does not have yet."""
    from ..data import DataError
    from ..reporting.ledger import read_ledger
    from ..studies.claims import read_claims
    from ..studies.reproduce import RunsFailed

    listed = read_claims(where.recipes)
    decided = {one["claim"] for one in read_ledger(where.results)["claims"]}
    open_ones = [one for one in listed.claims if one.name not in decided]
    wanted = (
        [listed.named(name)] if name else [one for one in listed.comparisons() if _any_open(one, listed, open_ones)]
    )
    entries, failures = [], []
    for claim in wanted:
        try:
            entries += decide(claim, listed, where, place, quiet)
        except (DataError, RunsFailed) as error:
            if name:
                raise
            failures.append((claim.recipe, error.message))
            note(f"{claim.recipe} could not be run: {error.message}")
    if format is Format.json:
        say_json({"claims": entries, "failed": dict(failures), "results": None if where.sets else str(where.results)})
    else:
        say("\n".join(_told(one) for one in entries) if wanted else "every claim has been decided")
    if not wanted:
        rewrite_page(where.results, listed)  # what is said about verdicts may have changed
    if failures:
        raise Exit(RUN_FAILED)


def _any_open(claim: "Claim", listed: "Claims", open_ones: "list[Claim]") -> bool:
    return any(one in open_ones for one in listed.decided_with(claim))


def decide(claim: "Claim", listed: "Claims", where: Where, place: "Place", quiet: bool) -> list[dict[str, Any]]:
    """Run what is left of a comparison, and write down all that it decides. A trial with changes is not written."""
    from ..reporting.ledger import merge
    from ..studies.reproduce import (
        RunsFailed,
        begin_comparison,
        commit_of,
        entry,
        evidence,
        is_finished,
        manifests,
        on_the_clock,
        refuse_unknown_arms,
    )

    planned = begin_comparison(claim, where.recipes, where.runs, listed.seeds, where.sets, place)
    together = listed.decided_with(claim)
    for one in together:
        refuse_unknown_arms(one, list(planned.experiments))
    if not is_finished(planned):
        commit = commit_of(where.recipes, [where.results, where.results.with_suffix(".md")])
        with on_the_clock(planned.home, commit):
            follow_several(planned, quiet)
        if planned.left():
            raise RunsFailed(planned)
    seen = evidence(planned)
    found = [entry(one, planned, seen, command(one.name, where)) for one in together]
    if not where.sets:
        merge(where.results, found, {claim.recipe: manifests(planned)}, [one.name for one in listed.claims])
        rewrite_page(where.results, listed)
    return found


def rewrite_page(results: Path, listed: "Claims") -> None:
    import tomllib

    from ..reporting.ledger import reword, rewrite

    words = {
        one.name: {"paper": one.paper, "statement": one.statement, "published": one.published} for one in listed.claims
    }
    notes, claims = results.with_name("analyses.toml"), reword(results, words)
    said = tomllib.loads(notes.read_text(encoding="utf-8")) if notes.is_file() else {}
    rewrite(results.with_suffix(".md"), claims, len(listed.by_name.keys() - {one["claim"] for one in claims}), said)


def command(name: str, where: Where) -> str:
    changes = "".join(f" --set {shlex.quote(one)}" for one in where.sets)
    return f"fedloom reproduce --claim {name}{changes}"


def _told(one: dict[str, Any]) -> str:
    said = f"{one['claim']}: {one['verdict']} ({one['measured']['agreeing_seeds']} of {len(one['seeds'])} seeds)"
    return f"{said}\n  published: {one['published']}\n  measured:  {one['measured']['text']}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")

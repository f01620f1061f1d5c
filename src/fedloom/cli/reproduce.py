"""fedloom reproduce: published results, run again: one row at full size, or a claim in minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..wording import pluralize
from .options import Options, verb
from .output import RUN_FAILED, Exit, columns

if TYPE_CHECKING:
    from ..studies.published import Claim, PublishedRow


@verb("sets", "data_dir", "workers", "files", "format", "quiet")
def reproduce(
    options: Options,
    name: Annotated[
        str | None, typer.Argument(help="A row, a curve or a table; with --list, a prefix of names.")
    ] = None,
    claim: Annotated[str | None, typer.Option("--claim", help="Decide a claim, and those its runs decide too.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Decide all claims that are not decided yet.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Write rows at full size to the ledger; resumes what is there.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", help="With --full: seeds of each row.")] = 1,
    first_seed: Annotated[int, typer.Option("--first-seed", help="With --full: the first of them.")] = 0,
    hours: Annotated[float | None, typer.Option("--hours", help="With --full or --all: how long to run.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Show rows and claims.")] = False,
    recipes: Annotated[Path, typer.Option("--recipes", help="The folder of recipes and lists.")] = Path("recipes"),
    runs: Annotated[Path, typer.Option("--runs", help="Where runs are kept and resumed.")] = Path("runs/reproduce"),
    results: Annotated[Path, typer.Option("--results", help="The ledger, next to its page.")] = Path(
        "docs/results.json"
    ),
) -> None:
    """Run a row of a paper's table, or all of it, and print published next to measured; or decide claims."""
    from ..api.reproduce import FullSizeResult, RowResult, TableResult, reproduce
    from ..recipe.errors import RecipeError, RecipeIssue

    if sum((listing, claim is not None, everything, name is not None and not listing)) != 1:
        raise RecipeError([RecipeIssue((), "ARGUMENTS", "name a row, --claim, --all or --list")], "reproduce")
    if listing:
        _list(options, recipes, results, name or "")
        return
    result = reproduce(
        name, claim=claim, everything=everything, full=full, seeds=seeds, first_seed=first_seed, hours=hours,
        recipes=recipes, runs=runs, results=results, sets=options.sets, data_dir=options.data,
        workers=options.processes, registries=options.registries,
    )  # fmt: skip
    if isinstance(result, RowResult):
        cells = [(number["what"], _cell(number["published"]), _cell(number["measured"])) for number in result.numbers]
        table = columns(("number", "published", "measured"), cells)
        folder = "" if result.costs_only else f"\n\nrun: {result.run}"
        options.show(result.to_dict(), f"{result.title}\n{table}{folder}")
        return
    if isinstance(result, TableResult):
        lines = [
            (row.row, number["what"], _cell(number["published"]), _cell(number["measured"]))
            for row in result.rows
            for number in row.numbers
        ]
        table = columns(("row", "number", "published", "measured"), lines)
        options.show(result.to_dict(), f"{result.rows[0].title}\n{table}")
        return
    if isinstance(result, FullSizeResult):
        keys = ("published", "measured", "difference", "last")
        lines = [
            (one["row"], one["what"], *(_cell(one[key]) for key in keys), str(one["rounds"]))
            for one in result.records()
        ]
        open_rows = "".join(f"\n{row}: {rounds} rounds so far" for row, rounds in result.unfinished.items())
        table = columns(("row", "number", *keys, "rounds"), lines) if lines else "no round was finished"
        options.show({**result.to_dict(), "results": None if options.sets else str(results)}, table + open_rows)
        return
    text = "\n".join(_entry_text(entry) for entry in result.claims) or result.title
    left = "".join(f"\n{recipe}: {reason}" for recipe, reason in result.left.items())
    options.show({**result.to_dict(), "results": None if options.sets else str(results)}, text + left)
    if result.failed:
        raise Exit(RUN_FAILED)


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


def _entry_text(entry: dict[str, Any]) -> str:
    measured = entry["measured"]
    agreeing = f"{measured['agreeing_seeds']} of {pluralize(len(entry['seeds']), 'seed')}"
    title = f"{entry['claim']}: {entry['verdict']} ({agreeing})"
    return f"{title}\n  published: {entry['published']}\n  measured:  {measured['text']}"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")

"""fedloom report: one page that shows what happened, of a run, of several, or of one that is still going on."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import OutputFormat
from .output import BAD_INPUT, Exit, Format, exits, note, report_failure, say, say_json

if TYPE_CHECKING:
    from ..reporting.report_data import ReportData


PAGE = "report.html"


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the one of a comparison.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; else report.html in the run's, or comparison's, folder.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="Which evaluation: global or local; else global, if there is one.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again and again until the run is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 5.0,
    format: OutputFormat = Format.text,
) -> None:
    """Write one HTML page, which needs no network, with all figures, and a CSV behind each of them."""
    with exits(format):
        from ..reporting.report_data import NoReport

        try:
            file = out or _place(runs)
            found = write_page(runs, file, test)
            while watch and found.under_way:
                time.sleep(every)
                found = write_page(runs, file, test)
        except NoReport as problem:
            report_failure("RUN_FOLDER", str(problem), problem.hint, format is Format.json)
            raise Exit(BAD_INPUT) from None
        if format is Format.json:
            say_json({"report": str(file), "status": "running" if found.under_way else "finished"})
        else:
            say(f"report: {file}")


def _place(runs: list[Path]) -> Path:
    from ..reporting.report_data import NoReport

    if len(runs) > 1:
        raise NoReport("a page of several runs needs a place of its own", "say --out FILE.html")
    return runs[0] / PAGE


def write_page(runs: list[Path], file: Path, test: str | None = None) -> "ReportData":
    from ..reporting.page import figures_of, page
    from ..reporting.report_data import report_data_of

    found = report_data_of(runs, test)
    page(found, figures_of(file)).write(file)
    return found


def page_of(folder: Path, unwanted: bool, wanted: bool = False) -> str:
    """The page at the end of a run, as a line to say; nothing, if nobody wants it. A run that has finished has
    finished, whatever becomes of its page."""
    if not wanted and (unwanted or os.environ.get("FEDLOOM_REPORT", "on") == "off"):
        return ""
    try:
        write_page([folder], folder / PAGE)
    except Exception as error:
        note(f"no report: {type(error).__name__}: {error}; `fedloom report {folder}` says more")
        return ""
    return f"report: {folder / PAGE}"

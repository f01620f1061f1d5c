"""fedloom report: one page that shows what happened in a run, in several, or in one that is still going on."""

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..wording import pluralize
from .options import Options, verb
from .output import BAD_INPUT, Exit, OutputFormat, report_failure

if TYPE_CHECKING:
    from ..reporting.report_data import ReportData


logger = logging.getLogger(__name__)

REPORT = "report.html"


@verb("metric", "format")
def report(
    options: Options,
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the one of a comparison.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="The page; default: report.html in the run's or comparison's folder.")
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="global or local (devices' own); default: what the method is for.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Rewrite the page until the run is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two rewrites.")] = 5.0,
) -> None:
    """Write one HTML page, which needs no network, with all figures, and a CSV behind each of them."""
    from ..api.run import write_report
    from ..reporting.report_data import ReportError

    try:
        file = out or _default_file(runs)
        data = write_report(runs, file, test, options.metric, every)
        if watch and data.is_running:
            logger.info("%s is rewritten every %g s until the run is over; Ctrl-C stops watching", file, every)
        shown = None
        while watch and data.is_running:
            if (line := _describe_progress(data)) != shown:
                logger.info("%s", line)
                shown = line
            time.sleep(every)
            data = write_report(runs, file, test, options.metric, every)
    except ReportError as error:
        report_failure("RUN_FOLDER", str(error), error.hint, options.format is OutputFormat.json)
        raise Exit(BAD_INPUT) from None
    status = "running" if data.is_running else "finished"
    options.show({"report": str(file), "status": status}, f"report: {file}")


def _describe_progress(data: "ReportData") -> str:
    """How far the runs are: rounds of each, and what the page says first."""
    from ..reporting.page import write_sentences

    done = sum(reader.rounds for reader in data.readers)
    rounds = sum(reader.recipe["rounds"] for reader in data.readers)
    return f"{done} of {pluralize(rounds, 'round')}: {write_sentences(data)[0]}"


def _default_file(runs: list[Path]) -> Path:
    from ..reporting.report_data import ReportError

    if len(runs) > 1:
        raise ReportError("a page of several runs has no default path", "set --out FILE.html")
    return runs[0] / REPORT


def write_final_report(folder: Path, no_report: bool, required: bool = False) -> str:
    """Write the page at the end of a run; returns the line that names it, or "" without one.

    A failure is logged and not raised: the run itself has finished.
    """
    if not required and (no_report or os.environ.get("FEDLOOM_REPORT", "on") == "off"):
        return ""
    from ..api.run import write_report

    try:
        write_report([folder], folder / REPORT)
    except Exception as error:
        logger.warning("no report: %s: %s; `fedloom report %s` says more", type(error).__name__, error, folder)
        return ""
    return f"report: {folder / REPORT}"

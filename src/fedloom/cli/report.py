"""fedloom report: one page that shows what happened in a run, in several, or in one that is still going on."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Options, verb
from .output import BAD_INPUT, Exit, OutputFormat, report_failure

if TYPE_CHECKING:
    from ..reporting.live import LiveServer

logger = logging.getLogger(__name__)

REPORT = "report.html"
LIVE_SECONDS = 1.0  # between two updates of a page that `run --open` shows
WAIT_FOR_RUN = 120.0  # seconds until a run that --watch waits for must have begun


@verb("metric", "format", "quiet")
def report(
    options: Options,
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or the one of a comparison or search.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The page; default: report.html in the folder, report-A-B.html beside several."),
    ] = None,
    test: Annotated[
        str | None, typer.Option("--test", help="global or local (devices' own); default: what the method is for.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Serve the page on 127.0.0.1 until the run is over.")] = False,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two updates.")] = 5.0,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="For --watch; 0: any free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    parent: Annotated[int, typer.Option("--parent", hidden=True, help="End with this process.")] = 0,
) -> None:
    """Write one HTML page, which needs no network, with all figures, and a CSV behind each of them."""
    from ..api.run import default_report_file, write_report
    from ..reporting.report_data import ReportError

    try:
        if watch:
            _wait_for_runs(runs, parent)
        file = out or default_report_file(runs)
        page = write_report(runs, file, test, options.metric, every)
        if watch and page.is_running:
            with _serving(port) as server:
                server.show(page)
                logger.info("%s shows the run until it is over; Ctrl-C stops watching", server.address)
                if open_page:
                    webbrowser.open(server.address)
                shown = None
                while page.is_running and (not parent or os.getppid() == parent):
                    if page.progress != shown:
                        logger.info("%s", page.progress)
                        shown = page.progress
                    time.sleep(every)
                    page = write_report(runs, file, test, options.metric, every)
                    server.show(page)
                server.wait_until_seen(2 * every + 1)  # so that an open page has the end
        elif open_page:
            webbrowser.open(file.resolve().as_uri())
    except ReportError as error:
        report_failure("RUN_FOLDER", str(error), error.hint, options.format is OutputFormat.json)
        raise Exit(BAD_INPUT) from None
    status = "running" if page.is_running else "finished"
    options.show({"report": str(file), "status": status}, f"report: {file}")


@contextlib.contextmanager
def _serving(port: int) -> "Iterator[LiveServer]":
    from ..reporting.live import LiveServer

    server = LiveServer(port)
    try:
        yield server
    finally:
        server.close()


def _wait_for_runs(runs: list[Path], parent: int) -> None:
    """Wait for runs that have not begun: `--watch` may be started first."""
    from ..api.run import build_report
    from ..reporting.report_data import ReportError

    until = time.monotonic() + (WAIT_FOR_RUN if parent else 0.0)
    while True:
        try:
            build_report(runs)
            return
        except (ReportError, OSError, KeyError, ValueError):  # also files that are just being written
            if time.monotonic() >= until or os.getppid() != parent:
                build_report(runs)
                return
            time.sleep(0.2)


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


@contextlib.contextmanager
def live_page(folder: Path | None) -> Iterator[None]:
    """Show the page of a run while it goes on, from a process of its own; `folder` None: do not.

    A thread of this process would be copied into workers that are forked while it holds a lock.
    """
    if folder is None:
        yield
        return
    port = _free_port()
    words = ["report", str(folder), "--watch", "--open", "--quiet", "--every", str(LIVE_SECONDS), "--port", str(port)]
    command = [sys.executable, "-m", "fedloom", *words, "--parent", str(os.getpid())]
    logger.info("http://127.0.0.1:%d/ shows the run from its first round on", port)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watcher:
        try:
            yield
            if watcher.wait(4 * LIVE_SECONDS + 10):
                logger.warning("the live page ended early; `fedloom report %s` says more", folder)
        except subprocess.TimeoutExpired:
            logger.warning("the live page did not end by itself and was stopped")
        finally:
            watcher.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The command line. Heavy imports wait until a verb runs, so that --help answers at once."""

import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from .. import __version__
from . import (
    attack,
    audit,
    calibrate,
    check,
    cka,
    compare,
    deploy,
    doctor,
    export,
    init,
    listing,
    plan,
    probe,
    report,
    reproduce,
    resume,
    run,
    subnet,
    tune,
)
from .output import BAD_INPUT, INTERRUPTED, OK, Exit, is_usage_error, report_failure, wants_json, write

app = typer.Typer(
    name="fedloom",
    help="Federated learning for devices that cannot all run the same model.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "resume": resume.resume,
    "finish": resume.finish,
    "verify": resume.verify,
    "compare": compare.compare,
    "tune": tune.tune,
    "report": report.report,
    "reproduce": reproduce.reproduce,
    "plan": plan.plan,
    "probe": probe.probe,
    "check": check.check,
    "calibrate": calibrate.calibrate,
    "subnet": subnet.subnet,
    "export": export.export,
    "cka": cka.cka,
    "audit": audit.audit,
    "attack": attack.attack,
    "list": listing.list_names,
    "init": init.init,
    "doctor": doctor.doctor,
}


def _show_version(requested: bool) -> None:
    if requested:
        write(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning for devices that cannot all run the same model."""


for name, command in VERBS.items():
    app.command(name)(command)
app.add_typer(deploy.deploy)


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, so that a run saves its state before it ends."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only it may set signal handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _without_repetition(message: str) -> str:
    """Each sentence once: two of the libraries below suggest the same name."""
    return " ".join(dict.fromkeys(re.split(r"(?<=[.?!]) ", message)))


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and exit with its code."""
    arguments = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with sigterm_interrupts():
            code = typer.main.get_command(app).main(arguments, prog_name="fedloom", standalone_mode=False)
    except Exit as exit:
        raise SystemExit(exit.code) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except Exception as usage:
        if not is_usage_error(usage):
            raise
        hint = f"fedloom {arguments[0]} --help" if arguments[0] in VERBS else "fedloom --help"
        message = _without_repetition(usage.format_message())  # type: ignore[attr-defined]
        report_failure("ARGUMENTS", message, hint, wants_json(arguments))
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(code if isinstance(code, int) else OK)

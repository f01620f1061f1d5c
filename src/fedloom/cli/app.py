"""The command line. Heavy imports wait until a verb runs, so that --help answers at once."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import typer

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
)
from .output import BAD_INPUT, INTERRUPTED, OK, Exit, report_failure, say, wants_json

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
    "verify": resume.verify,
    "compare": compare.compare,
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
    "list": listing.show,
    "init": init.init,
    "doctor": doctor.doctor,
}


def _version(wanted: bool) -> None:
    if wanted:
        say(version("fedloom"))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version, and leave.")
    ] = False,
) -> None:
    """Federated learning for devices that cannot all run the same model."""


for name, verb in VERBS.items():
    app.command(name)(verb)
app.add_typer(deploy.deploy)


@contextmanager
def ended_like_interrupted() -> Iterator[None]:
    """Being asked to end (SIGTERM) is being interrupted: what is unsaved gets saved first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # who may not say what a signal does
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and leave with its exit code."""
    said = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with ended_like_interrupted():
            code = typer.main.get_command(app).main(said, prog_name="fedloom", standalone_mode=False)
    except Exit as done:
        raise SystemExit(done.code) from None
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except Exception as usage:
        # releases of typer bring this class from different places; only a usage error has this method
        if not hasattr(usage, "format_message"):
            raise
        hint = f"fedloom {said[0]} --help" if said[0] in VERBS else "fedloom --help"
        report_failure("ARGUMENTS", usage.format_message(), hint, wants_json(said))
        raise SystemExit(BAD_INPUT) from None
    raise SystemExit(code if isinstance(code, int) else OK)

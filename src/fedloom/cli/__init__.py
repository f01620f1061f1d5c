"""The command line. Heavy imports wait until a verb runs, so that --help answers at once."""

import sys

import click
import typer

from . import check, compare, doctor, init, listing, plan, run
from .output import BAD_INPUT, OK, Exit, report_failure, wants_json

app = typer.Typer(
    name="fedloom",
    help="Federated learning for devices that cannot all run the same model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run.run)
app.command()(compare.compare)
app.command()(plan.plan)
app.command()(check.check)
app.command("list")(listing.show)
app.command()(init.init)
app.command()(doctor.doctor)


def main(arguments: list[str] | None = None) -> None:
    """Run one verb and leave with its exit code."""
    said = sys.argv[1:] if arguments is None else arguments
    try:
        typer.main.get_command(app).main(said, prog_name="fedloom", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as usage:
        sys.stdout.write(usage.format_message() + "\n")
        raise SystemExit(BAD_INPUT) from None
    except click.ClickException as usage:
        hint = f"fedloom {' '.join(said[:1])} --help" if said else "fedloom --help"
        report_failure("ARGUMENTS", usage.format_message(), hint, wants_json(said))
        raise SystemExit(BAD_INPUT) from None
    except Exit as done:
        raise SystemExit(done.code) from None
    raise SystemExit(OK)

"""fedloom deploy: a real fleet. Keys for its devices, its server, a device, how it is, and an end to it."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from .options import DataDir, OutputFormat, Quiet, Seed, Sets, With, read
from .output import RUN_FAILED, TOO_FEW, Exit, Format, columns, exits, note, report_failure, say, say_json

deploy = typer.Typer(
    name="deploy", help="A real fleet: keys, server, device, status, stop.", no_args_is_help=True, add_completion=False
)

FleetFolder = Annotated[Path, typer.Argument(help="The fleet's folder at the server.")]
Bundle = Annotated[Path, typer.Argument(help="The device's folder, as `deploy keys` has made it.")]
Either = Annotated[Path, typer.Argument(help="The folder of a fleet, or of a device.")]
UNTIL_LATE = 600.0  # seconds a round waits for devices where the recipe does not say
END_WITHIN = 60.0  # seconds


def keys(
    folder: FleetFolder,
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Where devices reach it.")] = None,
    devices: Annotated[
        list[str],
        typer.Option(
            "--device", metavar="NAME[:TIER][=PUBLIC]", help="Its name; the largest tier it may carry; its key."
        ),
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    revoked: Annotated[list[str], typer.Option("--revoke", metavar="NAME", help="Its key is worth nothing now.")] = [],  # noqa: B006
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: on this machine alone.")] = False,
    format: OutputFormat = Format.text,
) -> None:
    """Make a fleet: an authority, the server's certificate, and a folder with a key for every device. Again: more."""
    with exits(format):
        from ..deploy.registry import enroll, revoke, wish

        book = revoke(enroll(folder, server, [wish(one) for one in devices], secure=not insecure), revoked)
        bundles = [str(folder / "devices" / one.name) for one in book.entries]
        if format is Format.json:
            say_json({"server": book.server, "devices": [{"name": one.name, "cap": one.cap} for one in book.entries]})
            return
        lines = [(one.name, one.cap or "any", where) for one, where in zip(book.entries, bundles, strict=True)]
        say(columns(("device", "may carry", "copy to the device"), lines))


def server(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    fleet: Annotated[Path, typer.Option("--fleet", help="The fleet's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; gone on with if it is there.")] = None,
    sets: Sets = [],  # noqa: B006
    seed: Seed = None,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006
    quiet: Quiet = False,
) -> None:
    """Serve a fleet until the run has finished: whatever ends is started again, and the run goes on where it was."""
    with exits(Format.text):
        from ..deploy.pidfile import on_duty
        from ..deploy.registry import read_book
        from ..deploy.server import GivenUp, Supervisor
        from ..recipe.paths import data_folder, fresh_folder

        book, folder = read_book(fleet), out or fresh_folder(None, recipe.stem)
        config = {
            "recipe": str(_settled(recipe, fleet, sets, seed, files, data_folder(data_dir)).resolve()),
            "data-dir": str(data_folder(data_dir).resolve()),
            "with": ",".join(str(file.resolve()) for file in files),
        }
        note(f"run: {folder}", quiet)
        try:
            with on_duty(fleet, run=str(folder.resolve())):
                Supervisor(book, folder, config, lambda said: note(said, quiet)).play()
        except GivenUp as error:
            report_failure("GIVEN_UP", str(error), f"logs are in {fleet / 'flower'}", as_json=False)
            raise Exit(TOO_FEW if error.too_few else RUN_FAILED) from None
        _told(folder)


def _settled(recipe: Path, fleet: Path, sets: list[str], seed: int | None, files: list[Path], data: Path) -> Path:
    """The recipe as it is to be run, beside the fleet: refused before anything is started."""
    from ..deploy.apps import refuse_other_size
    from ..deploy.registry import read_book
    from ..recipe.toml import dumps
    from ..runs.build import build, refuse_deployment
    from ..runs.data import outline

    changes = [*sets, 'engine.kind="flower"']
    loaded, tables = read(recipe, changes, seed, files)
    if loaded.recipe.faults.deadline is None:
        loaded, tables = read(recipe, [*changes, f"faults.deadline={UNTIL_LATE}"], seed, files)
    refuse_other_size(loaded, read_book(fleet))
    _, method = build(loaded, tables, outline(loaded, tables, data))
    refuse_deployment(loaded, method)
    path = fleet / "recipe.toml"
    path.write_text(dumps(loaded.recipe.document()), encoding="utf-8")
    return path


def _told(folder: Path) -> None:
    from ..analysis.run import Run
    from .report import page_of
    from .run import final_table

    page = page_of(folder, False)
    say(f"{final_table(Run(folder))}\n\nrun: {folder}" + (f"\n{page}" if page else ""))


def device(
    folder: Bundle,
    data_dir: DataDir = None,
    load: Annotated[Path | None, typer.Option("--load", help="A Python file whose load() reads its data.")] = None,
    files: With = [],  # noqa: B006
    quiet: Quiet = False,
) -> None:
    """Be a device of a fleet until interrupted: measured once, started again whenever it ends."""
    with exits(Format.text):
        from ..deploy.device import Node
        from ..deploy.pidfile import on_duty
        from ..deploy.registry import read_bundle
        from ..deploy.runtime import loader
        from ..recipe.paths import data_folder

        bundle = read_bundle(folder)
        if load is not None:
            loader(load)  # refused now if there is none
        own = {
            "data-dir": str(data_folder(data_dir).resolve()),
            "load": str(load.resolve()) if load else "",
            "with": ",".join(str(file.resolve()) for file in files),
        }
        with on_duty(folder, device=bundle.name):
            Node(bundle, own, lambda said: note(said, quiet)).play()


def status(folder: Either, format: OutputFormat = Format.text) -> None:
    """How a fleet or a device is."""
    with exits(format):
        from ..deploy.pidfile import how_it_is

        found = how_it_is(folder)
        if format is Format.json:
            say_json(found)
            return
        say(found["said"])
        if found.get("devices"):
            lines = [tuple(str(one[key]) for key in ("name", "tier", "heard", "refused")) for one in found["devices"]]
            say("\n" + columns(("device", "tier", "last heard in round", "refusals"), lines))


def stop(folder: Either, format: OutputFormat = Format.text) -> None:
    """End a server or a device, and all that it has started; a run can go on later."""
    with exits(format):
        from ..deploy.pidfile import duty
        from ..flower.processes import alive

        found = duty(folder)
        if found is None:
            say(f"{folder}: nothing is running")
            return
        with suppress(ProcessLookupError):
            os.kill(int(found["pid"]), signal.SIGTERM)
        until = time.monotonic() + END_WITHIN
        while alive(int(found["pid"])):
            if time.monotonic() > until:
                note(f"{folder}: process {found['pid']} does not end", quiet=False)
                raise Exit(RUN_FAILED)
            time.sleep(0.1)
        say(f"{folder}: ended")


for verb in (keys, server, device, status, stop):
    deploy.command(verb.__name__)(verb)

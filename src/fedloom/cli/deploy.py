"""fedloom deploy: a real fleet. Create and renew its keys, run its server or a device, show its status, stop it."""

import logging
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Options, verb
from .output import NO_QUORUM, RUN_FAILED, Exit, columns, report_failure, write
from .report import write_final_report
from .run import final_table

logger = logging.getLogger(__name__)

deploy = typer.Typer(
    name="deploy",
    help="A real fleet: keys, renew, server, device, status, stop.",
    no_args_is_help=True,
    add_completion=False,
)

AnyFolder = Annotated[Path, typer.Argument(help="The folder of a fleet, or of a device.")]
DEFAULT_DEADLINE = 600.0  # seconds a round waits for devices if the recipe sets no deadline
STOP_TIMEOUT = 60.0  # seconds


@deploy.command("keys")
@verb("format")
def keys(
    options: Options,
    folder: Annotated[Path, typer.Argument(help="The fleet's folder at the server.")],
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="Where devices reach it.")] = None,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device", metavar="NAME[:TIER][=PUBLIC]", help="Its name; the largest tier it may train; its public key."
        ),
    ] = None,
    revoked: Annotated[list[str] | None, typer.Option("--revoke", metavar="NAME", help="Reject its key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: only within this machine.")] = False,
    days: Annotated[
        int | None,
        typer.Option("--days", min=1, help="Days for which new server certificates are valid; at first 365."),
    ] = None,
) -> None:
    """Create a fleet: an authority, the server's certificate, a folder with a key per device. Repeat to add devices."""
    from ..deploy.registry import enroll, parse_enroll_request, revoke

    requests = [parse_enroll_request(device) for device in devices or ()]
    registry = revoke(enroll(folder, server, requests, not insecure, days), revoked or ())
    rows = [
        (device.name, device.max_tier or "any", str(folder / "devices" / device.name)) for device in registry.devices
    ]
    listed, ends = [{"name": d.name, "max_tier": d.max_tier} for d in registry.devices], _certificate_ends(folder)
    options.show(
        {"server": registry.server, "devices": listed, "certificates": ends},
        "\n\n".join([columns(("device", "largest tier", "copy to the device"), rows), *_certificate_lines(ends)]),
    )


@deploy.command("renew")
@verb("format")
def renew(
    options: Options,
    folder: Annotated[Path, typer.Argument(help="The fleet's folder at the server.")],
    days: Annotated[
        int | None, typer.Option("--days", min=1, help="Days for which it is valid; default: as the last one.")
    ] = None,
    authority: Annotated[bool, typer.Option("--authority", help="Also renew the authority's certificate.")] = False,
) -> None:
    """Renew the server's certificate. Devices stay enrolled; restart the server to use it."""
    from ..deploy.pidfile import read_running
    from ..deploy.registry import read_fleet_registry, renew

    before = (folder / "ca.crt").read_bytes() if (folder / "ca.crt").exists() else b""
    renew(read_fleet_registry(folder), days, authority)
    lines = []
    if (folder / "ca.crt").read_bytes() != before:
        lines.append("devices fetch the authority's new certificate when they start and once a day")
    if read_running(folder):
        lines.append(f"restart the server to use it: fedloom deploy stop {folder}, then fedloom deploy server …")
    ends = _certificate_ends(folder)
    options.show({"certificates": ends}, "\n".join([*_certificate_lines(ends), *lines]))


def _certificate_ends(folder: Path) -> list[dict[str, Any]]:
    from ..deploy.pidfile import read_status

    ends: list[dict[str, Any]] = read_status(folder)["certificates"]
    return ends


def _certificate_lines(ends: list[dict[str, Any]]) -> list[str]:
    """A table of certificates, with what to do about those that end soon."""
    if not ends:
        return []
    rows = [(one["file"], one["ends"][:10], str(one["days_left"]), "renew it" if one["soon"] else "") for one in ends]
    return [columns(("certificate", "ends", "days left", ""), rows)]


@deploy.command("server")
@verb("sets", "seed", "data_dir", "files", "quiet")
def server(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    fleet: Annotated[Path, typer.Option("--fleet", help="The fleet's folder.")],
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder; resumed if it exists.")] = None,
) -> None:
    """Serve a fleet until the run has finished. A process that ends is restarted, and the run resumed."""
    from ..api.run import Run
    from ..deploy.pidfile import hold_pidfile
    from ..deploy.registry import read_fleet_registry
    from ..deploy.server import ServerSupervisor, SupervisionError
    from ..recipe.paths import choose_output_folder

    registry, folder = read_fleet_registry(fleet), out or choose_output_folder(None, recipe.stem)
    config = {
        "recipe": str(_write_recipe(options, recipe, fleet).resolve()),
        "data-dir": str(options.data.resolve()),
        "with": ",".join(str(file.resolve()) for file in options.files),
    }
    logger.info("run: %s", folder)
    try:
        with hold_pidfile(fleet, run=str(folder.resolve())):
            ServerSupervisor(registry, folder, config).run()
    except SupervisionError as error:
        report_failure("GIVEN_UP", str(error), f"logs are in {fleet / 'flower'}", as_json=False)
        raise Exit(NO_QUORUM if error.too_few_devices else RUN_FAILED) from None
    report = write_final_report(folder, no_report=False)
    write(f"{final_table(Run(folder))}\n\nrun: {folder}" + (f"\n{report}" if report else ""))


def _write_recipe(options: Options, recipe: Path, fleet: Path) -> Path:
    """Write the recipe as it will run into the fleet's folder; raise if it cannot be deployed."""
    from ..analysis.costs import check_message_sizes, tier_costs
    from ..deploy.registry import read_fleet_registry
    from ..recipe.load import dumps
    from ..runs.build import build, check_deployment
    from ..runs.data import read_data_spec

    engine = 'engine.kind="flower"'
    loaded = options.load(recipe, engine)
    if loaded.recipe.faults.deadline is None:
        loaded = options.load(recipe, engine, f"faults.deadline={DEFAULT_DEADLINE}")
    read_fleet_registry(fleet).check_size(loaded)
    _, method = build(loaded, options.registries, read_data_spec(loaded, options.registries, options.data))
    check_deployment(loaded, method)
    check_message_sizes(loaded, tier_costs(loaded, options.registries, options.data))
    path = fleet / "recipe.toml"
    path.write_text(dumps(loaded.recipe.document()), encoding="utf-8")
    return path


@deploy.command("device")
@verb("data_dir", "files", "quiet")
def device(
    options: Options,
    folder: Annotated[Path, typer.Argument(help="The device's folder, as `deploy keys` created it.")],
    load: Annotated[Path | None, typer.Option("--load", help="A Python file whose load() reads its data.")] = None,
) -> None:
    """Run a device of a fleet until interrupted: measured once, restarted whenever it ends."""
    from ..deploy.device import DeviceSupervisor
    from ..deploy.pidfile import hold_pidfile
    from ..deploy.registry import read_bundle
    from ..deploy.runtime import import_load

    bundle = read_bundle(folder)
    if load is not None:
        import_load(load)  # fails now rather than in the first round
    settings = {
        "data-dir": str(options.data.resolve()),
        "load": str(load.resolve()) if load else "",
        "with": ",".join(str(file.resolve()) for file in options.files),
    }
    with hold_pidfile(folder, device=bundle.name):
        DeviceSupervisor(bundle, settings).run()


@deploy.command("status")
@verb("format")
def status(options: Options, folder: AnyFolder) -> None:
    """Show the status of a fleet or a device."""
    from ..deploy.pidfile import read_status

    status = read_status(folder)
    text = status["summary"]
    if status.get("devices"):
        keys = ("name", "tier", "last_round", "refusals")
        rows = [tuple(str(device[key]) for key in keys) for device in status["devices"]]
        text += "\n\n" + columns(("device", "tier", "last reply in round", "refusals"), rows)
    text = "\n\n".join([text, *_certificate_lines(status["certificates"])])
    options.show(status, text)


@deploy.command("stop")
@verb("format")
def stop(options: Options, folder: AnyFolder) -> None:
    """Stop a server or a device with all its processes. The run can be resumed later."""
    from ..deploy.pidfile import read_running
    from ..deploy.processes import is_alive

    running = read_running(folder)
    if running is None:
        options.show({"folder": str(folder), "stopped": False}, f"{folder}: nothing is running")
        return
    pid = int(running["pid"])
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT
    while is_alive(pid):
        if time.monotonic() > deadline:
            logger.warning("%s: process %d does not end", folder, pid)
            raise Exit(RUN_FAILED)
        time.sleep(0.1)
    options.show({"folder": str(folder), "stopped": True}, f"{folder}: ended")

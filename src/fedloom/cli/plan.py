"""fedloom plan: what each tier costs, before it is spent, and which tier real devices can carry."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, OutputFormat, Seed, Sets, With, Workers, processes, read
from .output import Format, columns, exits, say, say_json

if TYPE_CHECKING:
    from ..analysis.costs import TierCost
    from ..analysis.planning import FleetPlan
    from ..analysis.profiling import RoundTime


HEADERS = {
    "name": "tier",
    "parameters": "parameters",
    "macs": "MACs",
    "published_flops": "published FLOPs",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "training_memory": "bytes to train",
    "bytes_down_compressed": "down coded",
    "bytes_up_compressed": "up coded",
    "device_seconds": "s a round",
    "latency_ms": "ms here",
}


def plan(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time one example through each tier's model, on this machine.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also say how long a round takes here, from rounds cut short.")
    ] = False,
    fleet: Annotated[
        list[Path], typer.Option("--fleet", help="Devices as .toml, .csv, or .json of probe: who can carry what.")
    ] = [],  # noqa: B006 - typer reads it, nobody changes it
    headroom: Annotated[
        float, typer.Option("--headroom", min=1.0, help="Memory a device needs, as a multiple of its tensors.")
    ] = 1.5,
    sets: Sets = [],  # noqa: B006
    seed: Seed = None,
    data_dir: DataDir = None,
    workers: Workers = None,
    files: With = [],  # noqa: B006
    format: OutputFormat = Format.text,
) -> None:
    """What each tier costs: size, work, bytes, memory; with --fleet, which tier real devices can carry. No data."""
    with exits(format):
        from ..analysis.costs import tier_costs
        from ..analysis.hardware import read_machines
        from ..analysis.planning import plan_fleet
        from ..analysis.profiling import round_time
        from ..recipe.paths import data_folder

        loaded, tables = read(recipe, sets, seed, files)
        folder, machines = data_folder(data_dir), [one for path in fleet for one in read_machines(path)]
        costs = tier_costs(loaded, tables, folder, latency, memory=True)
        timed = round_time(loaded, tables, folder, processes(workers)) if measure else None
        planned = plan_fleet(loaded, tables, folder, machines, costs, headroom) if machines else None
        if format is Format.json:
            say_json(_record(costs, timed, planned))
        else:
            say("\n\n".join(_told(costs, timed, planned)))


def _record(costs: "list[TierCost]", timed: "RoundTime | None", planned: "FleetPlan | None") -> dict[str, Any]:
    return {
        "tiers": [one.record() for one in costs],
        **({"round": vars(timed)} if timed else {}),
        **({"fleet": planned.record()} if planned else {}),
    }


def _told(costs: "list[TierCost]", timed: "RoundTime | None", planned: "FleetPlan | None") -> list[str]:
    records = [one.record() for one in costs]
    keys = [key for key in HEADERS if any(key in one for one in records)]
    rows = [[_cell(one.get(key)) for key in keys] for one in records]
    parts = [columns([HEADERS[key] for key in keys], rows)]
    if timed:
        noise = "; on noise, for the data is not here" if timed.made_up_data else ""
        parts.append(
            f"a round here: {timed.training:.2f} s of training, {timed.judging:.2f} s of judging, "
            f"{timed.workers} worker{'s' if timed.workers > 1 else ''} (found in {timed.spent:.1f} s{noise})"
        )
    return [*parts, *(_fleet_told(planned) if planned else ())]


def _fleet_told(planned: "FleetPlan") -> list[str]:
    rows = [
        (one["name"], str(one["count"]), one["tier"] or "none", _amount(one["memory"], 1e6), _amount(one["seconds"]),
         one["next"])
        for one in planned.record()["devices"]
    ]  # fmt: skip
    parts = [columns(("device", "count", "tier", "MB", "s a round", "the next larger"), rows)]
    if planned.shares:
        shares = ", ".join(f"{tier} {share:.3g}" for tier, share in planned.shares.items())
        parts.append(f"a round takes {planned.seconds:.3g} s; shares of the tiers: {shares}")
    if planned.regions:
        held = [
            ("+".join(one.tiers), f"{one.parameters:,}", str(one.devices), f"{one.votes:.1f}", f"{one.trained:.1%}")
            for one in planned.regions
        ]
        parts.append(columns(("ring", "parameters", "devices", "votes a round", "rounds trained"), held))
    return parts


def _amount(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"

"""fedloom plan: what each tier costs, before it is spent, and which tier real devices can run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..wording import pluralize, wrap
from .options import Options, verb
from .output import columns

if TYPE_CHECKING:
    from ..analysis.costs import ServerCost, TierCost
    from ..analysis.planning import FleetPlan
    from ..analysis.profiling import RoundTime


HEADERS = {
    "name": "tier",
    "parameters": "parameters",
    "trained_parameters": "trained parameters",
    "macs": "MACs",
    "published_flops": "published FLOPs",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "training_memory": "bytes to train",
    "block_memory": "bytes of a block",
    "bytes_down_compressed": "down compressed",
    "bytes_up_compressed": "up compressed",
    "device_seconds": "s per round",
    "latency_ms": "ms here",
}


@verb("sets", "seed", "data_dir", "workers", "device", "files", "format")
def plan(
    options: Options,
    recipe: Annotated[Path, typer.Argument(help="A recipe.")],
    latency: Annotated[
        bool, typer.Option("--latency", help="Also time one example through each tier's model, on this machine.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also estimate the time of a round here, from shortened rounds.")
    ] = False,
    fleet: Annotated[
        list[Path] | None,
        typer.Option("--fleet", help="Devices as .toml, .csv, or .json of probe: which tier each can run."),
    ] = None,
    headroom: Annotated[
        float, typer.Option("--headroom", min=1.0, help="Memory a device needs, as a multiple of its tensors.")
    ] = 1.5,
) -> None:
    """Costs of each tier: size, compute, bytes, memory; with --fleet, which tier devices can run. Needs no data."""
    from ..api.verbs import plan

    result = plan(
        recipe, latency=latency, measure=measure, fleet=fleet or (), headroom=headroom,
        **options.arguments("sets", "seed", "data_dir", "workers"),
    )  # fmt: skip
    options.show(result.to_dict(), "\n\n".join(_tables(list(result.tiers), result.server, result.round, result.fleet)))


def _tables(
    costs: "list[TierCost]", server: "ServerCost | None", timed: "RoundTime | None", planned: "FleetPlan | None"
) -> list[str]:
    records = [cost.record() for cost in costs]
    keys = [key for key in HEADERS if any(key in record for record in records)]
    rows = [[_cell(record.get(key)) for key in keys] for record in records]
    parts = [columns([HEADERS[key] for key in keys], rows) + f"\n{wrap(' '.join(_explain(keys)))}"]
    parts += [
        f"MACs of {cost.name} are without {', '.join(cost.uncounted)}: how many those take is not known"
        for cost in costs
        if cost.uncounted
    ]
    parts += [f"{cost.message_problem}: it can be simulated, not deployed" for cost in costs if cost.message_problem]
    if server:
        parts.append(wrap(_describe_server(server, timed=any(cost.device_seconds is not None for cost in costs))))
    if timed:
        noise = "; on random data: the data set is not here" if timed.synthetic_data else ""
        parts.append(
            f"a round here: {timed.training:.2f} s of training, {timed.evaluation:.2f} s of evaluation, "
            f"{pluralize(timed.workers, 'worker')} (measured in {timed.spent:.1f} s{noise})"
        )
    return [*parts, *(_fleet_tables(planned) if planned else ())]


def _describe_server(server: "ServerCost", timed: bool) -> str:
    """`timed`: whether the seconds of the devices are known."""
    work = f"the server trains as well: at most {server.macs:,} MACs per round"
    if server.seconds is not None:
        return f"{work}, {server.seconds:.2g} s"
    return f"{work}; set fleet.server_speed, or the seconds of a round are unknown" if timed else work


MEANINGS = {
    "macs": "MACs: multiply-adds of one example through the model.",
    "published_flops": "Published FLOPs: the same as tables of papers after HeteroFL count it, a layer once for its "
    "weight and once for its bias, norms included.",
    "bytes_down": "Bytes: of one device and round.",
    "training_memory": "Bytes to train: the peak of all tensors of a training step.",
}


def _explain(keys: list[str]) -> list[str]:
    """What the columns mean, where a name is not enough."""
    return [meaning for key, meaning in MEANINGS.items() if key in keys]


def _fleet_tables(planned: "FleetPlan") -> list[str]:
    rows = [
        (device["name"], str(device["count"]), device["tier"] or "none", _amount(device["memory"], 1e6),
         _amount(device["seconds"] or None), device["next"])
        for device in planned.record()["devices"]
    ]  # fmt: skip
    parts = [columns(("device", "count", "tier", "MB", "s per round", "next larger tier"), rows)]
    if planned.shares:
        shares = ", ".join(f"{tier} {share:.3g}" for tier, share in planned.shares.items())
        takes = f"a round takes {planned.seconds:.3g} s; " if planned.seconds else ""  # 0: no speed is known
        parts.append(f"{takes}shares of the tiers: {shares}")
    if planned.regions:
        regions = [
            ("+".join(region.tiers), f"{region.parameters:,}", str(region.devices), f"{region.contributors:.1f}",
             f"{region.trained:.1%}")
            for region in planned.regions
        ]  # fmt: skip
        parts.append(columns(("held by", "parameters", "devices", "updates per round", "rounds trained"), regions))
    return parts


def _amount(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}"

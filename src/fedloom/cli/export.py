"""fedloom export: a model of a finished run as a file that runs elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import DataDir, OutputFormat, With, own_tables
from .output import BAD_INPUT, RUN_FAILED, Exit, Format, columns, exits, report_failure, say, say_json

if TYPE_CHECKING:
    from ..analysis.export_run import Exported


def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[str, typer.Option("--to", help="safetensors, pt2, onnx or executorch.")],
    tier: Annotated[str | None, typer.Option("--tier", help="A tier's model; else the largest tier's.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="The model that a device keeps for itself.")] = None,
    macs: Annotated[
        int | None, typer.Option("--macs", min=0, help="The largest sub-net of at most so many multiply-adds.")
    ] = None,
    given: Annotated[
        str, typer.Option("--input", help="stored: the file prepares examples itself; prepared: it takes them so.")
    ] = "stored",
    out: Annotated[Path | None, typer.Option("--out", help="A folder, not there yet; else RUN/exports/…")] = None,
    data_dir: DataDir = None,
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """Write a model of a run with its card, and prove that it makes what the run's own model makes."""
    if sum(one is not None for one in (tier, device, macs)) > 1:
        raise typer.BadParameter("say one of --tier, --device and --macs")
    if given not in ("stored", "prepared"):
        raise typer.BadParameter("--input is stored or prepared")
    with exits(format):
        from ..analysis.export_run import NotTheSame, export
        from ..analysis.trained import ModelSelector
        from ..export import Unavailable
        from ..recipe.paths import data_folder

        selector = ModelSelector(tier, device, macs)
        try:
            made = export(run, selector, to, out, given, own_tables(files), data_folder(data_dir))  # type: ignore[arg-type]
        except Unavailable as error:
            report_failure("EXTRA_MISSING", str(error), error.hint, format is Format.json)
            raise Exit(BAD_INPUT) from None
        except NotTheSame as error:
            report_failure("NOT_THE_SAME", str(error), error.hint, format is Format.json)
            raise Exit(RUN_FAILED) from None
        if format is Format.json:
            say_json({"folder": str(made.folder), **made.card})
        else:
            say(_told(made))


def _told(made: "Exported") -> str:
    card = made.card
    judged: dict[str, Any] = card["judged"]["tests"]
    rows = [
        (f"{test} {metric}", _shown(judged.get(test, {}).get(metric)), _shown(value))
        for test, metrics in card["measured"].items()
        for metric, value in metrics.items()
    ]
    parity, speed = card["parity"], card["latency"]
    lines = [
        columns(("measured", "in the run", "this file"), rows),
        f"parameters {card['parameters']:,}, multiply-adds {card['macs']:,}, bytes {card['bytes']:,}",
        f"one example takes {speed['median_ms']:.3f} ms: {speed['runtime']}, one thread, median of {speed['runs']}",
        f"largest difference to the run's model {parity['difference']:.1e} in {parity['examples']} examples",
    ]
    return "\n".join([*lines, f"\nwritten: {made.file}, {made.folder / 'card.md'}"])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""fedloom export: export a trained model to a portable format."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..wording import pluralize
from .options import Options, verb
from .output import BAD_INPUT, RUN_FAILED, Exit, OutputFormat, columns, report_failure

if TYPE_CHECKING:
    from ..analysis.export_run import ExportResult


@verb("data_dir", "files", "format")
def export(
    options: Options,
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    to: Annotated[str, typer.Option("--to", help="safetensors, pt2, onnx or executorch.")],
    tier: Annotated[str | None, typer.Option("--tier", help="A tier's model; default: the largest tier's.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="The personal model of this device.")] = None,
    macs: Annotated[
        int | None, typer.Option("--macs", min=0, help="Largest of ~500 sampled subnets with at most this many MACs.")
    ] = None,
    input_kind: Annotated[
        str, typer.Option("--input", help="stored: the file preprocesses examples itself; prepared: the caller does.")
    ] = "stored",
    out: Annotated[Path | None, typer.Option("--out", help="A new folder; default: RUN/exports/…")] = None,
) -> None:
    """Write a model of a run with its card, and check that its outputs match the run's model within a tolerance."""
    from ..analysis.export_run import ParityError
    from ..api.verbs import export
    from ..exporting import MissingDependency

    if sum(value is not None for value in (tier, device, macs)) > 1:
        raise typer.BadParameter("use one of --tier, --device and --macs")
    if input_kind not in ("stored", "prepared"):
        raise typer.BadParameter("--input must be stored or prepared")
    as_json = options.format is OutputFormat.json
    try:
        exported = export(
            run, to, tier=tier, device=device, macs=macs, input_kind=input_kind, out=out,  # type: ignore[arg-type]
            **options.arguments("data_dir"),
        )  # fmt: skip
    except MissingDependency as error:
        report_failure("EXTRA_MISSING", str(error), error.hint, as_json)
        raise Exit(BAD_INPUT) from None
    except ParityError as error:
        report_failure("NOT_THE_SAME", str(error), error.hint, as_json)
        raise Exit(RUN_FAILED) from None
    options.show(exported.to_dict(), _text(exported))


def _text(exported: "ExportResult") -> str:
    card = exported.card
    evaluated: dict[str, Any] = card["evaluated"]["tests"]
    rows = [
        (f"{test} {metric}", _format(evaluated.get(test, {}).get(metric)), _format(value))
        for test, metrics in card["measured"].items()
        for metric, value in metrics.items()
    ]
    parity, time = card["parity"], card["latency"]
    lines = [
        columns(("metric", "run", "exported file"), rows),
        f"parameters {card['parameters']:,}, MACs {card['macs']:,}, file size {card['bytes']:,} bytes",
        f"latency {time['median_ms']:.3f} ms per example ({time['runtime']}, 1 thread, median of {time['runs']} runs)",
        f"largest difference from the run's model {parity['difference']:.1e} over "
        f"{pluralize(parity['examples'], 'example')}",
    ]
    return "\n".join([*lines, f"\nwritten: {exported.file}, {exported.folder / 'card.md'}"])


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

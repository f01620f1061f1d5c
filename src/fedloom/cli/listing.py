"""fedloom list: the names a recipe can use."""

from enum import StrEnum
from typing import Annotated, Any

import typer

from .options import OutputFormat, With, own_tables
from .output import Format, columns, exits, say, say_json


class What(StrEnum):
    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    preparations = "preparations"
    optimizers = "optimizers"
    rates = "rates"
    codecs = "codecs"
    controls = "controls"


def show(
    what: Annotated[What, typer.Argument(help="Which names.")],
    files: With = [],  # noqa: B006 - typer reads it, nobody changes it
    format: OutputFormat = Format.text,
) -> None:
    """List methods, models, datasets and the other names a recipe can use."""
    with exits(format):
        records = _records(what, files)
        if format is Format.json:
            say_json(records)
            return
        header = list(records[0])
        say(columns(header, [[_words(record[key]) for key in header] for record in records]).replace("\t", " "))


def _records(what: What, files: list[Any]) -> list[dict[str, Any]]:
    from ..client import LR_SCHEDULES, OPTIMIZERS
    from ..data import FACTS, PARTITIONS, PREPARATIONS
    from ..engines.compression import DOWN, UP
    from ..recipe.validation import HANDED_TO_FAMILIES, HANDED_TO_PARTITIONS
    from ..studies.controls import CONTROLS

    tables = own_tables(files)
    match what:
        case What.methods:
            return [
                {"name": name, "gives": method.gives, "models": method.admits, "leaves_the_device": method.leaves,
                 "stays": method.keeps, "settings": _settings(method), "paper": method.paper}
                for name, method in tables.methods.items()
            ]  # fmt: skip
        case What.models:
            return [{"name": n, "settings": _settings(f, HANDED_TO_FAMILIES)} for n, f in tables.models.items()]
        case What.datasets:
            known = {n: f"{f.train:,} + {f.test:,}, {f.classes} classes" for n, f in FACTS.items()}
            return [
                {"name": n, "examples": known.get(n, ""), "settings": _settings(f, ("folder",))}
                for n, f in tables.datasets.items()
            ]
        case What.partitions:
            return [{"name": n, "settings": _settings(f, HANDED_TO_PARTITIONS)} for n, f in PARTITIONS.items()]
        case What.preparations:
            return [{"name": name, "is": str(made)} for name, made in PREPARATIONS.items()]
        case What.codecs:
            return [
                {"name": n, "ways": "up and down" if n in DOWN else "up", "settings": _settings(f)}
                for n, f in UP.items()
            ]
        case What.controls:
            return [{"name": name, "is": (control.__doc__ or "").strip()} for name, control in CONTROLS.items()]
        case _:
            table: dict[str, Any] = {What.optimizers: OPTIMIZERS, What.rates: LR_SCHEDULES}[what]  # type: ignore[assignment]
            return [{"name": name, "settings": _settings(made)} for name, made in table.items()]


def _settings(function: Any, handed: tuple[str, ...] = ()) -> dict[str, Any]:
    from inspect import Parameter

    from ..recipe.validation import settings_of

    found = settings_of(function, handed)
    return {name: "required" if p.default is Parameter.empty else _plain(p.default) for name, p in found.items()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | tuple | None) else str(value)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={one}" for key, one in value.items())
    return str(value)

"""fedloom list: the names a recipe can use."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, verb
from .output import columns

if TYPE_CHECKING:
    from ..recipe.registry import Registry


class NameKind(StrEnum):
    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    preparations = "preparations"
    optimizers = "optimizers"
    lr_schedules = "lr_schedules"
    compressors = "compressors"
    controls = "controls"


@verb("files", "format")
def list_names(options: Options, kind: Annotated[NameKind, typer.Argument(help="Which names.")]) -> None:
    """List methods, models, datasets and the other names a recipe can use."""
    records = _records(kind, options.registry)
    header = list(records[0])
    rows = [[_cell(record[key]) for key in header] for record in records]
    options.show(records, columns(header, rows).replace("\t", " "))


def _records(kind: NameKind, registry: "Registry") -> list[dict[str, Any]]:
    from ..client import LR_SCHEDULES, OPTIMIZERS
    from ..data import DATASET_INFO, PARTITIONS, PREPARATIONS
    from ..engines.compression import DOWNLINK, UPLINK
    from ..recipe.validation import FAMILY_ARGUMENTS, PARTITION_ARGUMENTS
    from ..studies.controls import CONTROLS

    match kind:
        case NameKind.methods:
            return [
                {"name": name, "produces": method.info.produces, "heterogeneity": method.info.heterogeneity,
                 "uploads": method.info.uploads, "client_state": method.info.client_state,
                 "settings": _settings(method), "paper": method.info.paper}
                for name, method in registry.methods.items()
            ]  # fmt: skip
        case NameKind.models:
            return [{"name": n, "settings": _settings(f, FAMILY_ARGUMENTS)} for n, f in registry.models.items()]
        case NameKind.datasets:
            known = {n: f"{f.train:,} + {f.test:,}, {f.classes} classes" for n, f in DATASET_INFO.items()}
            return [
                {"name": n, "examples": known.get(n, ""), "settings": _settings(f, ("folder",))}
                for n, f in registry.datasets.items()
            ]
        case NameKind.partitions:
            return [{"name": n, "settings": _settings(f, PARTITION_ARGUMENTS)} for n, f in PARTITIONS.items()]
        case NameKind.preparations:
            return [{"name": n, "is": str(preparation)} for n, preparation in PREPARATIONS.items()]
        case NameKind.optimizers:
            return [{"name": n, "settings": _settings(f)} for n, f in OPTIMIZERS.items()]
        case NameKind.lr_schedules:
            return [{"name": n, "settings": _settings(f)} for n, f in LR_SCHEDULES.items()]
        case NameKind.compressors:
            return [
                {"name": n, "ways": "up and down" if n in DOWNLINK else "up", "settings": _settings(f)}
                for n, f in UPLINK.items()
            ]
        case NameKind.controls:
            return [{"name": n, "is": (control.__doc__ or "").strip()} for n, control in CONTROLS.items()]


def _settings(function: Any, hidden: tuple[str, ...] = ()) -> dict[str, Any]:
    from inspect import Parameter

    from ..recipe.validation import settable_parameters

    parameters = settable_parameters(function, hidden)
    return {n: "required" if p.default is Parameter.empty else _plain(p.default) for n, p in parameters.items()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | tuple | None) else str(value)


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={default}" for name, default in value.items())
    return str(value)

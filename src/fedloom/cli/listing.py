"""fedloom list: the names a recipe can use, and the settings of one of them."""

import inspect
import re
import shutil
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Options, verb

if TYPE_CHECKING:
    from ..recipe.registries import Registries
    from ..registry import Entry


class NameKind(StrEnum):
    methods = "methods"
    models = "models"
    datasets = "datasets"
    partitions = "partitions"
    preparations = "preparations"
    tasks = "tasks"
    optimizers = "optimizers"
    lr_schedules = "lr_schedules"
    losses = "losses"
    aggregation = "aggregation"
    server_optimizers = "server_optimizers"
    compressors = "compressors"
    stragglers = "stragglers"
    attacks = "attacks"
    engines = "engines"
    metrics = "metrics"
    export_formats = "export_formats"
    trackers = "trackers"
    controls = "controls"
    runs = "runs"


@verb("files", "format")
def list_names(
    options: Options,
    kind: Annotated[NameKind, typer.Argument(help="Which names.")],
    name: Annotated[str | None, typer.Argument(help="One of them: its settings; for runs, their folder.")] = None,
    html: Annotated[bool, typer.Option("--html", help="For runs: write a page of all of them, index.html.")] = False,
) -> None:
    """List methods, models, datasets and the other names a recipe can use; with a NAME, its settings."""
    if kind is NameKind.runs:
        _show_runs(options, Path(name or "runs"), html)
        return
    if html:
        raise typer.BadParameter("only runs have a page", param_hint="--html")
    entries = _entries(kind, options.registries)
    if name is None:
        records = [_record(entry) for entry in entries.values()]
        options.show(records, _table([(entry.name, entry.summary) for entry in entries.values()]))
        return
    from ..recipe.errors import recipe_error
    from ..registry import EntryPointError, suggest

    if name not in entries:
        raise recipe_error(kind, "NAME", f"there is no {name!r} among the {kind}", suggest(name, entries))
    if isinstance(broken := entries[name].target, EntryPointError):
        raise recipe_error(kind, "ENTRY_POINT", str(broken), broken.hint)
    options.show(_record(entries[name]), _details(entries[name]))


def _show_runs(options: Options, home: Path, html: bool) -> None:
    """The runs and comparisons in a folder, the latest first; `html`: as a page in that folder."""
    from ..runs.resume import list_runs

    if html:
        from ..files import write_atomic
        from ..reporting.gallery import build_gallery

        found, file = list_runs(home), home / "index.html"
        home.mkdir(parents=True, exist_ok=True)
        write_atomic(file, build_gallery(home, found).encode())
        options.show({"gallery": str(file), "runs": len(found)}, f"gallery: {file}")
        return
    records = [
        {"name": str(folder), "status": manifest["status"], "started": manifest["started"],
         "kind": manifest.get("kind", "comparison" if "arms" in manifest else "run")}
        for folder, manifest in list_runs(home).items()
    ]  # fmt: skip
    lines = [(record["name"], f"{record['kind']}, {record['status']}, {record['started']}") for record in records]
    options.show(records, _table(lines) if lines else f"there is no run in {home}")


def _entries(kind: NameKind, registries: "Registries") -> "dict[str, Entry]":
    from ..recipe.registries import PASSED
    from ..registry import Entry, EntryPointError
    from ..studies.controls import CONTROLS

    if kind is NameKind.controls:
        return {name: Entry(kind, name, control, ("document", "fleet")) for name, control in CONTROLS.items()}
    table = getattr(registries, kind)
    entries = {}
    for name in table:
        try:
            entries[name] = Entry(kind, name, table[name], PASSED.get(kind, ()))
        except EntryPointError as error:
            entries[name] = Entry(kind, name, error)
    return entries


def _record(entry: "Entry") -> dict[str, Any]:
    settings = {
        name: "required" if p.default is inspect.Parameter.empty else _plain(p.default)
        for name, p in entry.parameters.items()
    }
    return {"name": entry.name, "summary": entry.summary, **_facts(entry), "settings": settings}


def _facts(entry: "Entry") -> dict[str, Any]:
    """What is known of an entry besides its settings."""
    from ..data import DATASET_INFO
    from ..methods import MethodInfo

    info = getattr(entry.target, "info", None)
    if isinstance(info, MethodInfo):
        return {
            "produces": info.produces, "heterogeneity": info.heterogeneity, "uploads": info.uploads,
            "client_state": info.client_state, "paper": info.paper,
        }  # fmt: skip
    if entry.kind == NameKind.datasets and entry.name in DATASET_INFO:
        known = DATASET_INFO[entry.name]
        return {"examples": f"{known.train:,} + {known.test:,}, {known.classes} classes"}
    if entry.kind == NameKind.compressors:
        return {"ways": "up" if getattr(entry.target, "of_updates", False) else "up and down"}
    return {}


def _table(rows: list[tuple[str, str]], indent: int = 0) -> str:
    """Two columns, the second wrapped to the terminal; a name that leaves no room for it has a line of its own."""
    rows = [(" " * indent + name, text) for name, text in rows]
    columns, least = shutil.get_terminal_size().columns, 30
    first = max((len(name) + 2 for name, _ in rows if len(name) + 2 + least <= columns), default=2 * indent + 2)
    width = max(columns - first, least)
    lines = []
    for name, text in rows:
        if len(name) + 2 > first:
            lines.append(name)
            name = ""
        head, *rest = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
        lines += [f"{name:<{first}}{head}".rstrip(), *(" " * first + line for line in rest)]
    return "\n".join(lines)


def _details(entry: "Entry") -> str:
    from ..recipe.search_space import declared_domains

    width = shutil.get_terminal_size().columns
    facts = [(name.replace("_", " "), str(value)) for name, value in _facts(entry).items() if value]
    documented = setting_lines(entry.target)
    domains = {} if entry.is_value else declared_domains(entry.target)
    searched = {name: f"Searched in {domain}." for name, domain in domains.items()}
    settings = [
        (f"{name} = {_default(p)}", f"{documented.get(name, '')} {searched.get(name, '')}".strip())
        for name, p in entry.parameters.items()
    ]  # fmt: skip
    text = "\n".join(textwrap.wrap(f"{entry.name}: {entry.summary}", width))
    table = f"settings\n{_table(settings, indent=2)}" if settings else "no settings"
    return "\n".join([text, *([_table(facts)] if facts else []), table])


def _default(parameter: inspect.Parameter) -> str:
    return "(required)" if parameter.default is parameter.empty else str(_plain(parameter.default))


def setting_lines(target: Any) -> dict[str, str]:
    """The description of each parameter in numpy-style docstrings of a function, or of a class and its bases."""
    described: dict[str, str] = {}
    for owner in getattr(target, "__mro__", (target,))[::-1]:
        described |= _parameter_lines(inspect.cleandoc(owner.__doc__ or "")) if callable(owner) else {}
    return described


def _parameter_lines(docstring: str) -> dict[str, str]:
    """The description of each parameter in a docstring, on one line."""
    _, _, section = docstring.partition("Parameters\n----------\n")
    section = re.split(r"\n\n\w+\n-{3,}\n", section)[0]
    lines: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if line and not line[0].isspace():
            head, _, about = line.partition(" : ")
            names = [name.strip() for name in head.split(",")]
            lines.update(dict.fromkeys(names, about.strip()))
        elif line.strip():
            lines.update({name: f"{lines[name]} {line.strip()}".strip() for name in names})
    return lines


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | tuple | None) else str(value)

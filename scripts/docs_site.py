"""Hooks of the documentation site: pages and tables that are generated from the code when the site is built.

A page says where a table goes with a line `<!-- generated: NAME -->`. The notebook and the files at the root of the
repository become pages here too, so that nothing is written twice.
"""

import ast
import inspect
import json
import re
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import griffe
from annotated_types import Ge, Gt, Interval, Le, Len, Lt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
ROOT_PAGES = {name: name.lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")}
NOTEBOOK = "tutorials/first_run.ipynb"
SEE_ALSO = {  # the page that explains a section of the recipe
    "data": "../tutorials/own_data.md",
    "task": "../how_to/tasks.md",
    "model": "../tutorials/own_model.md",
    "method": "methods.md",
    "faults": "../how_to/faults.md",
    "checkpoints": "../how_to/resume.md",
    "aggregation": "../how_to/attacks.md",
    "privacy": "../how_to/privacy.md",
    "admission": "../how_to/faults.md",
    "compression": "../how_to/compression.md",
    "compare": "../how_to/report.md",
}

NAMED = {  # the kind of names that a key holds
    ("data", "dataset"): "datasets",
    ("data", "partition"): "partitions",
    ("data", "preparation"): "preparations",
    ("task", "kind"): "tasks",
    ("model", "family"): "models",
    ("tiers", "family"): "models",
    ("training", "loss"): "losses",
    ("training", "optimizer"): "optimizers",
    ("training", "lr_schedule"): "lr_schedules",
    ("evaluation", "metrics"): "metrics",
    ("engine", "kind"): "engines",
    ("faults", "stragglers"): "stragglers",
    ("aggregation", "rule"): "aggregation",
    ("aggregation", "server_optimizer"): "server_optimizers",
    ("compression", "uplink"): "compressors",
    ("compression", "downlink"): "compressors",
}


# ---------------------------------------------------------------------------------------------------------------------
# the hooks


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebook and the pages at the root of the repository."""
    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=root_page((ROOT / name).read_text("utf-8"))))
    page = NOTEBOOK.replace(".ipynb", ".md")
    files.append(File.generated(config, page, content=notebook_page(ROOT / "docs" / NOTEBOOK)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Replace every marker by its table, and lead links to the notebook to its page."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    text = MARKER.sub(lambda found: GENERATED[found[1]](), markdown)
    return re.sub(rf"(\]\([^)]*){Path(NOTEBOOK).stem}\.ipynb\)(?!{{)", rf"\1{Path(NOTEBOOK).stem}.md)", text)


def root_page(text: str) -> str:
    """A page of the repository's root with links as they are from `docs/`; links to other files become plain text."""

    def lead(found: re.Match[str]) -> str:
        label, target = found[1], found[2]
        if target.startswith(("docs/", "http", "#", "mailto:")):
            return f"[{label}]({target.removeprefix('docs/')})"
        return f"[{label}]({ROOT_PAGES[target]})" if target in ROOT_PAGES else label

    return re.sub(r"\[([^\]]*)\]\(([^)]+)\)", lead, text)


# ---------------------------------------------------------------------------------------------------------------------
# Markdown


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(header), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    text = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([text[0], "|" + " --- |" * len(lines[0]), *text[1:]])


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def first_paragraph(docstring: str | None) -> str:
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())


# ---------------------------------------------------------------------------------------------------------------------
# types, as a recipe's author reads them

PLAIN = {int: "integer", float: "number", str: "string", bool: "true or false", dict: "table", Any: "any value"}


def describe_type(hint: Any) -> str:
    """A type with its range in words, such as "number, > 0 and ≤ 1"."""
    if get_origin(hint) is typing.Annotated:
        inner, *limits = get_args(hint)
        words = [word for limit in limits for word in _limits(limit)]
        return describe_type(inner) + (f", {' and '.join(words)}" if words else "")
    if get_origin(hint) is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in get_args(hint))
    if get_origin(hint) in (typing.Union, types.UnionType):
        return "; or ".join(describe_type(one) for one in get_args(hint) if one is not types.NoneType)
    if get_origin(hint) in (tuple, list) or _is_sequence(hint):
        inner = [one for one in get_args(hint) if one is not Ellipsis]
        return f"list of {_plural(describe_type(inner[0]))}" if inner else "list"
    if get_origin(hint) is dict or _is_mapping(hint):
        return "table"
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        return "table, see below"
    return PLAIN.get(hint, getattr(hint, "__name__", str(hint)))


def _plural(words: str) -> str:
    kind, comma, limits = words.partition(",")
    return f"{kind}s{comma}{limits}" if kind in ("integer", "number", "string", "table") else words


def _is_sequence(hint: Any) -> bool:
    origin = get_origin(hint)
    return inspect.isclass(origin) and issubclass(origin, typing.Sequence) and origin is not str


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint) or hint
    return inspect.isclass(origin) and issubclass(origin, Mapping)


def _limits(limit: Any) -> Iterator[str]:
    if isinstance(limit, Interval):
        pairs = ((">", limit.gt), ("≥", limit.ge), ("<", limit.lt), ("≤", limit.le))
    else:
        pairs = tuple(
            (sign, getattr(limit, name))
            for kind, sign, name in ((Gt, ">", "gt"), (Ge, "≥", "ge"), (Lt, "<", "lt"), (Le, "≤", "le"))
            if isinstance(limit, kind)
        )
    yield from (f"{sign} {bound:g}" for sign, bound in pairs if bound is not None and bound != float("inf"))
    if isinstance(limit, Len) and limit.min_length:
        yield f"at least {limit.min_length}"


def describe_default(value: Any) -> str:
    """A default as it would stand in a recipe; an optional key without one has a dash."""
    from fedloom.recipe.load import dumps_value

    if value is None or value == () or value == {}:
        return "–"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e6:
        return code(f"{value:.1f}")
    if isinstance(value, float | int) and not isinstance(value, bool):
        return code(f"{value:g}" if value < 1e6 else f"{value:.0e}".replace("e+0", "e"))
    plain = isinstance(value, bool | str | tuple | list | dict)
    return code(dumps_value(value) if plain else str(value))


# ---------------------------------------------------------------------------------------------------------------------
# the recipe, from its schema


def attribute_docs(cls: type) -> dict[str, str]:
    """The docstrings below the attributes of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant) and following.value.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, str):
            docs[node.target.id] = " ".join(text.split())
    return docs


def section_rows(section: type[BaseModel], place: str = "", skip: Iterable[str] = ()) -> list[list[str]]:
    """Key, type, default and description of every key of the section at a place of the recipe."""
    hints, docs = typing.get_type_hints(section, include_extras=True), attribute_docs(section)
    rows = []
    for name, field in section.model_fields.items():
        if name not in skip:
            default = (
                "required" if field.is_required() else describe_default(field.get_default(call_default_factory=True))
            )
            kind = NAMED.get((place, name))
            text = docs[name] + (f" [The names](names.md#{kind})." if kind else "")
            rows.append([code(field.alias or name), describe_type(hints[name]), default, text])
    return rows


def inner_sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The sections that keys of a section hold."""
    found = {}
    for name, hint in typing.get_type_hints(section).items():
        for one in [hint, *get_args(hint)]:
            if inspect.isclass(one) and issubclass(one, BaseModel):
                found[name] = one
    return found


def recipe_reference() -> str:
    from fedloom.recipe.load import SECTIONS
    from fedloom.recipe.schema import Recipe, TierConfig

    header = ("key", "value", "default", "meaning")
    scalars = [name for name in Recipe.model_fields if name not in SECTIONS and name != "tiers"]
    others = [name for name in Recipe.model_fields if name not in scalars]
    parts = ["## Top level", table(header, section_rows(Recipe, skip=others))]
    for name in others:
        section = TierConfig if name == "tiers" else SECTIONS[name]
        title = f"[[{name}]]" if name == "tiers" else f"[{name}]"
        parts += [f"## `{title}` {{ #{name} }}", inspect.cleandoc(section.__doc__ or "")]
        if name in SEE_ALSO:
            parts.append(f"See [{page_title(SEE_ALSO[name])}]({SEE_ALSO[name]}).")
        parts.append(table(header, section_rows(section, name)))
        for key, inner in inner_sections(section).items():
            parts += [f"### `{name}.{key}`", inspect.cleandoc(inner.__doc__ or ""), table(header, section_rows(inner))]
    return "\n\n".join(parts)


def page_title(link: str) -> str:
    """The first heading of a page of the folder `reference`'s neighbors."""
    text = (ROOT / "docs" / "reference" / link).resolve().read_text("utf-8")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    assert heading is not None, link
    return heading[1][0].lower() + heading[1][1:]


# ---------------------------------------------------------------------------------------------------------------------
# registries, from the signatures and docstrings of their entries

DESCRIBED = ("Parameters", "Attributes", "Raises")
ITEM = re.compile(r"^(\*{0,2}\w+(?:, *\*{0,2}\w+)*) ?: +(\S.*)$")
WORD = r"[\w.]+(?:\[.*\])?"
SENTENCE = re.compile(r"^[^\s-].* .*$")
TYPE = re.compile(rf"^(?:\{{.*\}}(?: \| None)?|{WORD}(?:(?:, (?:or )?| \| | or | of ){WORD})*)$")


class Descriptions(griffe.Extension):
    """Lets the API reference read docstrings that say `name : description`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        obj.docstring.value = with_descriptions(obj.docstring.value)
        if isinstance(obj, griffe.Class) and any(str(base) == "NamedTuple" for base in obj.bases):
            obj.docstring.value = obj.docstring.value.replace("Parameters\n-", "Attributes\n-")  # it has no __init__


def with_descriptions(docstring: str) -> str:
    """The docstring in numpy's style, with descriptions on lines of their own.

    Types stand in the signature, so most docstrings say `name : description`, where numpy's style expects a type; and
    what is returned is a sentence.
    """
    lines, result, section = docstring.splitlines(), list[str](), ""
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        if re.match(r"^-{3,}\s*$", following):
            section = line.strip()
        found = ITEM.match(line) if section in DESCRIBED else None
        if found and not (following.startswith(" ") and TYPE.match(found[2])):
            result += [found[1], f"    {found[2]}"]
        elif section == "Returns" and SENTENCE.match(line) and not following.startswith(" "):
            result += [*([":"] if result[-1].startswith("---") else []), f"    {line}"]
        else:
            result.append(line)
    return "\n".join(result)


def parameter_docs(docstring: str | None) -> dict[str, str]:
    """Descriptions by parameter, from the section `Parameters`."""
    sections = griffe.Docstring(with_descriptions(inspect.cleandoc(docstring or ""))).parse("numpy", warnings=False)
    parameters = [
        one for section in sections if section.kind is griffe.DocstringSectionKind.parameters for one in section.value
    ]
    return {one.name.lstrip("*"): " ".join(one.description.split()) for one in parameters}


def entry_docs(target: Any) -> dict[str, str]:
    """Descriptions of the settings of a class or function, by name; a dataclass can describe its attributes too."""
    docs = parameter_docs(target.__doc__)
    for base in reversed(getattr(target, "__mro__", ())):
        if base.__module__.startswith("fedloom"):
            docs = {**parameter_docs(base.__doc__), **attribute_docs(base), **docs}
    return docs


def entry_rows(entry: Any) -> list[list[str]]:
    """Setting, type, default and description of every setting."""
    function = entry.target
    hints = typing.get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    docs = entry_docs(function)
    return [
        [
            code(name),
            describe_type(hints.get(name, Any)),
            "required" if parameter.default is parameter.empty else describe_default(parameter.default),
            docs.get(name, "")[:1].upper() + docs.get(name, "")[1:],
        ]
        for name, parameter in entry.parameters.items()
    ]


def registries() -> dict[str, Any]:
    """Every registry besides the methods', by kind."""
    from fedloom.recipe.registries import KINDS, Registries
    from fedloom.registry import Registry

    tables = {kind: getattr(Registries(), kind) for kind in KINDS if kind != "methods"}
    return {kind: registry for kind, registry in tables.items() if isinstance(registry, Registry)}


def names_reference() -> str:
    header = ("setting", "value", "default", "meaning")
    parts = []
    for kind, registry in registries().items():
        parts.append(f"## {kind.replace('_', ' ').capitalize()} {{ #{kind} }}")
        entries = [getattr(registry, name.replace("-", "_")) for name in registry]
        objects = [entry for entry in entries if not has_settings(entry)]
        if objects:
            parts.append(table(("name", "meaning"), ([code(entry.name), str(entry.target)] for entry in objects)))
        for entry in entries:
            if has_settings(entry):
                text = inspect.cleandoc(entry.target.__doc__ or "").split("\n\nParameters\n---")[0]
                parts += [f"### {entry.name} {{ #{kind}-{entry.name} }}", text]
                if rows := entry_rows(entry):
                    parts.append(table(header, rows))
    return "\n\n".join(parts)


def has_settings(entry: Any) -> bool:
    """Whether an entry is a class or function that a recipe can give settings, not a ready object."""
    return inspect.isclass(entry.target) or inspect.isroutine(entry.target)


def methods_reference() -> str:
    from fedloom.methods import METHODS

    header = ("setting", "value", "default", "meaning")
    parts = []
    for name in METHODS:
        entry, method = getattr(METHODS, name), METHODS[name]
        info = method.info
        facts = [("Paper", info.paper), ("Models of the tiers", info.heterogeneity), ("Uploads", info.uploads),
                 ("Stays on the device", info.client_state), ("Produces", info.produces)]  # fmt: skip
        module = inspect.cleandoc(inspect.getmodule(method).__doc__ or "")
        parts += [f"## {name}", module.partition("\n\n")[2] or first_paragraph(method.__doc__)]
        parts.append("\n".join(f"- {title}: {text}" for title, text in facts if text))
        if rows := entry_rows(entry):
            parts.append(table(header, rows))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# the command line, from the app


def command_reference() -> str:
    import typer

    from fedloom.cli.app import app

    group = typer.main.get_command(app)
    return "\n\n".join(_commands(group, "fedloom"))


def _commands(group: Any, prefix: str) -> Iterator[str]:
    for name, command in group.commands.items():
        path = f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield from _commands(command, path)
            continue
        context = command.make_context(path, [], resilient_parsing=True)
        yield f"## {path}"
        yield inspect.cleandoc(command.help or "").replace("\b\n", "")
        yield f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```"
        rows = [
            [code(_spelling(parameter, context)), _default(parameter), _help(command, parameter)]
            for parameter in command.params
            if parameter.name != "help"
        ]
        if rows:
            yield table(("option", "default", "meaning"), rows)


def _help(command: Any, parameter: Any) -> str:
    """The help of a parameter; some versions of click drop an argument's, which its annotation still has."""
    if parameter.help:
        return str(parameter.help)
    annotation = inspect.signature(command.callback).parameters[parameter.name].annotation
    return "".join(getattr(one, "help", None) or "" for one in get_args(annotation))


def _spelling(parameter: Any, context: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.make_metavar(context)).partition(":")[0]
    names = ", ".join(parameter.opts) + (
        f" / {', '.join(parameter.secondary_opts)}" if parameter.secondary_opts else ""
    )
    return names if parameter.is_flag else f"{names} {parameter.make_metavar(context)}"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value in ([], (), False) or callable(value):
        return "–"
    return code(str(getattr(value, "value", value)))


# ---------------------------------------------------------------------------------------------------------------------
# the notebook


def notebook_page(path: Path) -> str:
    """The cells of a notebook as Markdown; it is executed for their outputs."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        quiet, resources = ["--log-level=ERROR"], {"metadata": {"path": folder}}
        NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources=resources, extra_arguments=quiet
        ).execute()
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [text for output in cell.outputs if (text := _output(output))]
    title, *rest = parts
    note = f"This page is a notebook: [download it]({path.name}){{ download }} and run it yourself."
    return "\n\n".join([title, note, *rest])


def _output(output: Any) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="output" markdown="0">\n{data["text/html"]}\n</div>'
    if "image/png" in data:
        return f'<img alt="output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
    text = data.get("text/plain") or (output.get("text", "") if output.get("name") == "stdout" else "")
    return f"```text\n{text.rstrip()}\n```" if text else ""


# ---------------------------------------------------------------------------------------------------------------------
# the examples


def examples() -> str:
    """Every program with its docstring as text."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        text = path.read_text("utf-8")
        program = text.split('"""', 2)[2].strip()
        parts += [f"## {path.stem}", ast.get_docstring(ast.parse(text)) or "", f"```python\n{program}\n```"]
    return "\n\n".join(parts)


GENERATED: dict[str, Callable[[], str]] = {
    "examples": examples,
    "recipe": recipe_reference,
    "names": names_reference,
    "methods": methods_reference,
    "commands": command_reference,
}

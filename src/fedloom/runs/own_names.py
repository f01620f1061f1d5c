"""What a run needs besides the package to be opened again: names of the user's own, and the files that add them.

A run remembers both. They are never loaded on their own, since a file is code: they are passed when the run is opened.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..recipe.errors import RecipeError, RecipeIssue
from ..recipe.load import LoadedRecipe, load
from ..recipe.registries import KINDS, Registries
from ..recipe.schema import Recipe
from .folder import MANIFEST, read_manifest

logger = logging.getLogger(__name__)

FileHash = Mapping[str, str]  # name, path, sha256


def describe_names(recipe: Recipe, registries: Registries) -> dict[str, Any]:
    """What the manifest of a run says about them."""
    return {"own_names": list_own_names(recipe, registries), "with_files": registries.file_hashes()}


def list_own_names(recipe: Recipe, registries: Registries) -> dict[str, list[str]]:
    """Names of the recipe that are not built in, by kind."""
    own = {
        kind: sorted(name for name in set(names) if not _is_built_in(kind, name, registries))
        for kind, names in _names_used(recipe).items()
    }
    return {kind: names for kind, names in own.items() if names}


def _is_built_in(kind: str, name: str, registries: Registries) -> bool:
    """True for the names of the package itself, unless something of the user's own has taken the name."""
    known = getattr(Registries(), kind)
    is_ours = name in known and known.source(name) in ("built in", "fedloom")
    return is_ours and getattr(registries, kind)[name] is known[name]


def _names_used(recipe: Recipe) -> dict[str, list[str]]:
    data, training, faults = recipe.data, recipe.training, recipe.faults
    links, optimizer = (recipe.compression.uplink, recipe.compression.downlink), recipe.aggregation.server_optimizer
    metrics = [one if isinstance(one, str) else one["kind"] for one in recipe.evaluation.metrics or ()]
    public = data.public.dataset if data.public and data.public.source == "dataset" else None
    used: dict[str, Iterable[str | None]] = {
        "methods": [recipe.method.name, *(part["method"] for part in recipe.method.settings.get("parts", ()))],
        "models": [tier.family or recipe.model.family for tier in recipe.tiers],
        "datasets": [data.dataset, public],
        "partitions": [data.partition["kind"]],
        "preparations": [data.preparation],
        "tasks": [recipe.task.kind],
        "optimizers": [training.optimizer["kind"]],
        "losses": [training.loss["kind"] if training.loss else None],
        "lr_schedules": [training.lr_schedule["kind"]],
        "aggregation": [recipe.aggregation.rule],
        "server_optimizers": [optimizer["kind"] if optimizer else None],
        "compressors": [link["kind"] for link in links if link],
        "stragglers": [faults.stragglers["kind"] if faults.stragglers else None],
        "engines": [recipe.engine.kind],
        "metrics": metrics,
    }
    return {kind: [name for name in names if name is not None] for kind, names in used.items() if kind in KINDS}


def load_recipe_of(folder: Path, registries: Registries, document: Mapping[str, Any] | None = None) -> LoadedRecipe:
    """The recipe of a run, or that of an arm of a comparison, which is a `document` of its manifest.

    Raises
    ------
    RecipeError
        If it cannot be used; where names are missing, it says which files they came from.
    """
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    warn_of_changed_files(folder, manifest, registries)
    with_hint = explain_missing_names(folder, manifest, registries)
    # runs of older releases had torch's kernels, and no setting for it
    changes = [] if "kernels" in manifest or document is not None or not manifest else ['engine.kernels="torch"']
    try:
        return load(folder / "recipe.toml" if document is None else document, registries, changes)
    except RecipeError as error:
        if with_hint and any(issue.code == "RECIPE_NAME" for issue in error.issues):
            own = {name for names in manifest.get("own_names", {}).values() for name in names}
            # that such a name is unknown is explained already, and a name like it would be the wrong one
            others = [issue for issue in error.issues if issue.code != "RECIPE_NAME" or issue.value not in own]
            raise RecipeError([with_hint, *others], error.source, error.text, error.overrides) from None
        raise


def list_with_options(folder: Path) -> str:
    """Options that verbs need to open a run or comparison: " --with FILE" for every file that it was made with."""
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    return "".join(f" --with {_locate(file)}" for file in manifest.get("with_files", ()))


def warn_of_changed_files(folder: Path, manifest: Mapping[str, Any], registries: Registries) -> None:
    """Say if a file that was given is not as it was when the run was made."""
    before: dict[str, FileHash] = {file["name"]: file for file in manifest.get("with_files", ())}
    for file in registries.file_hashes():
        known = before.get(file["name"])
        if known and known["sha256"] != file["sha256"]:
            logger.warning(
                "%s has changed since %s was made with it: sha256 %s then, %s now",
                file["path"], folder, known["sha256"][:12], file["sha256"][:12],
            )  # fmt: skip


def explain_missing_names(folder: Path, manifest: Mapping[str, Any], registries: Registries) -> RecipeIssue | None:
    """Where a run's own names came from, if they are not known now."""
    own: Mapping[str, list[str]] = manifest.get("own_names", {})
    missing = {
        kind: names
        for kind, all_names in own.items()
        if kind in KINDS and (names := [name for name in all_names if name not in getattr(registries, kind)])
    }
    if not missing:
        return None
    given = {file["name"] for file in registries.file_hashes()}
    files = [file for file in manifest.get("with_files", ()) if file["name"] not in given]
    if not files:
        listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in missing.items())
        message = f"this run was made with objects of its own: {listed}"
        hint = "pass --with FILE.py; in Python register them, or pass registries=Registries().with_names(…)"
        return RecipeIssue((), "NAMES_MISSING", message, hint)
    made_with = ", ".join(_describe(file) for file in files)
    options = " ".join(f"--with {_locate(file)}" for file in files)
    in_python = ", ".join(repr(_locate(file)) for file in files)
    listed = "; ".join(f"{kind} {', '.join(names)}" for kind, names in missing.items())
    message = f"this run was made with {made_with}, where its names are defined: {listed}"
    hint = f"pass {options}; in Python extensions=[{in_python}]"
    return RecipeIssue((), "WITH_MISSING", message, hint)


def _describe(file: FileHash) -> str:
    """The file's name and contents, and where it was if it is no longer there."""
    gone = "" if Path(file["path"]).is_file() else f", which is no longer at {file['path']}"
    return f"{file['name']} (sha256 {file['sha256'][:12]}…){gone}"


def _locate(file: FileHash) -> str:
    """The file's path if it is still there, else its name."""
    return file["path"] if Path(file["path"]).is_file() else file["name"]

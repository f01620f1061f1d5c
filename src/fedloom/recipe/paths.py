"""Default folders for data and runs, and TOML files that are checked against a pydantic model."""

import json
import logging
import os
import shutil
import tomllib
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import RecipeError, RecipeIssue, recipe_error

logger = logging.getLogger(__name__)


def resolve_data_folder(option: str | Path | None = None) -> Path:
    """--data-dir, else FEDLOOM_DATA, else the folder `data`."""
    return Path(option or os.environ.get("FEDLOOM_DATA") or "data").expanduser()


def choose_output_folder(option: str | Path | None, name: str, force: bool = False) -> Path:
    """A folder that does not exist yet: `--out`, or one below `runs` named after the time.

    `force` removes the folder of an earlier run or comparison, and nothing else. A run that ended before its first
    round was finished holds nothing, so it is replaced without it.
    """
    if option is not None:
        folder = Path(option)
        if force and (folder / "manifest.json").is_file():
            shutil.rmtree(folder)
        elif has_no_round(folder):
            logger.warning("%s holds a run that ended before its first round was finished; it is replaced", folder)
            shutil.rmtree(folder)
        if folder.exists():
            hint = "choose another --out; --force replaces an earlier run"
            raise recipe_error("--out", "OUT_EXISTS", f"{folder} already exists", hint)
        require_place(folder)
        return folder
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    folders = (Path("runs") / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(folder for folder in folders if not folder.exists())


def require_place(out: Path) -> None:
    """Raise if `out` cannot be created because a part of its path is a file."""
    file = next((parent for parent in out.parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise recipe_error("--out", "OUT_PLACE", f"{file} is a file, so it cannot hold {out}")


def has_no_round(folder: Path) -> bool:
    """True for the folder of a run that failed or was interrupted before anything was learned."""
    manifest, rows = folder / "manifest.json", folder / "rows.jsonl"
    if not manifest.is_file() or not rows.is_file() or rows.stat().st_size or (folder / "checkpoints").exists():
        return False
    return json.loads(manifest.read_text("utf-8")).get("status") in ("failed", "interrupted")


class TomlModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


TomlModelT = TypeVar("TomlModelT", bound=TomlModel)


def read_toml_model(kind: type[TomlModelT], path: Path) -> TomlModelT:
    try:
        text = path.read_text(encoding="utf-8")
        return kind.model_validate(tomllib.loads(text))
    except FileNotFoundError:
        hint = "run it in the folder that contains fedloom's recipes, or pass --recipes FOLDER"
        raise recipe_error(path, "FILE_MISSING", f"there is no file {path}", hint) from None
    except ValidationError as error:
        issues = [RecipeIssue(tuple(detail["loc"]), "LIST_FORM", detail["msg"]) for detail in error.errors()]
        raise RecipeError(issues, str(path), text) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise recipe_error(path, "RECIPE_TOML", str(error)) from error

"""Where things lie: data sets, and the folders of runs.

Lists that lie beside the recipes: TOML files of what papers published, refused where something is wrong.
"""

import os
import tomllib
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import RecipeError, RecipeIssue


def data_folder(said: str | Path | None = None) -> Path:
    """--data-dir, else FEDLOOM_DATA, else a folder `data` here."""
    return Path(said or os.environ.get("FEDLOOM_DATA") or "data").expanduser()


def fresh_folder(said: str | Path | None, name: str) -> Path:
    """A folder that is not there yet: as said, or named after the time."""
    if said is not None:
        folder = Path(said)
        if folder.exists():
            hint = "say another --out; a run never writes over another"
            raise RecipeError([RecipeIssue((), "OUT_EXISTS", f"{folder} is there already", hint)], "--out")
        return folder
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    taken = (Path("runs") / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(folder for folder in taken if not folder.exists())


class Listed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Kind = TypeVar("Kind", bound=Listed)


def read_list(kind: type[Kind], path: Path) -> Kind:
    try:
        text = path.read_text(encoding="utf-8")
        return kind.model_validate(tomllib.loads(text))
    except FileNotFoundError:
        hint = "run it where fedloom's recipes are, or say --recipes FOLDER"
        raise RecipeError([RecipeIssue((), "FILE_MISSING", f"there is no file {path}", hint)], str(path)) from None
    except ValidationError as error:
        problems = [RecipeIssue(tuple(one["loc"]), "LIST_FORM", one["msg"]) for one in error.errors()]
        raise RecipeError(problems, str(path), text) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([RecipeIssue((), "RECIPE_TOML", str(error))], str(path)) from error

"""Lists that lie beside the recipes: TOML files of what papers published, refused where something is wrong."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .problems import Problem, RecipeError


class Listed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Kind = TypeVar("Kind", bound=Listed)


def read_list(kind: type[Kind], path: Path) -> Kind:
    try:
        text = path.read_text(encoding="utf-8")
        return kind.model_validate(tomllib.loads(text))
    except FileNotFoundError:
        hint = "run it where fedloom's recipes are, or say --recipes FOLDER"
        raise RecipeError([Problem((), "FILE_MISSING", f"there is no file {path}", hint)], str(path)) from None
    except ValidationError as error:
        problems = [Problem(tuple(one["loc"]), "LIST_FORM", one["msg"]) for one in error.errors()]
        raise RecipeError(problems, str(path), text) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError([Problem((), "RECIPE_TOML", str(error))], str(path)) from error

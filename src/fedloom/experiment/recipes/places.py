"""Where things lie: data sets, and the folders of runs."""

import os
from datetime import datetime
from pathlib import Path

from .problems import Problem, RecipeError


def data_folder(said: str | Path | None = None) -> Path:
    """--data-dir, else FEDLOOM_DATA, else a folder `data` here."""
    return Path(said or os.environ.get("FEDLOOM_DATA") or "data").expanduser()


def fresh_folder(said: str | Path | None, name: str) -> Path:
    """A folder that is not there yet: as said, or named after the time."""
    if said is not None:
        folder = Path(said)
        if folder.exists():
            hint = "say another --out; a run never writes over another"
            raise RecipeError([Problem((), "OUT_EXISTS", f"{folder} is there already", hint)], "--out")
        return folder
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    taken = (Path("runs") / (stem if number == 1 else f"{stem}-{number}") for number in range(1, 1000))
    return next(folder for folder in taken if not folder.exists())

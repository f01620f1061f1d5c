"""Go on with a run whose process has gone, or play its last rounds again and see that they come out the same."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..evaluation import Row
from ..recipe.errors import recipe_error
from ..recipe.load import load
from ..recipe.registry import Registry
from .build import assemble
from .checkpoint import FOLDER, Checkpoint, Checkpoints
from .experiment import Experiment
from .folder import read_manifest, read_rows
from .loop import rounds, single_thread
from .recorder import collect_inputs, compute_fingerprints, restore_experiment

logger = logging.getLogger(__name__)


def find_newest_run(home: Path = Path("runs")) -> Path:
    """The one that was begun last and is not finished; else the last. A comparison counts as one."""
    found = {path.parent: read_manifest(path.parent) for path in home.glob("*/manifest.json")}
    if not found:
        raise recipe_error(home, "RUN_FOLDER", "there is no run here", "say its folder")
    return max(found, key=lambda one: (found[one]["status"] != "finished", found[one]["started"]))


AttachEngine = Callable[[Experiment, Registry, Path, Path], Experiment]
"""(experiment, registry, data folder, run folder) -> the same with the engine that its recipe names."""


def require_in_process(experiment: Experiment, registry: Registry, data: Path, folder: Path) -> Experiment:
    if experiment.loaded.recipe.engine.kind != "in_process":
        raise recipe_error(folder, "RUN_ENGINE", "the devices of this run are elsewhere", "fedloom resume finds them")
    return experiment


def reopen_run(
    folder: Path, registry: Registry, data: Path, workers: int, engage: AttachEngine = require_in_process
) -> tuple[Experiment, Checkpoint]:
    """An unfinished run as it stood when it was last saved; refused if its recipe or data have changed since."""
    if _status(folder) == "finished":
        raise recipe_error(
            folder, "RUN_FINISHED", "this run has finished", "fedloom verify plays its last rounds again"
        )
    experiment = assemble(load(folder / "recipe.toml", registry), registry, data, workers=workers)
    experiment = engage(experiment, registry, data, folder)
    return experiment, read_resume_point(folder, experiment)


def open_finished_run(
    folder: Path, registry: Registry, data: Path, workers: int = 1, *, from_result: bool = False
) -> Experiment:
    """The experiment of a finished run, with the data that it was trained on.

    `from_result` makes the run's own final model the model to start from, instead of what the recipe started from.
    """
    status = _status(folder)
    if status != "finished":
        raise recipe_error(
            folder, "RUN_FOLDER", f"this run is not finished, it is {status}", "fedloom resume finishes it"
        )
    loaded = load(folder / "recipe.toml", registry)
    if from_result:
        if not (folder / "models").is_dir():
            raise recipe_error(folder, "RUN_FOLDER", "the run's method keeps no model on the server")
        loaded = loaded.with_document({**loaded.recipe.document(), "start": {"from": str(folder)}})
    experiment = assemble(loaded, registry, data, workers=workers)
    if experiment.dataset.fingerprint() != read_manifest(folder).get("data"):
        message = "the data is not what the run was trained on, so measurements would be meaningless"
        raise recipe_error(folder, "RUN_DATA", message, "pass its --data-dir")
    return experiment


def read_resume_point(folder: Path, experiment: Experiment) -> Checkpoint:
    """Where an experiment can go on that was begun in this folder; refused if it was another one."""
    point = Checkpoints(folder / FOLDER).read_newest() or Checkpoint(0, {}, {})
    before = point.about if point.number else {**collect_inputs(experiment), **_remembered(folder)}
    check_unchanged(folder, before, collect_inputs(experiment))
    return point


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if before["recipe"] != now["recipe"]:
        changed = "; ".join(list_changes(before["recipe"], now["recipe"]))
        hint = "put it back as it was, or begin another run"
        raise recipe_error(folder / "recipe.toml", "RECIPE_CHANGED", f"the recipe has changed since: {changed}", hint)
    for what in ("data", "partition"):
        if before[what] != now[what]:
            hint = "a run can only go on with the data that it began with"
            raise recipe_error(folder, "DATA_CHANGED", f"the {what} is not that of the run any more", hint)


def list_changes(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """What is different, and where, in a recipe's own words."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from list_changes(before.get(key), now.get(key), f"{place}.{key}" if place else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from list_changes(*pair, f"{place}[{number}]")
    elif before != now:
        yield f"{place} was {_said(before)}, is {_said(now)}"


@dataclass(frozen=True)
class Verdict:
    since: int  # the round whose checkpoint the replay began with; 0: the beginning
    rounds: int  # played again
    differences: tuple[str, ...]


def verify(folder: Path, registry: Registry, data: Path, back: int, workers: int) -> Verdict:
    """Play the last rounds of a finished run again, from the last checkpoint that is at least so many rounds old, and
    compare all that can be compared. Nothing is written."""
    if _status(folder) != "finished":
        raise recipe_error(
            folder, "RUN_FOLDER", "this is not the folder of a finished run", "fedloom resume finishes it"
        )
    experiment = assemble(load(folder / "recipe.toml", registry), registry, data, workers=workers)
    if experiment.loaded.recipe.engine.kind != "in_process":
        said_why = "its devices have kept to themselves what they remember, and so cannot be played again"
        raise recipe_error(folder, "RUN_ENGINE", said_why, 'verify a run with engine.kind = "in_process"')
    said, store = read_manifest(folder), Checkpoints(folder / FOLDER)
    last = max((row.round for row in read_rows(folder)), default=0)
    old = [number for number in store.numbers() if number <= last - back]
    point = store.read(old[-1]) if old else Checkpoint(0, {}, {})
    if point.number:
        check_unchanged(folder, point.about, collect_inputs(experiment))
    made, server = list[Row](), point.server
    restore_experiment(experiment, point)
    with single_thread(), closing(experiment.engine):
        for done in rounds(experiment, point):
            made += done.rows
            server = done.server
            logger.info("round %d replayed", done.number)
        found = compute_fingerprints(experiment, server)
    wrong = [f"{name}: {said[name]} then, {now} now" for name, now in found.items() if said[name] != now]
    written = [row for row in read_rows(folder) if row.round > point.number]
    if [repr(row) for row in written] != [repr(row) for row in made]:
        wrong.append(f"{sum(a != b for a, b in zip(written, made, strict=False))} of {len(written)} rows")
    return Verdict(point.number, last - point.number, tuple(wrong))


def _remembered(folder: Path) -> dict[str, Any]:
    """What the manifest of a run without checkpoint knows of its data."""
    said = read_manifest(folder)
    return {name: said[name] for name in ("data", "partition") if name in said}


def _status(folder: Path) -> str:
    if not (folder / "manifest.json").is_file():
        raise recipe_error(
            folder, "RUN_FOLDER", "this is not the folder of a run", "fedloom run my.toml --out my-run makes one"
        )
    said = read_manifest(folder)
    if "arms" in said:
        raise recipe_error(
            folder, "RUN_FOLDER", "this is a whole comparison", "say one of its runs, such as ARM/seed-0"
        )
    return str(said["status"])


def _said(value: Any) -> str:
    return "not said" if value is None else repr(value)

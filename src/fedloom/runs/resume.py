"""Resume an interrupted run, or replay the last rounds of a finished one and compare the results."""

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
    """The latest unfinished run; if all are finished, the latest. A comparison counts as one run."""
    manifests = {path.parent: read_manifest(path.parent) for path in home.glob("*/manifest.json")}
    if not manifests:
        raise recipe_error(home, "RUN_FOLDER", "there is no run here", "pass its folder")
    return max(manifests, key=lambda run: (manifests[run]["status"] != "finished", manifests[run]["started"]))


AttachEngine = Callable[[Experiment, Registry, Path, Path], Experiment]
"""(experiment, registry, data folder, run folder) -> the experiment with the engine that its recipe names."""


def require_in_process(experiment: Experiment, registry: Registry, data: Path, folder: Path) -> Experiment:
    if experiment.loaded.recipe.engine.kind != "in_process":
        raise recipe_error(
            folder, "RUN_ENGINE", "the devices of this run are elsewhere", "fedloom resume connects to them"
        )
    return experiment


def reopen_run(
    folder: Path, registry: Registry, data: Path, workers: int, attach_engine: AttachEngine = require_in_process
) -> tuple[Experiment, Checkpoint]:
    """An unfinished run and its last checkpoint; refused if recipe or data have changed since."""
    if _status(folder) == "finished":
        raise recipe_error(folder, "RUN_FINISHED", "this run has finished", "fedloom verify replays its last rounds")
    experiment = assemble(load(folder / "recipe.toml", registry), registry, data, workers=workers)
    experiment = attach_engine(experiment, registry, data, folder)
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
    """The checkpoint from which a run in this folder continues; refused if it has another recipe or other data."""
    checkpoint, inputs = Checkpoints(folder / FOLDER).read_newest() or Checkpoint(0, {}, {}), collect_inputs(experiment)
    before = checkpoint.about
    if not checkpoint.number:  # only the manifest knows
        manifest = read_manifest(folder)
        before = {**inputs, **{name: manifest[name] for name in ("data", "partition") if name in manifest}}
    check_unchanged(folder, before, inputs)
    return checkpoint


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if before["recipe"] != now["recipe"]:
        changed = "; ".join(list_changes(before["recipe"], now["recipe"]))
        hint = "undo the change, or start another run"
        raise recipe_error(folder / "recipe.toml", "RECIPE_CHANGED", f"the recipe has changed since: {changed}", hint)
    for what in ("data", "partition"):
        if before[what] != now[what]:
            hint = "a run can only be resumed with the data that it started with"
            raise recipe_error(folder, "DATA_CHANGED", f"the {what} is not that of the run", hint)


def list_changes(before: Any, now: Any, key_path: str = "") -> Iterator[str]:
    """What differs between two recipes, and under which keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            yield from list_changes(before.get(key), now.get(key), f"{key_path}.{key}" if key_path else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from list_changes(*pair, f"{key_path}[{number}]")
    elif before != now:
        yield f"{key_path} was {_format(before)}, is {_format(now)}"


@dataclass(frozen=True)
class Verdict:
    since: int  # the round whose checkpoint the replay started from; 0: the beginning
    rounds: int  # replayed
    differences: tuple[str, ...]


def verify(folder: Path, registry: Registry, data: Path, back: int, workers: int) -> Verdict:
    """Replay the last rounds of a finished run and compare fingerprints and rows. Nothing is written.

    The replay starts from the last checkpoint that is at least `back` rounds old.
    """
    if _status(folder) != "finished":
        raise recipe_error(
            folder, "RUN_FOLDER", "this is not the folder of a finished run", "fedloom resume finishes it"
        )
    experiment = assemble(load(folder / "recipe.toml", registry), registry, data, workers=workers)
    if experiment.loaded.recipe.engine.kind != "in_process":
        message = "its devices store their own states, so its rounds cannot be replayed"
        raise recipe_error(folder, "RUN_ENGINE", message, 'verify a run with engine.kind = "in_process"')
    manifest, store = read_manifest(folder), Checkpoints(folder / FOLDER)
    last = max((row.round for row in read_rows(folder)), default=0)
    old = [number for number in store.numbers() if number <= last - back]
    checkpoint = store.read(old[-1]) if old else Checkpoint(0, {}, {})
    if checkpoint.number:
        check_unchanged(folder, checkpoint.about, collect_inputs(experiment))
    replayed, server = list[Row](), checkpoint.server
    restore_experiment(experiment, checkpoint)
    with single_thread(), closing(experiment.engine):
        for result in rounds(experiment, checkpoint):
            replayed += result.rows
            server = result.server
            logger.info("round %d replayed", result.number)
        fingerprints = compute_fingerprints(experiment, server)
    wrong = [f"{name}: {manifest[name]} then, {now} now" for name, now in fingerprints.items() if manifest[name] != now]
    written = [row for row in read_rows(folder) if row.round > checkpoint.number]
    if [repr(row) for row in written] != [repr(row) for row in replayed]:
        wrong.append(f"{sum(a != b for a, b in zip(written, replayed, strict=False))} of {len(written)} rows")
    return Verdict(checkpoint.number, last - checkpoint.number, tuple(wrong))


def _status(folder: Path) -> str:
    if not (folder / "manifest.json").is_file():
        raise recipe_error(
            folder, "RUN_FOLDER", "this is not the folder of a run", "fedloom run my.toml --out my-run creates one"
        )
    manifest = read_manifest(folder)
    if "arms" in manifest:
        raise recipe_error(
            folder, "RUN_FOLDER", "this is a comparison, not a run", "pass one of its runs, such as ARM/seed-0"
        )
    return str(manifest["status"])


def _format(value: Any) -> str:
    return "not set" if value is None else repr(value)

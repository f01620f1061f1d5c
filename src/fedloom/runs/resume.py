"""Resume an interrupted run, or replay the last rounds of a finished one and compare the results."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..evaluation import Row
from ..placement import Compute, hardware_name
from ..recipe.errors import recipe_error
from ..recipe.registries import Registries
from ..results import Record, Result
from ..tensors import relative_distance
from ..wording import pluralize
from .build import assemble
from .checkpoint import FOLDER, Checkpoint, Checkpoints
from .experiment import Experiment
from .folder import read_manifest, read_rows
from .loop import rounds, single_thread
from .own_names import load_recipe_of
from .recorder import collect_inputs, compute_fingerprints, find_kernels, restore_experiment

logger = logging.getLogger(__name__)


def list_runs(home: Path = Path("runs")) -> dict[Path, dict[str, Any]]:
    """The runs and comparisons in a folder with their manifests, the latest first."""
    manifests = {path.parent: read_manifest(path.parent) for path in home.glob("*/manifest.json")}
    return dict(sorted(manifests.items(), key=lambda item: item[1]["started"], reverse=True))


def find_newest_run(home: Path = Path("runs"), unfinished: bool = False) -> Path:
    """The latest run that is not finished; if all are, the latest, or an error where one must be `unfinished`.

    A comparison counts as one run.
    """
    runs = list_runs(home)
    if not runs:
        raise recipe_error(home, "RUN_FOLDER", "there is no run here", "pass its folder")
    left = [folder for folder, manifest in runs.items() if manifest["status"] != "finished"]
    if unfinished and not left:
        hint = "fedloom resume RUN --rounds N lets one go on for longer"
        raise recipe_error(home, "RUN_FINISHED", "every run here has finished", hint)
    return (left or list(runs))[0]


AttachEngine = Callable[[Experiment, Registries, Path, Path], Experiment]
"""(experiment, registry, data folder, run folder) -> the experiment with the engine that its recipe names."""


def require_in_process(experiment: Experiment, registries: Registries, data: Path, folder: Path) -> Experiment:
    if experiment.loaded.recipe.engine.kind != "in_process":
        raise recipe_error(
            folder, "RUN_ENGINE", "the devices of this run are elsewhere", "fedloom resume connects to them"
        )
    return experiment


def reopen_run(
    folder: Path, registries: Registries, data: Path, workers: int, attach_engine: AttachEngine = require_in_process
) -> tuple[Experiment, Checkpoint]:
    """An unfinished run and its last checkpoint; refused if recipe or data have changed since."""
    if read_status(folder) == "finished":
        hint = f"fedloom resume {folder} --rounds N lets it go on for longer; fedloom verify replays its last rounds"
        raise recipe_error(folder, "RUN_FINISHED", "this run has finished", hint)
    experiment = assemble(load_recipe_of(folder, registries), registries, data, workers=workers)
    experiment = attach_engine(experiment, registries, data, folder)
    return experiment, read_resume_point(folder, experiment)


def open_finished_run(
    folder: Path, registries: Registries, data: Path, workers: int = 1, *, from_result: bool = False
) -> Experiment:
    """The experiment of a finished run, with the data that it was trained on.

    `from_result` makes the run's own final model the model to start from, instead of what the recipe started from.
    """
    require_finished(folder)
    loaded = load_recipe_of(folder, registries)
    if from_result:
        if not (folder / "models").is_dir():
            raise recipe_error(folder, "RUN_FOLDER", "the run's method keeps no model on the server")
        loaded = loaded.with_document({**loaded.recipe.document(), "start": {"from": str(folder)}})
    experiment = assemble(loaded, registries, data, workers=workers)
    if experiment.dataset.fingerprint() != read_manifest(folder).get("data"):
        message = "the data is not what the run was trained on, so measurements would be meaningless"
        raise recipe_error(folder, "RUN_DATA", message, "pass its --data-dir")
    _check_frozen(folder, read_manifest(folder), collect_inputs(experiment))
    return experiment


def read_resume_point(folder: Path, experiment: Experiment, *, any_rounds: bool = False) -> Checkpoint:
    """The checkpoint from which a run in this folder continues; refused if it has another recipe or other data.

    With `any_rounds` the run may go on for more rounds than its recipe had, or for fewer.
    """
    checkpoint, inputs = Checkpoints(folder / FOLDER).read_newest() or Checkpoint(0, {}, {}), collect_inputs(experiment)
    before = checkpoint.about
    if not checkpoint.number:  # only the manifest knows
        manifest = read_manifest(folder)
        before = {**inputs, **{name: manifest[name] for name in ("data", "partition", "frozen") if name in manifest}}
    check_unchanged(folder, before, inputs, any_rounds=any_rounds)
    return checkpoint


ADDED_KEYS: Mapping[str, Mapping[str, Any]] = {
    "engine": {"kernels": "torch"}, "evaluation": {"dense_last": 0.0}, "training": {"shuffle": True},
}  # fmt: skip
"""Keys of recipes that older runs do not have, with what these did."""


def with_added_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a run, with the keys that have been added since it began."""
    return {**document, **{section: {**keys, **document.get(section, {})} for section, keys in ADDED_KEYS.items()}}


def check_unchanged(
    folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], *, any_rounds: bool = False
) -> None:
    recipe = {**with_added_keys(before["recipe"]), **({"rounds": now["recipe"]["rounds"]} if any_rounds else {})}
    if recipe != now["recipe"]:
        changed = "; ".join(list_changes(recipe, now["recipe"]))
        hint = "undo the change, or start another run"
        raise recipe_error(folder / "recipe.toml", "RECIPE_CHANGED", f"the recipe has changed since: {changed}", hint)
    for what in ("data", "partition"):
        if before[what] != now[what]:
            hint = "a run can only be resumed with the data that it started with"
            raise recipe_error(folder, "DATA_CHANGED", f"the {what} is not that of the run", hint)
    _check_frozen(folder, before, now)


def _check_frozen(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Frozen weights are no part of a checkpoint: the family builds them again, maybe from a file that has changed."""
    then, here = before.get("frozen", {}), now.get("frozen", {})
    for tier in (*then, *here):
        if then.get(tier) != here.get(tier):
            shas = f"sha256 {then.get(tier, 'none')[:12]} then, {here.get(tier, 'none')[:12]} now"
            hint = "use the base that the run was trained on"
            raise recipe_error(
                folder, "BASE_CHANGED", f"the frozen weights of tier {tier!r} have changed: {shas}", hint
            )


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


def changed_keys(before: Any, now: Any) -> list[str]:
    """The keys under which two recipes differ."""
    return [change.partition(" was ")[0] for change in list_changes(before, now)]


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """What a replay of a run's last rounds found.

    Parameters
    ----------
    since : the round whose checkpoint the replay started from; 0: the beginning.
    rounds : how many were replayed.
    differences : what is not the same to the bit, or within the tolerance; empty: nothing.
    tolerance : how far the weights may be apart, relative to their norm, where bits cannot be expected: on an
        accelerator without `engine.deterministic`, or on other hardware; 0: not at all.
    kernels : which tiers now have other kernels than in the run, so that rows are compared but for rounding; empty: the
        same.
    """

    since: int
    rounds: int
    differences: tuple[str, ...]
    tolerance: float = 0.0
    kernels: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.replayed}: {'not the same' if self.differences else self.sameness}"

    @property
    def sameness(self) -> str:
        """How far the replay is the same where it does not differ."""
        if self.kernels:
            return f"the same but for rounding, since other kernels ran ({', '.join(self.kernels)})"
        return f"the same within {self.tolerance:g} of the norm" if self.tolerance else "the same to the bit"

    @property
    def replayed(self) -> str:
        """What was replayed, in words."""
        return f"{pluralize(self.rounds, 'round')} after round {self.since} replayed"

    def records(self) -> list[Record]:
        return [{"difference": difference} for difference in self.differences]

    def content(self) -> dict[str, Any]:
        found = {"since": self.since, "rounds": self.rounds, "differences": list(self.differences)}
        found |= {"tolerance": self.tolerance}
        return {**found, **({"kernels": list(self.kernels)} if self.kernels else {})}


def verify(folder: Path, registries: Registries, data: Path, back: int, workers: int) -> Verdict:
    """Replay the last rounds of a finished run and compare fingerprints and rows. Nothing is written.

    The replay starts from the last checkpoint that is at least `back` rounds old.
    """
    require_finished(folder)
    experiment = assemble(load_recipe_of(folder, registries), registries, data, workers=workers)
    if experiment.loaded.recipe.engine.kind != "in_process":
        message = "its devices store their own states, so its rounds cannot be replayed"
        raise recipe_error(folder, "RUN_ENGINE", message, 'verify a run with engine.kind = "in_process"')
    manifest, store = read_manifest(folder), Checkpoints(folder / FOLDER)
    last = max((row.round for row in read_rows(folder)), default=0)
    old = [number for number in store.numbers() if number <= last - back]
    checkpoint = store.read(old[-1]) if old else Checkpoint(0, {}, {})
    if checkpoint.number:
        check_unchanged(folder, checkpoint.about, collect_inputs(experiment), any_rounds=True)
    replayed, server = list[Row](), checkpoint.server
    restore_experiment(experiment, checkpoint)
    with single_thread(), closing(experiment.engine):
        for result in rounds(experiment, checkpoint):
            replayed += result.rows
            server = result.server
            logger.info("round %d replayed", result.number)
        fingerprints = compute_fingerprints(experiment, server)
    written = [row for row in read_rows(folder) if row.round > checkpoint.number]
    kernels = _changed_kernels(manifest, experiment)
    if kernels:
        wrong = _compare_rounded(written, replayed)
        return Verdict(checkpoint.number, last - checkpoint.number, tuple(wrong), kernels=kernels)
    tolerance = _tolerance(experiment.simulator.compute, manifest.get("compute", {}))
    if tolerance:
        apart = relative_distance(server, store.read(last).server)
        far = () if apart <= tolerance else (f"weights: {apart:.3g} of their norm apart",)
        return Verdict(checkpoint.number, last - checkpoint.number, far, tolerance)
    wrong = [f"{name}: {manifest[name]} then, {now} now" for name, now in fingerprints.items() if manifest[name] != now]
    if [repr(row) for row in written] != [repr(row) for row in replayed]:
        wrong.append(f"{sum(a != b for a, b in zip(written, replayed, strict=False))} of {len(written)} rows")
    return Verdict(checkpoint.number, last - checkpoint.number, tuple(wrong))


WITHOUT_BITS = 1e-2
"""How far replayed weights may be from the run's, relative to their norm, where bits cannot be expected."""


def _tolerance(compute: Compute, before: Mapping[str, Any]) -> float:
    """0 where a replay must repeat the run's bits: on the CPU, and on the same accelerator if it is deterministic."""
    same_hardware = before.get("hardware") in (None, hardware_name(compute.torch_device))
    return 0.0 if compute.is_cpu or (compute.deterministic and same_hardware) else WITHOUT_BITS


ROUNDING = 0.05
"""By how much of its size, and at least by how much, a figure may differ where other kernels ran: training magnifies
rounding, and a few examples change sides."""


def _changed_kernels(manifest: Mapping[str, Any], experiment: Experiment) -> tuple[str, ...]:
    """The tiers whose kernels are not those of the run."""
    now = find_kernels(experiment.fleet)
    then = manifest.get("kernels", dict.fromkeys(now, "torch"))
    return tuple(f"{tier}: {then.get(tier)} then, {kind} now" for tier, kind in now.items() if then.get(tier) != kind)


def _compare_rounded(written: list[Row], replayed: list[Row]) -> list[str]:
    """What differs by more than rounding; figures that cannot differ by rounding must be equal."""
    if [replace(row, value=0.0) for row in written] != [replace(row, value=0.0) for row in replayed]:
        return [f"{len(written)} rows then, {len(replayed)} others now"]
    far = [
        (before, after)
        for before, after in zip(written, replayed, strict=True)
        if not math.isclose(before.value, after.value, rel_tol=ROUNDING, abs_tol=ROUNDING)
        and not (math.isnan(before.value) and math.isnan(after.value))
    ]
    names = sorted({before.metric for before, _ in far})
    return [f"{len(far)} of {len(written)} rows by more than {ROUNDING:.0%}: {', '.join(names)}"] if far else []


def require_finished(folder: Path) -> None:
    """Raise unless this is the folder of a finished run."""
    status = read_status(folder)
    if status != "finished":
        hint = f"fedloom resume {folder} runs what is left; fedloom finish {folder} takes it as it is"
        raise recipe_error(folder, "RUN_FOLDER", f"this run is not finished, it is {status}", hint)


def read_status(folder: Path) -> str:
    """The status of a run; raises if the folder is not that of one."""
    if not (folder / "manifest.json").is_file():
        raise recipe_error(
            folder, "RUN_FOLDER", "this is not the folder of a run", "fedloom run my.toml --out my-run creates one"
        )
    manifest = read_manifest(folder)
    if "arms" in manifest:
        order = {arm: number for number, arm in enumerate(manifest["arms"])}  # the recipe's own comes first
        found = sorted(path.parent for path in folder.glob("*/*/manifest.json"))
        inside = [str(path) for path in sorted(found, key=lambda path: order.get(path.parent.name, len(order)))]
        names = ", ".join(inside[:4]) + (f" and {len(inside) - 4} more" if len(inside) > 4 else "")
        hint = f"pass one of its runs: {names}" if inside else "none of its runs has begun"
        raise recipe_error(folder, "RUN_FOLDER", f"this is a {manifest.get('kind', 'comparison')}, not a run", hint)
    return str(manifest["status"])


def _format(value: Any) -> str:
    return "not set" if value is None else repr(value)

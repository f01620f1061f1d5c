"""A simulation: a recipe composed in Python, run round by round, and saved as a run like any other."""

import logging
import shutil
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..data import Dataset
from ..deploy.remote import attach_engine
from ..recipe.errors import recipe_error
from ..recipe.load import LoadedRecipe, dumps, load
from ..recipe.paths import resolve_data_folder
from ..recipe.registries import Registries
from ..recipe.validation import as_tuples
from ..runs.build import assemble
from ..runs.checkpoint import FOLDER, Checkpoint, Checkpoints
from ..runs.data import read_data
from ..runs.experiment import Experiment
from ..runs.folder import read_manifest
from ..runs.loop import RoundResult
from ..runs.own_names import load_recipe_of
from ..runs.recorder import finish_early, record_rounds
from ..runs.resume import read_resume_point
from ..runs.trackers import TrackerChoice, build_trackers, find_tracker
from ..wording import pluralize
from .parts import ClientConfig, Composer, Named, Tiers
from .run import Run

__all__ = ["Rounds", "Simulation"]
logger = logging.getLogger(__name__)


class Simulation:
    """Federated training of a simulated fleet, composed of objects or names.

    Nothing runs until `rounds` is iterated. Everything is checked at once, with the errors of a recipe. Arguments that
    are mappings have the keys of the recipe's section of that name.

    Parameters
    ----------
    dataset : a name, `datasets.mnist()`, arrays `(x, y)` or `(x, y, x_test, y_test)`, torch data sets, a data frame
        with its label column `(frame, "label")`, or a `Dataset`.
    partition : how the examples are divided among devices: `partitions.dirichlet(devices=20, alpha=0.3)`, a name, or
        your own function `(labels, devices, generator) -> Partition`.
    tiers : device classes and their models, from `tiers`.
    method : a method: `methods.HeteroFL()`, a name, or your own class or object.
    devices : how many there are, unless the partition says so. Default: 20.
    client : how devices train.
    fleet : participation, sampling, assignment of tiers.
    evaluation : when and on what models are evaluated, and with which metrics.
    engine : how devices are run: a name, or a mapping with settings.
    aggregation : a robust rule: `aggregation.median()`, a name, or your own. Default: the method's weighted mean. Or a
        mapping with `rule` and `server_optimizer`, such as `server_optimizers.adam(lr=0.01)`.
    faults : dropout, stragglers, outages, deadlines.
    compression : a compressor of uploads, or a mapping with `uplink` and `downlink`.
    privacy : clipping and noise of differential privacy.
    admission : optional checks of what devices upload.
    checkpoints : how often the state is saved.
    data : further keys of the recipe's `data` section, such as `max_examples` or `public`.
    task : what is learned: a name, `tasks.regression`, or a `LearningTask`. Default: what the data set says.
    start_from : a run's folder or a safetensors file to take the first weights from.
    rounds : how many rounds `rounds()` runs by default.
    seed : of everything random.
    data_dir : the folder of the data sets. Default: FEDLOOM_DATA, then ./data.
    workers : processes on this machine. Results do not depend on it.
    registries : names of your own besides the registered ones.

    Examples
    --------
    >>> sim = fl.Simulation(
    ...     dataset=fl.datasets.digits(),
    ...     partition=fl.partitions.dirichlet(devices=20, alpha=0.3),
    ...     tiers=fl.tiers(fl.models.convnet, large=dict(share=0.3), small=dict(share=0.7, width=0.25)),
    ...     method=fl.methods.HeteroFL(),
    ... )
    >>> for result in sim.rounds(10):
    ...     print(result.number, result.metrics)
    >>> run = sim.save("my-run")
    """

    def __init__(
        self,
        dataset: Any = "fashion-mini",
        partition: Named = "iid",
        tiers: Tiers | Mapping[str, Any] | None = None,
        method: Named = "heterofl",
        *,
        devices: int | None = None,
        client: ClientConfig | Mapping[str, Any] | None = None,
        fleet: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        engine: Named = "in_process",
        aggregation: Named | None = None,
        faults: Mapping[str, Any] | None = None,
        compression: Named | None = None,
        privacy: Mapping[str, Any] | None = None,
        admission: Mapping[str, Any] | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        task: Named | None = None,
        start_from: str | Path | None = None,
        rounds: int = 10,
        seed: int = 0,
        data_dir: str | Path | None = None,
        workers: int = 1,
        registries: Registries | None = None,
    ):
        composer = Composer(registries or Registries())
        if tiers is None:
            raise TypeError("tiers is required, e.g. tiers=fedloom.tiers(fedloom.models.convnet, all=dict(share=1.0))")
        model, listed = composer.tiers(tiers)
        split = composer.choose("partitions", partition)
        count = split.pop("devices", devices)
        if devices is not None and count != devices:
            raise TypeError(f"the partition is for {count} devices, but devices is {devices}")
        _check_mappings(
            fleet=fleet, evaluation=evaluation, faults=faults, privacy=privacy, admission=admission,
            checkpoints=checkpoints, data=data,
        )  # fmt: skip
        named = {"dataset", "partition", "devices"} & set(data or ())
        if named:
            raise TypeError(f"{sorted(named)[0]} is an argument of its own, not a key of data")
        learned = None if task is None else composer.task(task)
        sections: dict[str, Any] = {
            "data": {
                **(data or {}),
                **composer.dataset(dataset, learned),
                "partition": split,
            },
            "task": learned,
            "model": model,
            "training": composer.training(client or ClientConfig()),
            "method": composer.method(method),
            "engine": composer.engine(engine),
            "fleet": fleet,
            "evaluation": None if evaluation is None else composer.evaluation(evaluation),
            "aggregation": None if aggregation is None else composer.aggregation(aggregation),
            "faults": None if faults is None else composer.faults(faults),
            "compression": None if compression is None else composer.compression(compression),
            "privacy": privacy,
            "admission": admission,
            "checkpoints": checkpoints,
            "start": None if start_from is None else {"from": str(start_from)},
        }
        if count is not None:
            sections["data"]["devices"] = count
        document = {
            "seed": seed, "rounds": rounds, "tiers": listed,
            **{name: section for name, section in sections.items() if section},
        }  # fmt: skip
        self._prepare(load(document, composer.result), composer.result, resolve_data_folder(data_dir), workers)

    @classmethod
    def from_recipe(
        cls,
        recipe: str | Path | Mapping[str, Any],
        *,
        sets: Sequence[str] = (),
        seed: int | None = None,
        data_dir: str | Path | None = None,
        workers: int = 1,
        extensions: Sequence[str | Path] = (),
        registries: Registries | None = None,
    ) -> "Simulation":
        """The simulation that a recipe describes.

        Parameters
        ----------
        recipe : a TOML file, or the same as a mapping.
        sets : changes to it, e.g. `["training.epochs=2"]`.
        seed : instead of the recipe's.
        data_dir, workers, registries : as for `Simulation`.
        extensions : Python files that add names, as `--with` does.

        Returns
        -------
        Simulation
            With the same bits as `run` of the same recipe.
        """
        registries = with_files(registries or Registries(), extensions)
        changes = [*sets, *([] if seed is None else [f"seed={seed}"])]
        simulation = cls.__new__(cls)
        simulation._prepare(load(recipe, registries, changes), registries, resolve_data_folder(data_dir), workers)
        return simulation

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        *,
        data_dir: str | Path | None = None,
        workers: int = 1,
        extensions: Sequence[str | Path] = (),
        registries: Registries | None = None,
    ) -> "Simulation":
        """The simulation of a run's folder, which `rounds` continues from its last checkpoint.

        Parameters
        ----------
        folder : the folder of a run that was interrupted, or that is to go on for more rounds.
        data_dir, workers, extensions, registries : as for `from_recipe`.

        Returns
        -------
        Simulation
            It writes to the same folder.
        """
        path = Path(folder)
        if not (path / "recipe.toml").is_file():
            raise recipe_error(path, "RUN_FOLDER", "this is not the folder of a run")
        registries = with_files(registries or Registries(), extensions)
        simulation = cls.__new__(cls)
        simulation._prepare(load_recipe_of(path, registries), registries, resolve_data_folder(data_dir), workers)
        simulation._folder = path
        return simulation

    def _prepare(self, loaded: LoadedRecipe, registries: Registries, data: Path, workers: int) -> None:
        self._loaded, self.registries, self.data_dir, self._workers = loaded, registries, data, workers
        self._names = registries  # without metrics that rounds() was given
        self._running: weakref.ref[Rounds] | None = None
        self._dataset: Dataset | None = None
        self._folder: Path | None = None
        self._scratch: weakref.finalize[..., Simulation] | None = None
        self._assemble(loaded, registries)  # whatever is wrong shows now

    @property
    def recipe(self) -> Mapping[str, Any]:
        """The recipe with all defaults."""
        return self._loaded.recipe.document()

    def to_recipe(self, file: str | Path | None = None) -> dict[str, Any]:
        """The simulation as a recipe: the same bits when it is run.

        Parameters
        ----------
        file : a new TOML file to write it to.

        Returns
        -------
        dict
            The same as a mapping, for `from_recipe` or `run`. Objects of your own have the names that
            `registries` of this simulation knows; from another process, add them by a file (`--with`).
        """
        document = self._loaded.recipe.document()
        if file is not None:
            path = Path(file)
            if path.exists():
                raise recipe_error(path, "OUT_EXISTS", f"{path} exists already", "choose another name")
            path.write_text(dumps(document), encoding="utf-8")
        return document

    def rounds(
        self,
        count: int | None = None,
        *,
        metrics: Sequence[Any] | None = None,
        track: Sequence[TrackerChoice] = (),
    ) -> "Rounds":
        """Run rounds and yield the result of each: log it, plot it, or stop early with `break`.

        Called again, it goes on where the last call ended. If the method has a last exchange, that is one more result
        after the last round. Rounds that were run in several calls have the same results as in one.

        Parameters
        ----------
        count : how many rounds. Default: those that are left of `rounds`.
        metrics : names, `metrics.f1()`, or functions `(logits, labels) -> float` to evaluate with. Default: those of
            `evaluation`. They cannot change once a round has run.
        track : trackers that get every row: "csv", "tensorboard", "mlflow", "wandb", or your own.

        Yields
        ------
        RoundResult
            `number`, `metrics`, `rows`, `traffic`, `seconds`.
        """
        self._stop("another call of rounds()")
        if count is not None and count < 1:
            raise ValueError(f"count is at least 1, not {count}")
        since = self._newest()
        done, planned = 0 if since is None else since.number, self._loaded.recipe.rounds
        if done > planned:
            raise ValueError(
                f"{self._loaded.recipe.method.name} has ended with its last exchange and cannot go on; "
                "make a new Simulation with more rounds"
            )
        if count is None and done >= planned:
            raise ValueError(f"it has run all of its {pluralize(done, 'round')}; rounds(5) runs five more")
        evaluation, names = self._choose_metrics(metrics, done)
        document = {**self._loaded.recipe.document(), "rounds": planned if count is None else done + count}
        loaded = load({**document, "evaluation": evaluation}, names)
        trackers = build_trackers(find_trackers(track, names))
        experiment = attach_engine(self._assemble(loaded, names), names, self.data_dir, self.folder)
        if since is not None:
            since = read_resume_point(self.folder, experiment, any_rounds=True)
        self._loaded, self.registries = loaded, names
        running = Rounds(record_rounds(experiment, self.folder, since, trackers))
        self._running = weakref.ref(running)
        return running

    def _choose_metrics(self, metrics: Any, done: int) -> tuple[dict[str, Any], Registries]:
        """The recipe's `evaluation` with these metrics, and the names with those of your own."""
        before = self._loaded.recipe.document()["evaluation"]
        if metrics is None:
            return before, self.registries
        composer = Composer(self._names)
        evaluation = composer.evaluation({**before, "metrics": metrics})
        names, kinds = composer.result, [metric["kind"] for metric in evaluation["metrics"]]
        same = as_tuples(evaluation["metrics"]) == before.get("metrics") and all(
            names.metrics[kind] == self.registries.metrics[kind] for kind in kinds
        )
        if done and not same:
            raise ValueError(
                f"it has evaluated {pluralize(done, 'round')} already; metrics can only be chosen before the first"
            )
        return evaluation, names

    def _assemble(self, loaded: LoadedRecipe, names: Registries) -> Experiment:
        if self._dataset is None:
            self._dataset = read_data(loaded, names, self.data_dir)
        return assemble(loaded, names, self.data_dir, self._dataset, workers=self._workers)

    def _stop(self, what: str) -> None:
        """End a loop over rounds that was left without ending its iterator."""
        running = None if self._running is None else self._running()
        if running is not None:
            running.stop(f"{what} has ended this loop over rounds(); break out of the loop where you do that")
        self._running = None

    def _newest(self) -> Checkpoint | None:
        if self._folder is None or not self._folder.exists():
            return None
        return Checkpoints(self._folder / FOLDER).read_newest() or Checkpoint(0, {}, {})

    @property
    def folder(self) -> Path:
        """Where the run is recorded: a temporary folder until `save`."""
        if self._folder is None:
            scratch = Path(tempfile.mkdtemp(prefix="fedloom-"))
            self._scratch = weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
            self._folder = scratch / self._loaded.recipe.method.name
        return self._folder

    @property
    def run(self) -> Run:
        """The run: its rows, models and report. One that was stopped early is ended here, as if it had been shorter."""
        self._finish()
        return Run(self.folder, self.registries, self.data_dir, owner=self if self._scratch else None)

    def _finish(self, what: str = "run") -> None:
        """End a run that was stopped early, as if that many rounds had been asked for."""
        self._stop(f"Simulation.{what}")
        since = self._newest()
        if since is None or not since.number:
            raise ValueError("no round has run yet; iterate rounds() first")
        if read_manifest(self.folder)["status"] == "finished":
            return
        planned = self._loaded.recipe.rounds
        if since.number < planned:
            logger.info("ended after round %d of %d", since.number, planned)
        document = {**self._loaded.recipe.document(), "rounds": min(since.number, planned)}
        self._loaded = load(document, self.registries)
        experiment = self._assemble(self._loaded, self.registries)
        experiment = attach_engine(experiment, self.registries, self.data_dir, self.folder)
        finish_early(experiment, self.folder, read_resume_point(self.folder, experiment, any_rounds=True))

    def save(self, folder: str | Path) -> Run:
        """Keep the run in a folder: recipe, rows, models, checkpoints.

        Parameters
        ----------
        folder : a new folder.

        Returns
        -------
        Run
            As `open_run` gives it.
        """
        path = Path(folder)
        if path.exists():
            raise recipe_error(path, "OUT_EXISTS", f"{path} exists already", "a run never overwrites another one")
        self._finish("save")
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._scratch is None:
            shutil.copytree(self.folder, path)
        else:
            shutil.move(self.folder, path)
            self._scratch()
            self._scratch = None
        self._folder = path
        return self.run

    def model(self, tier: str | None = None, *, device: str | None = None, macs: int | None = None) -> nn.Module:
        """A trained model for inference, which takes examples as they are stored.

        Parameters
        ----------
        tier : whose model; default: the largest tier's.
        device : the personal model of this device instead.
        macs : the largest subnet with at most so many multiply-adds instead.
        """
        self._finish("model")
        return self.run.model(tier, device=device, macs=macs)

    @property
    def completed_rounds(self) -> int:
        """How many rounds are saved."""
        since = self._newest()
        return 0 if since is None else min(since.number, self._loaded.recipe.rounds)

    def __repr__(self) -> str:
        recipe = self._loaded.recipe
        tiers = ", ".join(f"{tier.name} {tier.share:.0%}" for tier in recipe.tiers)
        since = self._newest()
        done = f"{since.number if since else 0} of {pluralize(recipe.rounds, 'round')}"
        devices = f"{pluralize(recipe.data.devices, 'device')} ({tiers})"
        return f"<Simulation: {recipe.method.name} on {recipe.data.dataset}, {devices}, {done}>"


class Rounds(Iterator[RoundResult]):
    """The results of rounds while they run, from `Simulation.rounds`.

    Parameters
    ----------
    results : the rounds, as they are recorded.
    """

    def __init__(self, results: Generator[RoundResult, None, None]):
        self._results = results
        self._has_ended, self._stopped = False, ""

    def __next__(self) -> RoundResult:
        if self._stopped:
            raise RuntimeError(self._stopped)
        try:
            return next(self._results)
        except BaseException:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Stop after the round that has just ended."""
        self._results.close()
        self._has_ended = True

    def stop(self, why: str) -> None:
        """Stop, and raise an error where the loop goes on nevertheless.

        Parameters
        ----------
        why : the message.
        """
        if not self._has_ended:
            self.close()
            self._stopped = why


def with_files(registries: Registries, files: Sequence[str | Path]) -> Registries:
    """With the names that Python files add, as `--with` does."""
    for file in files:
        registries = registries.with_file(Path(file))
    return registries


def find_trackers(track: Sequence[TrackerChoice], registries: Registries) -> list[TrackerChoice]:
    """Trackers by name are looked up among all names."""
    listed: Sequence[Any] = track if isinstance(track, list | tuple) else [track]
    return [find_tracker(one, registries.trackers) if isinstance(one, str) else one for one in listed]


def _check_mappings(**sections: Any) -> None:
    for name, section in sections.items():
        if section is not None and not isinstance(section, Mapping):
            raise TypeError(f"{name} is a mapping with the keys of the recipe's section, not {section!r}")

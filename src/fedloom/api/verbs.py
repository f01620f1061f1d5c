"""A Python function for every verb of the command line, with the same arguments and the same results.

Arguments that most of them share:

recipe : a TOML file, the same as a mapping, or a `Simulation`.
sets : changes to the recipe, e.g. `["training.epochs=2"]`.
seed : instead of the recipe's.
data_dir : the folder of the data sets; default: FEDLOOM_DATA, then ./data.
workers : processes on this machine; results do not depend on it.
track : trackers that get every row: "csv", "tensorboard", "mlflow", "wandb", or your own.
progress : True shows progress on stderr, False nothing; a function is called with a run's name and each result.
    Default: as log messages (`fedloom.logs.show()` shows them).
extensions : Python files that add names, as `--with` does.
registries : names of your own besides the registered ones.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..analysis import audit as audits
from ..analysis import export_run
from ..analysis.costs import ServerCost, TierCost, check_message_sizes, server_cost, tier_costs
from ..analysis.export_run import ExportResult
from ..analysis.planning import DeviceSpec, FleetPlan, plan_fleet, read_device_specs
from ..analysis.profiling import RoundTime, estimate_round_time, latency_ms
from ..analysis.subnets import Budget, open_supernet, start_search
from ..analysis.trained import CkaMap, ModelSelector, compute_cka
from ..data import DataError, DataMissing
from ..deploy.remote import attach_engine, check_engine
from ..engines import keep_freed_memory
from ..exporting import InputKind
from ..recipe.errors import RecipeError, RecipeIssue, recipe_error
from ..recipe.load import LoadedRecipe, load
from ..recipe.paths import choose_output_folder, resolve_data_folder
from ..recipe.registries import KINDS, Registries
from ..registry import Layered, suggest
from ..reporting.paired_stats import Difference, mean_and_std
from ..reporting.search import SEARCH_FOLDER, is_search, read_searches, search_sentence
from ..reporting.tables import FILES, ComparisonResult
from ..reporting.targets import BudgetUnit
from ..results import Record, Result
from ..runs.build import assemble, check_deployment
from ..runs.build import check as check_build
from ..runs.data import read_data_spec
from ..runs.effects import describe_idle_settings
from ..runs.resume import Verdict, find_newest_run, read_status, reopen_run
from ..runs.resume import verify as verify_run
from ..runs.trackers import TrackerChoice, build_trackers
from ..studies.attack_bench import AttackCell, accuracy_losses, build_attack_bench
from ..studies.compare import Comparison, is_comparison, plan_comparison, reopen_comparison
from ..studies.controls import CONTROLS, arms_with_methods, build_arms, errors_at_arm, supported_methods
from ..studies.tune import Search, SearchTerms, plan_search, reopen_search
from ..wording import pluralize
from .parts import is_same_entry
from .progress import Progress, display, explain_interrupt, run_experiment, run_group
from .run import Run, default_report_file, write_report
from .simulation import Simulation, find_trackers, with_files
from .tune import TuneResult, run_search

__all__ = [
    "AttackResult", "CompareResult", "PlanResult", "SubnetResult", "TuneResult", "attack", "audit", "check", "cka",
    "compare", "export", "finish", "load_model", "open_run", "plan", "report", "resume", "run", "subnet", "tune",
    "verify",
]  # fmt: skip

logger = logging.getLogger(__name__)

SEARCH_SUMMARY = ("arm", "metric", "trials", "rounds", "seeds", "space", "validation_examples", "bytes", "choice")
ON_FLOWER = ("flower", "flower-sim")  # engines whose messages Flower delivers

RecipeLike = str | Path | Mapping[str, Any] | Simulation
RunLike = str | Path | Run


def gather_names(
    registries: Registries | None = None, extensions: Sequence[str | Path] = (), recipe: RecipeLike | None = None
) -> Registries:
    """All names that a verb may use: registered, those of files, and a simulation's own."""
    names = registries or Registries()
    if isinstance(recipe, Simulation):
        names = names.with_names(**own_entries(recipe.registries)) if registries else recipe.registries
    return with_files(names, extensions)


def own_entries(registries: Registries) -> dict[str, dict[str, Any]]:
    """The names that only these tables have, by kind."""
    tables = {kind: getattr(registries, kind) for kind in KINDS}
    return {kind: table.entries() for kind, table in tables.items() if isinstance(table, Layered)}


def names_of(run: "RunLike", registries: Registries | None = None, extensions: Sequence[str | Path] = ()) -> Registries:
    """All names that a run may use: those that it was opened with, unless there are others."""
    return with_files(registries or (run.registries if isinstance(run, Run) else Registries()), extensions)


def data_of(source: "RecipeLike | RunLike", data_dir: str | Path | None) -> Path:
    """The folder of the data sets: the given one, that of a simulation or a run, or the default."""
    if data_dir is None and isinstance(source, Simulation):
        return source.data_dir
    return source.data if data_dir is None and isinstance(source, Run) else resolve_data_folder(data_dir)


def load_recipe(
    recipe: RecipeLike, registries: Registries, sets: Sequence[str] = (), seed: int | None = None
) -> LoadedRecipe:
    """A recipe with its changes applied, completely checked."""
    source = recipe.to_recipe() if isinstance(recipe, Simulation) else recipe
    return load(source, registries, [*sets, *([] if seed is None else [f"seed={seed}"])])


def _require_test(loaded: LoadedRecipe, test: str) -> None:
    """Raise unless the recipe evaluates on the test set that results are read from."""
    if test not in loaded.recipe.evaluation.tests:
        message = f"the recipe does not evaluate on {test!r}"
        raise loaded.error(RecipeIssue(("evaluation", "tests"), "TEST_NAME", message))


def folder_of(run: RunLike) -> Path:
    return run.folder if isinstance(run, Run) else Path(run)


def run(
    recipe: RecipeLike,
    *,
    sets: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    data_dir: str | Path | None = None,
    workers: int = 1,
    track: Sequence[TrackerChoice] = (),
    progress: Progress = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> Run:
    """Train by a recipe, and return the finished run.

    Parameters
    ----------
    recipe : a TOML file, the same as a mapping, or a `Simulation`.
    sets : changes to the recipe, e.g. `["training.epochs=2"]`.
    seed : instead of the recipe's.
    out : the run's folder, which must not exist yet. Default: a new one in ./runs.
    force : whether `out` may replace an earlier run.
    data_dir : the folder of the data sets. Default: FEDLOOM_DATA, then ./data.
    workers : processes on this machine. Results do not depend on it.
    track : trackers that get every row: "csv", "tensorboard", "mlflow", "wandb", or your own.
    progress : True shows progress, False nothing; a function is called with a name and each result.
    extensions : Python files that add names, as `--with` does.
    registries : names of your own besides the registered ones.

    Returns
    -------
    Run
        Its rows, models and report.

    Examples
    --------
    >>> run = fl.run("recipe.toml", seed=1, out="my-run")
    """
    keep_freed_memory()
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    trackers = build_trackers(find_trackers(track, names))
    loaded = load_recipe(recipe, names, sets, seed)
    folder = choose_output_folder(out, loaded.recipe.method.name, force)
    experiment = attach_engine(assemble(loaded, names, data, workers=workers), names, data, folder)
    for line in describe_idle_settings(loaded, names, experiment.fleet, experiment.method):
        logger.info("%s", line)
    run_experiment(experiment, folder, loaded.recipe.method.name, trackers=trackers, progress=progress)
    return Run(folder, names, data)


def resume(
    folder: str | Path | None = None,
    *,
    rounds: int | None = None,
    test: str | None = None,
    equal: BudgetUnit = "rounds",
    data_dir: str | Path | None = None,
    workers: int = 1,
    track: Sequence[TrackerChoice] = (),
    progress: Progress = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> "Run | CompareResult | TuneResult":
    """Finish a run, a whole comparison or a search from its folder: the same bits as if it had never stopped.

    Parameters
    ----------
    folder : of the run, comparison or search. Default: the newest in ./runs that is not finished.
    rounds : go on until so many rounds are done, more than the recipe asked for; also for a run that has finished.
    test, equal : for a comparison, as for `compare`; default: as it was begun.
    data_dir, workers, track, progress, extensions, registries : as for `run`.

    Returns
    -------
    Run, CompareResult or TuneResult
    """
    keep_freed_memory()
    path = find_newest_run(unfinished=rounds is None) if folder is None else Path(folder)
    names, data = gather_names(registries, extensions), resolve_data_folder(data_dir)
    if rounds is not None:
        return _prolong(path, rounds, names, data, workers, track, progress)
    if is_search(path):
        return run_search(reopen_search(path, names, data, workers), progress)
    if is_comparison(path):
        planned = replace(reopen_comparison(path, names, data, workers), track=tuple(find_trackers(track, names)))
        if is_search(path / SEARCH_FOLDER):
            planned = _tuned(planned, reopen_search(path / SEARCH_FOLDER, names, data, workers), progress)
        counted = planned.equal if equal == "rounds" else equal
        return run_comparison(replace(planned, test=test or planned.test, equal=counted), names, data, progress)
    experiment, since = reopen_run(path, names, data, workers, attach_engine)
    method = experiment.loaded.recipe.method.name
    logger.info("%s: continues after round %d", path, since.number)
    run_experiment(experiment, path, method, since, build_trackers(find_trackers(track, names)), progress)
    return Run(path, names, data, since.number)


def _prolong(
    folder: Path, rounds: int, names: Registries, data: Path, workers: int, track: Sequence[TrackerChoice],
    progress: Progress,
) -> Run:  # fmt: skip
    """Run a run on until it has this many rounds."""
    read_status(folder)
    simulation = Simulation.resume(folder, data_dir=data, workers=workers, registries=names)
    done = simulation.completed_rounds
    if rounds <= done:
        hint = "the number counts all rounds, those that have run included"
        raise recipe_error(folder, "ROUNDS_DONE", f"it has run {pluralize(done, 'round')} already", hint)
    with explain_interrupt(folder), display({folder.name: rounds}, progress) as show:
        for result in simulation.rounds(rounds - done, track=track):
            show(folder.name, result)
    return Run(folder, names, data, done)


def finish(
    folder: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> Run:
    """Take an interrupted run as it is: its models, report and fingerprints, as if its recipe had ended there.

    Parameters
    ----------
    folder : of the run. Default: the newest in ./runs that is not finished.
    data_dir, extensions, registries : as for `run`.

    Returns
    -------
    Run
        The same bits as a run of that many rounds.
    """
    keep_freed_memory()
    path = find_newest_run(unfinished=True) if folder is None else Path(folder)
    if read_status(path) == "finished":
        raise recipe_error(path, "RUN_FINISHED", "this run has finished")
    names, data = gather_names(registries, extensions), resolve_data_folder(data_dir)
    simulation = Simulation.resume(path, data_dir=data, registries=names)
    if not simulation.completed_rounds:
        hint = f"fedloom resume {path} starts it again"
        raise recipe_error(path, "ROUNDS_NONE", "no round of this run has been saved", hint)
    return simulation.run


def open_run(
    folder: str | Path,
    *,
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> Run:
    """Open the folder of a run: its rows, models and report.

    Parameters
    ----------
    folder : of the run.
    data_dir, extensions, registries : as for `run`.
    """
    read_status(Path(folder))
    return Run(Path(folder), gather_names(registries, extensions), resolve_data_folder(data_dir))


def load_model(
    path: str | Path, *, extensions: Sequence[str | Path] = (), registries: Registries | None = None
) -> nn.Module:
    """Load a model from safetensors, ready to use: in evaluation mode, with batch-norm statistics and preparation.

    Parameters
    ----------
    path : the folder that `export` wrote, the file that `subnet` wrote, or a model of a run, such as
        `my-run/models/small.safetensors`.
    extensions, registries : as for `run`, for a model family of your own.

    Returns
    -------
    nn.Module
        It takes examples as the data set stores them, and returns logits.
    """
    return export_run.load_exported(Path(path), gather_names(registries, extensions))


@dataclass(frozen=True, repr=False)
class CompareResult(Result):
    """A finished comparison: every arm's result by tier, and the verdict.

    Parameters
    ----------
    folder : of the comparison; each arm and seed is a run inside.
    result : records, verdict, targets and claims.
    failed : names of runs that failed.
    registries : names of your own that its models need.
    data : the folder of the data sets.
    """

    folder: Path
    result: ComparisonResult
    failed: tuple[str, ...] = ()
    registries: Registries = field(default_factory=Registries)
    data: Path = field(default_factory=resolve_data_folder)

    @property
    def verdict(self) -> list[str]:
        """What the comparison concludes, a sentence each."""
        return self.result.verdict

    @property
    def title(self) -> str:
        lines = [f"comparison in {self.folder}, on the {self.result.test} test", self.result.finding, *self.verdict]
        return "\n".join(filter(None, lines))

    def records(self) -> list[Record]:
        return [_flat(record) for record in self.result.records]

    def content(self) -> dict[str, Any]:
        return {
            "run": str(self.folder),
            "arms": self.result.records,
            "test": self.result.test,
            "finding": self.result.finding,
            "verdict": self.result.verdict,
            "targets": [target.record() for target in self.result.reached],
            "claims": [claim.record() for claim in self.result.claims],
            "overall": [difference.record() for difference in self.result.overall],
            "pairs": [_pair_record(pair) for pair in self.result.pairs],
            "devices": [one.record() for one in self.result.devices],
            "left_out": self.result.left_out,
            "failed": list(self.failed),
            "searches": [{key: one[key] for key in SEARCH_SUMMARY} for one in read_searches(self.folder)],
        }

    def runs(self, arm: str) -> list[Run]:
        """The runs of an arm, by seed.

        Parameters
        ----------
        arm : its name.
        """
        folders = [path.parent for path in (self.folder / arm).glob("seed-*/manifest.json")]
        if not folders:
            known = sorted({str(record["arm"]) for record in self.result.records})
            raise KeyError(f"there is no arm {arm!r}; {suggest(arm, known)}")
        folders.sort(key=lambda folder: int(folder.name.removeprefix("seed-")))
        return [Run(folder, self.registries, self.data) for folder in folders]


def _pair_record(pair: Difference) -> Record:
    """A difference at one tier, and the sentence that says whether it may be claimed."""
    return {"tier": pair.tier, **pair.record(), "may_be_claimed": pair.beyond_noise, "sentence": str(pair)}


def _flat(record: Mapping[str, Any]) -> Record:
    """The columns of an arm's record that fit a table: means over seeds by tier, and what the arm costs."""
    tests = {key: record.get(key) for key in ("local_test", "global_test")}
    return {
        "arm": record["arm"],
        "metric": record["metric"],
        **{tier: value["mean"] for tier, value in record[record["metric"]].items()},
        "worst_tier": record["worst_tier"]["mean"],
        **{key: values["all"]["mean"] for key, values in tests.items() if values},
        **{name: record[name] for name in ("served_percent", "bytes_per_round", "seconds")},
    }


def compare(
    recipe: RecipeLike,
    *others: RecipeLike,
    seeds: int = 1,
    methods: Sequence[str] | Literal["all"] = (),
    controls: Sequence[str] | None = None,
    test: str | None = None,
    equal: BudgetUnit = "rounds",
    metric: str | None = None,
    tune: int = 0,
    sets: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    track: Sequence[TrackerChoice] = (),
    progress: Progress = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
    command: str = "",
) -> CompareResult:
    """Run a recipe next to other recipes, methods and controls, paired by seed, and conclude.

    Parameters
    ----------
    recipe : the first arm: a TOML file, a mapping, or a `Simulation`.
    *others : further recipes, for the same data, rounds and evaluation.
    seeds : how many, counted from the recipe's.
    methods : names of methods to run the same recipe with; "all": every method that fits.
    controls : usual ways to treat a fleet: "standalone", "small-for-all", "drop-the-small", "all-large". Default: all
        of them, or none if there are other arms.
    test : "global" or "local". Default: the one that the first arm's method is for, so "local" for personal models.
    equal : what arms have spent equally when they are compared: "rounds", "bytes" or "seconds". With
        `compare.rounds_by = "bytes"` in the recipe it is bytes.
    metric : what verdicts are about. Default: accuracy, or perplexity for language models.
    tune : first search the settings of every arm with so many trials each, on validation examples; 0: none.
    sets, seed, out, data_dir, workers, track, progress, extensions, registries : as for `run`.
    command : the command that repeats it, for the report.

    Returns
    -------
    CompareResult

    Examples
    --------
    >>> fl.compare("recipe.toml", seeds=5, methods=["fedavg", "fedrolex"])
    """
    keep_freed_memory()
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    for other in others:
        if isinstance(other, Simulation):
            names = _with_own_names_of(other, names)
    changes = [*sets, *([] if metric is None else [f"compare.metric={json.dumps(metric)}"])]
    loaded = load_recipe(recipe, names, changes, seed)
    if test is not None:
        _require_test(loaded, test)
    arms = {
        _arm_name(other, number): load_recipe(other, names, sets, loaded.recipe.seed)
        for number, other in enumerate(others, 2)
    }
    chosen, left_out = supported_methods(loaded, names, data) if methods == "all" else (list(methods), {})
    if left_out:
        logger.info("%d of %d methods fit; the others are listed at the end", len(chosen), len(chosen) + len(left_out))
    arms |= arms_with_methods(loaded, names, chosen)
    default = [] if loaded.recipe.compare.arms or arms else list(CONTROLS)
    home = choose_output_folder(out, "compare")
    used = default if controls is None else list(controls)
    planned = plan_comparison(loaded, names, seeds, used, home, data, workers, arms)
    if loaded.recipe.compare.rounds_by == "bytes" and equal == "rounds":
        equal = "bytes"
    if equal == "seconds":
        planned.check_simulated_seconds()
    trackers = tuple(find_trackers(track, names))
    planned = replace(planned, command=command, track=trackers, left_out=left_out, test=test, equal=equal)
    if tune:
        recipes = {name: each[0].loaded for name, each in planned.experiments.items()}
        terms = _search_terms(loaded, tune, "bytes" if equal == "bytes" else "rounds")
        searched = loaded.recipe.tune.search
        search = plan_search(recipes, names, home / SEARCH_FOLDER, data, terms, searched, workers)
        search.open()  # first: a comparison that is resumed before its search has begun would not be tuned
        planned.open()
        planned = _tuned(planned, search, progress)
    return run_comparison(planned, names, data, progress)


def _search_terms(
    loaded: LoadedRecipe, trials: int, equal: BudgetUnit, seeds: int | None = None, halving: int | None = None
) -> SearchTerms:
    """How the recipe's settings are searched."""
    own, compared = loaded.recipe.tune, loaded.recipe.compare
    return SearchTerms(trials, seeds or own.seeds, halving or own.halving, equal, compared.metric, compared.candidate)


def _tuned(planned: Comparison, search: Search, progress: Progress) -> Comparison:
    """A comparison with the settings that a search chooses for each arm."""
    for line in map(search_sentence, run_search(search, progress).searches):
        logger.info("%s", line)
    return planned.with_recipes(search.chosen_recipes(), search.registries, search.data)


def tune(
    recipe: RecipeLike,
    *,
    trials: int = 16,
    search: Sequence[str] = (),
    seeds: int | None = None,
    halving: int | None = None,
    methods: Sequence[str] = (),
    controls: Sequence[str] = (),
    equal: Literal["rounds", "bytes"] = "rounds",
    metric: str | None = None,
    sets: Sequence[str] = (),
    seed: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    progress: Progress = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> TuneResult:
    """Search good settings for a recipe, and for other arms with the same budget, on validation examples.

    Parameters
    ----------
    recipe : a TOML file, a mapping, or a `Simulation`; arms of its `[compare]` are searched too.
    trials : how many for each arm; the first is the recipe itself.
    search : keys to search, such as "training.optimizer.lr=0.01..1:log". Default: the recipe's, or all that are
        declared.
    seeds : of a trial, whose score is their mean. Default: the recipe's, or 1.
    halving : one of so many trials goes on to the next stage; 1: all run all rounds. Default: the recipe's, or 3.
    methods : names of other methods to search for.
    controls : names of controls to search for, as for `compare`.
    equal : what a trial of every arm may spend: the "rounds" of its recipe, or at most the "bytes" of the first arm.
    metric : what scores a trial. Default: accuracy, or perplexity for language models.
    sets, seed, out, data_dir, workers, progress, extensions, registries : as for `run`.

    Returns
    -------
    TuneResult
        With the path of each arm's chosen recipe.

    Examples
    --------
    >>> fl.run(fl.tune("recipe.toml", trials=16).chosen["heterofl"])
    """
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    changes = [*sets, *([] if metric is None else [f"compare.metric={json.dumps(metric)}"])]
    loaded = load_recipe(recipe, names, changes, seed)
    fleet = assemble(loaded, names, data).fleet
    arms = build_arms(loaded, names, fleet, controls, arms_with_methods(loaded, names, methods))
    terms = _search_terms(loaded, trials, equal, seeds, halving)
    home = choose_output_folder(out, "tune")
    searched = search or loaded.recipe.tune.search
    return run_search(plan_search(arms, names, home, data, terms, searched, workers), progress)


def _with_own_names_of(simulation: Simulation, names: Registries) -> Registries:
    """With the names of another simulation's objects, which must not mean something else already."""
    own = own_entries(simulation.registries)
    for kind, entries in own.items():
        known = getattr(names, kind)
        for name, entry in entries.items():
            if name in known and not is_same_entry(known[name], entry):
                raise ValueError(
                    f"{kind}.{name} is something else in another simulation of this comparison; "
                    f"register them under different names: fedloom.{kind}.register(…)"
                )
    return names.with_names(**own)


def _arm_name(recipe: RecipeLike, number: int) -> str:
    if isinstance(recipe, str | Path):
        return Path(recipe).stem
    document = recipe.recipe if isinstance(recipe, Simulation) else recipe
    return f"{document['method']['name']}-{number}"


def run_comparison(planned: Comparison, names: Registries, data: Path, progress: Progress = None) -> CompareResult:
    """Finish a comparison and write its tables beside its runs."""
    with explain_interrupt(planned.home):
        run_group(planned, progress)
    result = planned.result()
    for name, render in FILES.items():
        (planned.home / name).write_text(render(result), encoding="utf-8")
    return CompareResult(planned.home, result, tuple(planned.unfinished_runs()), names, data)


@dataclass(frozen=True, repr=False)
class PlanResult(Result):
    """What each tier costs, and which tier real devices can run.

    Parameters
    ----------
    tiers : the costs of each tier.
    server : what the server's own training costs; None if it only averages.
    round : the time of a round on this machine, if it was measured.
    fleet : which tier each device can run, if devices were given.
    """

    tiers: tuple[TierCost, ...]
    server: ServerCost | None = None
    round: RoundTime | None = None
    fleet: FleetPlan | None = None

    @property
    def title(self) -> str:
        return f"costs of {pluralize(len(self.tiers), 'tier')}, per device and round"

    def records(self) -> list[Record]:
        return [cost.record() for cost in self.tiers]

    def content(self) -> dict[str, Any]:
        return {
            "tiers": self.records(),
            **({"server": self.server.record()} if self.server else {}),
            **({"round": vars(self.round)} if self.round else {}),
            **({"fleet": self.fleet.record()} if self.fleet else {}),
        }


def plan(
    recipe: RecipeLike,
    *,
    latency: bool = False,
    measure: bool = False,
    fleet: Sequence[str | Path | DeviceSpec] = (),
    headroom: float = 1.5,
    sets: Sequence[str] = (),
    seed: int | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> PlanResult:
    """Costs of each tier before anything is spent: size, compute, bytes, memory. Needs no data.

    Parameters
    ----------
    recipe : a TOML file, a mapping, or a `Simulation`.
    latency : also time one example through each tier's model, on this machine.
    measure : also estimate the time of a round here, from shortened rounds.
    fleet : devices, as files of `fedloom probe` or as objects: which tier each can run.
    headroom : the memory a device needs, as a multiple of its tensors.
    sets, seed, data_dir, workers, extensions, registries : as for `run`.

    Returns
    -------
    PlanResult
    """
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    loaded = load_recipe(recipe, names, sets, seed)
    machines: list[DeviceSpec] = []
    for one in fleet:
        machines += [one] if isinstance(one, DeviceSpec) else read_device_specs(Path(one))
    costs = tier_costs(loaded, names, data, latency, memory=True)
    if loaded.recipe.engine.kind in ON_FLOWER:
        check_message_sizes(loaded, costs)
    timed = estimate_round_time(loaded, names, data, workers) if measure else None
    planned = plan_fleet(loaded, names, data, machines, costs, headroom) if machines else None
    return PlanResult(tuple(costs), server_cost(loaded, names, data), timed, planned)


def check(
    recipe: RecipeLike,
    *,
    deployment: bool = False,
    sets: Sequence[str] = (),
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> None:
    """Check a recipe: names, ranges, tiers, partition, method and the arms of a comparison. Works without the data.

    Parameters
    ----------
    recipe : a TOML file, a mapping, or a `Simulation`.
    deployment : also check that it can be deployed to real devices.
    sets, data_dir, extensions, registries : as for `run`.

    Raises
    ------
    RecipeError
        With everything that is wrong; its `issues` have key, code, message and hint.
    """
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    changes = [*sets, *(['engine.kind="flower"'] if deployment else [])]  # as `fedloom deploy server` has it
    try:
        loaded = load_recipe(recipe, names, changes)
        data_spec = read_data_spec(loaded, names, data)
    except DataError as error:
        code = "DATA_MISSING" if isinstance(error, DataMissing) else "DATA_BROKEN"
        issue = RecipeIssue(("data", "dataset"), code, error.message, error.hint)
        source = str(recipe) if isinstance(recipe, str | Path) else "recipe"
        raise RecipeError([issue], source) from error
    check_engine(loaded, names)
    fleet, method = check_build(loaded, names, data, data_spec)
    if deployment:
        check_deployment(loaded, method)
    if loaded.recipe.engine.kind in ON_FLOWER:
        check_message_sizes(loaded, tier_costs(loaded, names, data))
    for line in describe_idle_settings(loaded, names, fleet, method):
        logger.info("%s", line)
    _, *others = build_arms(loaded, names, fleet).items()
    for arm, changed in others:
        with errors_at_arm(loaded, arm):
            check_build(changed, names, data, data_spec)


def report(
    runs: RunLike | CompareResult | Sequence[RunLike],
    *,
    out: str | Path | None = None,
    test: str | None = None,
    metric: str | None = None,
) -> Path:
    """Write one HTML page, which needs no network, with all figures, and a CSV file behind each of them.

    Parameters
    ----------
    runs : the folder of a run or of a comparison, or several runs.
    out : the page. Default: report.html in the folder; of several runs, report-A-B.html beside the first.
    test : "global" or "local". Default: the one that the method is for.
    metric : what tables and charts show first. Default: accuracy, or perplexity for language models.

    Returns
    -------
    Path
        The page.
    """
    single = isinstance(runs, str | Path | Run | CompareResult)
    listed = [runs] if single else list(runs)  # type: ignore[arg-type]
    folders = [one.folder if isinstance(one, Run | CompareResult) else Path(one) for one in listed]  # type: ignore[arg-type]
    file = default_report_file(folders) if out is None else Path(out)
    write_report(folders, file, test, metric)
    return file


@dataclass(frozen=True, repr=False)
class SubnetResult(Result):
    """The best subnet within a budget, and the trade-off between accuracy and cost.

    Parameters
    ----------
    best : settings, accuracy and costs of the best subnet, and how it was `trained`: as a tier, as a subnet that the
        method samples, or not at all, as a slice of a larger model.
    front : the Pareto front of accuracy and MACs.
    hypervolume : that the front dominates.
    measured : how many subnets were measured, on which examples, and where the results are kept.
    out : the file with its weights, if one was asked for.
    """

    best: Record
    front: tuple[Record, ...]
    hypervolume: float
    measured: Record
    out: Path | None = None

    @property
    def title(self) -> str:
        return f"best subnet: {self.best['accuracy']:.2f} % with {self.best['macs']:,} MACs"

    def records(self) -> list[Record]:
        return [{**{k: v for k, v in row.items() if k != "settings"}, **row["settings"]} for row in self.front]

    def content(self) -> dict[str, Any]:
        return {
            "best": self.best, "front": list(self.front), "hyper_volume": self.hypervolume, "measured": self.measured,
            "out": None if self.out is None else str(self.out),
        }  # fmt: skip


def subnet(
    run: RunLike,
    *,
    macs: int | None = None,
    params: int | None = None,
    latency: float | None = None,
    count: int = 500,
    seed: int = 0,
    space: str | None = None,
    examples: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    progress: Callable[[int, int, float], None] | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> SubnetResult:
    """Cut the best subnet within a budget out of a finished run.

    Parameters
    ----------
    run : a finished run or its folder.
    macs : at most this many multiply-adds.
    params : or at most this many parameters.
    latency : or at most this many milliseconds for one example, on this machine.
    count : number of subnets to try.
    seed : of the drawn subnets.
    space : the search space: "between", every size between the smallest and the largest tier; "tiers", the
        combinations of what tiers differ in; "code" or "paper". Default: what the method trains, else "between".
    examples : evaluate on this many examples. Default: all of the test set, or of the recipe's validation set.
    out : a new file for its weights, which `load_model` loads.
    data_dir, workers, extensions, registries : as for `run`.
    progress : called with the number of subnets measured so far, of all, and seconds for each.

    Returns
    -------
    SubnetResult
    """
    limits = {"macs": macs, "parameters": params, "latency_ms": latency}
    given = {kind: most for kind, most in limits.items() if most is not None}
    if len(given) > 1:
        raise TypeError("use one of macs, params and latency")
    keep_freed_memory()
    budget = next((Budget(kind, most) for kind, most in given.items()), None)  # type: ignore[arg-type]
    names, data = names_of(run, registries, extensions), data_of(run, data_dir)
    search = start_search(open_supernet(folder_of(run), names, data, space), count, seed, budget, examples)
    missing, start, done, each = len(search.nets) - len(search.rows()), time.perf_counter(), 0, 0.0
    for rows in search.measure(workers):
        done += len(rows)
        each = (time.perf_counter() - start) / done
        if progress:
            progress(done, missing, each)
    net, best = search.best()
    if out is not None:
        search.save(net, Path(out))
    timed = {"latency_ms": latency_ms(net)} if latency is not None else {}
    measured = {
        "nets": len(search.nets), "now": done, "seconds_each": each, "examples": search.examples,
        "of": search.examples_kind, "rows": str(search.file),
    }  # fmt: skip
    training, known = search.supernet.training_of, search.rows()
    front = [(training(one), row) for row in search.front() for one, other in known.items() if other == row]
    return SubnetResult(
        {**asdict(best), "trained": training(net), **timed},
        tuple({**asdict(row), "trained": trained} for trained, row in front),
        search.hypervolume(), measured, None if out is None else Path(out),
    )  # fmt: skip


def export(
    run: RunLike,
    to: str,
    *,
    tier: str | None = None,
    device: str | None = None,
    macs: int | None = None,
    input_kind: InputKind = "stored",
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> ExportResult:
    """Write a model of a run to a file with its card, and check that its outputs match the run's model.

    Parameters
    ----------
    run : a finished run or its folder.
    to : the format: "safetensors", "pt2", "onnx" or "executorch".
    tier : whose model. Default: the largest tier's.
    device : or the personal model of this device.
    macs : or the largest of about 500 sampled subnets with at most so many multiply-adds.
    input_kind : "stored": the file preprocesses examples itself; "prepared": the caller does.
    out : a new folder. Default: RUN/exports/….
    data_dir, extensions, registries : as for `run`.

    Returns
    -------
    ExportResult
        The folder, the file and the model card.
    """
    if sum(value is not None for value in (tier, device, macs)) > 1:
        raise TypeError("use one of tier, device and macs")
    names = names_of(run, registries, extensions)
    selector, data = ModelSelector(tier, device, macs), data_of(run, data_dir)
    folder = None if out is None else Path(out)
    return export_run.export(folder_of(run), selector, to, folder, input_kind, names, data)


def audit(
    run: RunLike,
    *,
    examples: int = 16,
    steps: int = 600,
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> audits.Audit:
    """What left the devices of a run; where features did, reconstruct inputs from them and measure how well.

    Parameters
    ----------
    run : a finished run or its folder.
    examples : number of inputs to reconstruct.
    steps : of the reconstruction.
    data_dir, extensions, registries : as for `run`.

    Returns
    -------
    Audit
    """
    names = names_of(run, registries, extensions)
    return audits.audit(folder_of(run), names, data_of(run, data_dir), examples, steps)


@dataclass(frozen=True, repr=False)
class AttackResult(Result):
    """Every attack against every aggregation rule.

    Parameters
    ----------
    share : of malicious devices.
    bad : their names, by seed.
    test : the test set.
    cells : a result for each attack and rule.
    """

    share: float
    bad: Mapping[int, list[str]]
    test: str
    cells: tuple[AttackCell, ...]

    @property
    def title(self) -> str:
        return f"accuracy in % with {100 * self.share:g} % of the devices malicious"

    def records(self) -> list[Record]:
        return [
            {
                "attack": cell["attack"], "rule": cell["rule"], "accuracy": cell["accuracy"]["mean"],
                "worst_tier": cell["worst_tier"]["mean"], "points_lost": cell["points_lost"],
            }
            for cell in self.content()["cells"]
        ]  # fmt: skip

    def content(self) -> dict[str, Any]:
        lost = accuracy_losses(list(self.cells))
        cells = [
            {
                "attack": cell.attack, "rule": cell.rule, "accuracy": mean_and_std(cell.mean),
                "worst_tier": mean_and_std(cell.worst),
                "tiers": {tier: mean_and_std(values) for tier, values in cell.tiers.items()},
                "points_lost": lost[cell.attack, cell.rule], "refused": cell.refused,
            }
            for cell in self.cells
        ]  # fmt: skip
        return {"share": self.share, "bad": self.bad, "test": self.test, "cells": cells}


def attack(
    recipe: RecipeLike,
    *,
    share: float = 0.2,
    attacks: Sequence[str] | None = None,
    rules: Sequence[str] = ("default",),
    seeds: int = 1,
    test: str | None = None,
    sets: Sequence[str] = (),
    seed: int | None = None,
    data_dir: str | Path | None = None,
    workers: int = 1,
    progress: Progress = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> AttackResult:
    """Run a recipe with a share of its devices malicious, under every attack and with every rule.

    Parameters
    ----------
    recipe : a TOML file, a mapping, or a `Simulation`.
    share : of malicious devices.
    attacks : names. Default: all.
    rules : names of aggregation rules next to the plain mean.
    seeds : how many, counted from the recipe's.
    test : "global" or "local". Default: the one that the method is for.
    sets, seed, data_dir, workers, progress, extensions, registries : as for `run`.

    Returns
    -------
    AttackResult
    """
    keep_freed_memory()
    names, data = gather_names(registries, extensions, recipe), data_of(recipe, data_dir)
    loaded = load_recipe(recipe, names, sets, seed)
    if test is not None:
        _require_test(loaded, test)
    used = list(names.attacks) if attacks is None else list(attacks)
    bench = build_attack_bench(loaded, names, data, used, list(rules), share, seeds, test, workers)
    run_group(bench, progress)
    return AttackResult(share, bench.bad, bench.test, tuple(bench.cells()))


def verify(
    run: RunLike | None = None,
    *,
    rounds: int = 1,
    data_dir: str | Path | None = None,
    workers: int = 1,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> Verdict:
    """Replay the last rounds of a finished run and compare weights, devices' states and rows bit by bit.

    Parameters
    ----------
    run : a finished run or its folder. Default: the newest in ./runs.
    rounds : replay at least this many.
    data_dir, workers, extensions, registries : as for `run`.

    Returns
    -------
    Verdict
        Without `differences` if everything is the same.
    """
    folder = find_newest_run() if run is None else folder_of(run)
    names = names_of(run or folder, registries, extensions)
    return verify_run(folder, names, data_of(run or folder, data_dir), rounds, workers)


def cka(
    first: RunLike,
    second: RunLike,
    *,
    tier: str | None = None,
    examples: int = 1000,
    data_dir: str | Path | None = None,
    extensions: Sequence[str | Path] = (),
    registries: Registries | None = None,
) -> CkaMap:
    """Compare two trained models layer by layer: linear CKA, 1 where representations are equal.

    Parameters
    ----------
    first, second : finished runs or their folders.
    tier : whose model. Default: the largest tier's.
    examples : number of test examples.
    data_dir, extensions, registries : as for `run`.

    Returns
    -------
    CkaMap
    """
    names = names_of(first, registries, extensions)
    if isinstance(second, Run) and registries is None:
        names = names.with_names(**own_entries(second.registries))
    return compute_cka(folder_of(first), folder_of(second), tier, examples, names, data_of(first, data_dir))

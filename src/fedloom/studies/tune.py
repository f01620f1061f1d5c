"""Search good settings for every arm on validation examples, with the same budget for each.

Successive halving (Jamieson & Talwalkar, AISTATS 2016): trials run a part of the rounds, and the best go on from there.
Eight trials of each arm are proposed at a time, and all train in lockstep: those that differ only in numbers share
blocks. An interrupted search goes on from its folder to the same choice. The test set is never evaluated.
"""

import json
import logging
import math
import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..data import Dataset
from ..engines import Lockstep, WorkerPool
from ..evaluation import Row
from ..files import write_atomic
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe, dumps, dumps_value
from ..recipe.registries import Registries
from ..recipe.search_space import Space, build_space, own_values, with_values
from ..reporting.paired_stats import Arm, ComparedMetric, ServedModel, mean_by_share, metric_of, transfer_rows
from ..reporting.search import SEARCH_FILE, SEARCH_FORMAT, SEARCH_KIND
from ..reporting.targets import BudgetUnit
from ..runs.build import assemble
from ..runs.checkpoint import Checkpoint
from ..runs.data import read_data
from ..runs.experiment import Experiment
from ..runs.faults import NoQuorum
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.loop import RoundResult, evaluate, single_thread
from ..runs.own_names import describe_names, load_recipe_of
from ..runs.recorder import NothingAdmitted, record_rounds, restore_experiment, utc_now
from ..runs.resume import read_resume_point
from ..wording import join_words, pluralize
from .budget import estimate_bytes_per_round
from .compare import PendingRun, check_direction, estimate_memory, run_side_by_side
from .sampler import Sampler, check_installed

logger = logging.getLogger(__name__)

CHOSEN = "chosen.toml"
WAVE = 8  # trials of an arm that are proposed at a time; later ones learn from the scores of earlier ones
MAX_HALVINGS = 2
VALIDATION_SHARE = 10  # without data.validation, one of so many training examples


class SearchFailed(Exception):  # noqa: N818 - named for what is wrong
    """Every trial of an arm failed, so there is nothing to choose."""

    def __init__(self, arm: str, folder: Path):
        super().__init__(f"every trial of {arm} failed or ended without a finite score")
        self.hint = f"search smaller learning rates; errors are in {folder}"


@dataclass(frozen=True)
class SearchTerms:
    """How a search goes: the same for every arm."""

    trials: int
    seeds: int = 1  # of a trial
    halving: int = 3
    equal: BudgetUnit = "rounds"  # what arms spend equally: rounds, or bytes
    metric: str | None = None  # that scores trials; None: the task's
    candidate: str | None = None  # the evaluated model that counts; None: the method's first


@dataclass
class SearchTrial:
    """Settings that are tried, and what is known of them."""

    number: int
    settings: dict[str, Any]
    scores: dict[int, dict[str, float | None]] = field(default_factory=dict)  # by rounds, then seed; None: failed
    bytes: dict[str, float] = field(default_factory=dict)  # transferred so far, by seed

    def score(self, after: int, seeds: Sequence[int]) -> float | None:
        """Mean over seeds after so many rounds; None if a seed is missing or failed."""
        known = self.scores.get(after, {})
        values = [known.get(str(seed)) for seed in seeds]
        finite = [value for value in values if value is not None]
        return statistics.fmean(finite) if len(finite) == len(seeds) else None


def survivors(trials: int, stage: int, halving: int) -> int:
    """How many of a wave's trials run a stage."""
    return -(-trials // int(halving**stage))


def count_stages(trials: int, halving: int) -> int:
    """Number of stages of a wave: until one trial is left, but at most two halvings."""
    if halving == 1:
        return 1
    halvings = (count for count in range(MAX_HALVINGS) if survivors(trials, count, halving) == 1)
    return 1 + next(halvings, MAX_HALVINGS)


def stage_rounds(total: int, stages: int, halving: int) -> list[int]:
    """After how many rounds each stage ends; the last one after all of them."""
    return [math.ceil(total / halving ** (stages - 1 - stage)) for stage in range(stages)]


@dataclass
class ArmSearch:
    """The search of one arm: its trials, what they scored, and in the end the choice."""

    name: str
    loaded: LoadedRecipe  # with validation examples
    space: Space
    terms: SearchTerms
    first: Experiment  # of the recipe itself
    folder: Path
    bytes_per_round: float
    length: float = 1.0  # share of its rounds that a trial may run, to spend as many bytes as the first arm
    trials: list[SearchTrial] = field(default_factory=list)

    @property
    def seeds(self) -> list[int]:
        seed = self.loaded.recipe.seed
        return list(range(seed, seed + self.terms.seeds))

    @cached_property
    def metric(self) -> ComparedMetric:
        return metric_of((), self.first.evaluator.declared_metrics, self.terms.metric)

    @cached_property
    def candidate(self) -> str:
        """The evaluated model that counts; "" (the first) for arms that lack the one that is named."""
        method, fleet, name = self.first.method, self.first.fleet, self.terms.candidate or ""
        return name if name in method.eval_targets(method.start(fleet, fleet.seed, self.first.warm)) else ""

    @cached_property
    def memory(self) -> int:
        return estimate_memory(self.first)

    def ends(self, wave: int) -> list[int]:
        """After how many rounds the stages of a wave end."""
        total = max(1, math.floor(self.loaded.recipe.rounds * self.length))
        return stage_rounds(total, count_stages(wave, self.terms.halving), self.terms.halving)

    def document(self, settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The recipe of a trial: only what scores it is evaluated, when a stage ends."""
        document = with_values(self.loaded.recipe.document(), settings)
        evaluation = {"every": self.loaded.recipe.rounds, "per_device": "never", "tests": (self.first.headline_test,)}
        return {**document, "seed": seed, "evaluation": {**document["evaluation"], **evaluation}}

    def run_folder(self, trial: SearchTrial, seed: int) -> Path:
        return self.folder / f"trial-{trial.number:03d}" / f"seed-{seed}"

    def score_of(self, rows: Sequence[Row]) -> float | None:
        """The mean over the devices of the arm; None unless it is finite."""
        fleet, test = self.first.fleet, self.first.headline_test
        trained = [tier.name for tier in fleet.active_tiers]
        arm = Arm(self.name, {tier: ServedModel(tier, True) for tier in trained}, [rows], self.candidate,
                  metric=self.metric)  # fmt: skip
        values = {tier: curve[-1].value for tier in trained for curve in arm.curves(tier, test) if curve}
        shares = {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        score = mean_by_share(values, shares) if values else math.nan
        return score if math.isfinite(score) else None

    def rank(self, trials: Sequence[SearchTrial], after: int) -> list[SearchTrial]:
        """The trials that have a score after so many rounds, the best first; among equals the earlier one."""
        scored = [(trial.score(after, self.seeds), trial) for trial in trials]
        known = [(score, trial) for score, trial in scored if score is not None]
        return [trial for _, trial in sorted(known, key=lambda one: (-self.metric.sign * one[0], one[1].number))]

    def chosen(self) -> SearchTrial | None:
        """The best of the trials that ran all rounds."""
        ranked = self.rank(self.trials, self.ends(1)[-1])
        return ranked[0] if ranked else None

    def chosen_recipe(self) -> LoadedRecipe:
        """The recipe with the chosen settings, for the test set: no examples are held out for validation.

        Raises
        ------
        SearchFailed: if no trial has a score.
        """
        trial = self.chosen()
        if trial is None:
            raise SearchFailed(self.name, self.folder)
        document = with_values(self.loaded.recipe.document(), trial.settings)
        document["data"] = {key: value for key, value in document["data"].items() if key != "validation"}
        return self.loaded.with_document(document)

    def record(self) -> dict[str, Any]:
        """The whole search as JSON."""
        trial = self.chosen()
        end = self.ends(1)[-1]
        return {
            **asdict(self.terms), "format": SEARCH_FORMAT, "arm": self.name, "method": self.loaded.recipe.method.name,
            "metric": self.metric.name, "unit": self.metric.unit, "higher_is_better": self.metric.higher_is_better,
            "test": self.first.headline_test, "validation_examples": len(self.first.dataset.test),
            "sampler": f"Optuna {check_installed()}, TPE", "seed": self.loaded.recipe.seed, "seeds": self.seeds,
            "rounds": end, "space": {key: str(domain) for key, domain in self.space.items()},
            "bytes": sum(sum(one.bytes.values()) for one in self.trials),
            "choice": None if trial is None else
                {"trial": trial.number, "settings": trial.settings, "score": trial.score(end, self.seeds)},
            "tried": [asdict(one) for one in self.trials],
        }  # fmt: skip

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / SEARCH_FILE, (json.dumps(self.record(), indent=2) + "\n").encode())

    def write_choice(self) -> Path:
        """Write the chosen recipe and how it was chosen; returns its path."""
        loaded, trial, end = self.chosen_recipe(), self.chosen(), self.ends(1)[-1]
        assert trial is not None
        score = trial.score(end, self.seeds)
        assert score is not None
        own = self.trials[0].score(end, self.seeds)
        own_score = "the recipe itself stopped early" if own is None else f"the recipe itself {self.metric.format(own)}"
        path = self.folder / CHOSEN
        lines = [
            f"fedloom run {path}",
            f"chosen by fedloom tune: trial {trial.number} of {len(self.trials)}, seed {self.loaded.recipe.seed}",
            f"searched: {join_words([f'{key} in {domain}' for key, domain in self.space.items()])}",
            f"chosen: {join_words([f'{key} = {dumps_value(value)}' for key, value in trial.settings.items()])}",
            f"{self.metric.name} on {pluralize(len(self.first.dataset.test), 'validation example')}, mean over devices "
            f"and {pluralize(len(self.seeds), 'seed')}: {self.metric.format(score)}; {own_score}",
            f"the test set was not evaluated; all trials are in {SEARCH_FILE} beside this file",
        ]  # fmt: skip
        text = "".join(f"# {line}\n" for line in lines) + "\n" + dumps(loaded.recipe.document())
        write_atomic(path, text.encode())
        return path


@dataclass(frozen=True)
class Search:
    """A search over the settings of several arms."""

    home: Path
    arms: dict[str, ArmSearch]
    registries: Registries
    data: Path
    workers: int
    terms: SearchTerms
    searched: Sequence[str] = ()

    @property
    def waves(self) -> list[int]:
        """How many trials of an arm are proposed at a time."""
        full, rest = divmod(self.terms.trials, WAVE)
        return [WAVE] * full + ([rest] if rest else [])

    def open(self) -> None:
        """Write what is needed to go on from its folder, before anything runs."""
        self._write_manifest("running")

    def chosen_recipes(self) -> dict[str, LoadedRecipe]:
        """The recipe of each arm with the settings that were chosen.

        Raises
        ------
        SearchFailed: if every trial of an arm failed.
        """
        return {name: arm.chosen_recipe() for name, arm in self.arms.items()}

    def round_counts(self) -> dict[str, int]:
        """The number of rounds of all trials of each arm together."""
        return {name: sum(self._rounds_of(arm, wave) for wave in self.waves) for name, arm in self.arms.items()}

    def _rounds_of(self, arm: ArmSearch, wave: int) -> int:
        ends, done, total = arm.ends(wave), 0, 0
        for stage, end in enumerate(ends):
            total += survivors(wave, stage, self.terms.halving) * (end - done)
            done = end
        return total * self.terms.seeds

    def rounds(self) -> Generator[tuple[str, RoundResult], None, None]:
        """Run what is left of it; yields (arm, result) when a trial ends a stage, counting all rounds of the arm."""
        self.open()
        counts, done = self.round_counts(), dict.fromkeys(self.arms, 0)
        samplers = {name: Sampler(arm.space, arm.loaded.recipe.seed, WAVE) for name, arm in self.arms.items()}
        started = 0
        with single_thread():
            for wave in self.waves:
                asked = {name: self._ask(arm, samplers[name], started, wave) for name, arm in self.arms.items()}
                alive = {name: [trial for _, trial in pairs] for name, pairs in asked.items()}
                stages = count_stages(wave, self.terms.halving)
                for stage in range(stages):
                    for name, result in self._run_stage(alive, wave, stage):
                        before = self.arms[name].ends(wave)[stage - 1] if stage else 0
                        done[name] += self.arms[name].ends(wave)[stage] - before
                        yield name, replace(result, number=done[name], of=max(counts[name], done[name]))
                    for name, arm in self.arms.items():
                        ranked = arm.rank(alive[name], arm.ends(wave)[stage])
                        alive[name] = ranked[: survivors(wave, stage + 1, self.terms.halving)]
                for name, arm in self.arms.items():
                    _tell(arm, samplers[name], asked[name], wave)
                started += wave
        for arm in self.arms.values():
            arm.save()
            if arm.chosen() is not None:
                arm.write_choice()
        self._write_manifest("finished")

    def _ask(self, arm: ArmSearch, sampler: Sampler, started: int, wave: int) -> list[tuple[Any, SearchTrial]]:
        """The trials of a wave; of a search that goes on, those that it had. The first is the recipe itself."""
        asked = []
        for number in range(started, started + wave):
            own = own_values(arm.loaded, self.registries, arm.space) if number == 0 else None
            proposal, settings = (None, own) if own is not None else sampler.ask()
            if number < len(arm.trials):
                if json.loads(json.dumps(settings)) != json.loads(json.dumps(arm.trials[number].settings)):
                    message = f"trial {number} of {arm.name} would have other settings now than when the search began"
                    hint = "Optuna may have changed: install the version that search.json names, or search again"
                    raise arm.loaded.error(RecipeIssue((), "SEARCH_CHANGED", message, hint))
            else:
                arm.trials.append(SearchTrial(number, settings))
            asked.append((proposal, arm.trials[number]))
        arm.save()
        return asked

    def _run_stage(
        self, alive: Mapping[str, Sequence[SearchTrial]], wave: int, stage: int
    ) -> Iterator[tuple[str, RoundResult]]:
        """Run the trials that are left in all arms, side by side."""
        lockstep = Lockstep(WorkerPool(self.workers))
        pending, owners = [], {}
        for name, trials in alive.items():
            arm = self.arms[name]
            end = arm.ends(wave)[stage]
            for trial in trials:
                for seed in arm.seeds:
                    if str(seed) not in trial.scores.get(end, {}):
                        run = self._pending(arm, trial, seed, end, lockstep)
                        pending.append(run)
                        owners[run.name] = name
        with closing(lockstep.pool):
            for run_name, result in run_side_by_side(lockstep, pending):
                yield owners[run_name], result

    def _pending(self, arm: ArmSearch, trial: SearchTrial, seed: int, end: int, lockstep: Lockstep) -> PendingRun:
        loaded = arm.loaded.with_document(arm.document(trial.settings, seed))
        experiment = assemble(loaded, self.registries, self.data, arm.first.dataset, executor=lockstep)
        folder = arm.run_folder(trial, seed)

        def start() -> Iterator[RoundResult]:
            last: RoundResult | None = None
            rows: Sequence[Row] = ()
            try:
                last, rows = _run_until(experiment, folder, end)
            except (NoQuorum, NothingAdmitted) as error:
                logger.warning("%s trial %d failed: %s", arm.name, trial.number, error)
            trial.scores.setdefault(end, {})[str(seed)] = arm.score_of(rows)
            trial.bytes[str(seed)] = math.fsum(row.value for row in transfer_rows(list(read_rows(folder))))
            arm.save()
            if last is not None:
                yield last

        return PendingRun(f"{arm.name} trial {trial.number} seed {seed}", experiment.simulator, arm.memory, start)

    def _write_manifest(self, status: str) -> None:
        """Write what is needed to go on from the folder."""
        first = next(iter(self.arms.values()))
        before = read_manifest(self.home) if (self.home / MANIFEST).is_file() else {}
        manifest = {
            "kind": SEARCH_KIND, "status": status, "started": before.get("started", utc_now()),
            "terms": asdict(self.terms), "searched": list(self.searched),
            "arms": {name: arm.loaded.recipe.document() for name, arm in self.arms.items()},
            **describe_names(first.loaded.recipe, self.registries),
        }  # fmt: skip
        self.home.mkdir(parents=True, exist_ok=True)
        write_atomic(self.home / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def _tell(arm: ArmSearch, sampler: Sampler, asked: Sequence[tuple[Any, SearchTrial]], wave: int) -> None:
    """Tell the sampler what a wave has scored."""
    ends = arm.ends(wave)
    for proposal, trial in asked:
        scores = [trial.score(end, arm.seeds) for end in ends]
        known = [arm.metric.sign * score for score in scores if score is not None]
        complete = scores[-1] is not None
        if proposal is None:
            sampler.tell_of(trial.settings, known, complete)
        else:
            sampler.tell(proposal, known, complete)


def _run_until(experiment: Experiment, folder: Path, end: int) -> tuple[RoundResult | None, Sequence[Row]]:
    """Run a trial, from where it stopped, until the end of its stage; returns its last round and what scores it."""
    total, last = experiment.loaded.recipe.rounds, None
    since: Checkpoint | None = None
    if (folder / MANIFEST).is_file():
        if read_manifest(folder)["status"] == "finished":
            return None, list(read_rows(folder))
        since = read_resume_point(folder, experiment)
        if since.number == end < total:  # it stopped here, but its score was not written
            restore_experiment(experiment, since)
            with closing(experiment.engine):
                return None, evaluate(experiment, since.server, end, last=False)
    with closing(record_rounds(experiment, folder, since)) as steps:
        for last in steps:
            if last.number == end < total:
                return last, evaluate(experiment, last.server, end, last=False)
    return last, list(read_rows(folder))


def plan_search(
    arms: Mapping[str, LoadedRecipe], registries: Registries, home: Path, data: Path, terms: SearchTerms,
    searched: Sequence[str] = (), workers: int = 1,
) -> Search:  # fmt: skip
    """Plan a search for these arms, of which the first is the recipe. Everything is checked before anything runs."""
    check_installed()
    first = next(iter(arms.values()))
    for name, loaded in arms.items():
        if loaded.recipe.engine.kind != "in_process":
            message = f"{name} runs on devices that are elsewhere, and trials cannot stop and go on there"
            raise first.error(RecipeIssue(("engine", "kind"), "SEARCH_ENGINE", message, 'engine.kind = "in_process"'))
    if first.recipe.data.validation is None:
        examples = max(1, len(read_data(first, registries, data).train) // VALIDATION_SHARE)
        message = "trials are scored on %d training examples that no device trains on; data.validation changes that"
        logger.info(message, examples)
        arms = {name: _with_validation(loaded, examples) for name, loaded in arms.items()}
    return _plan(arms, registries, home, data, terms, searched, workers)


def _with_validation(loaded: LoadedRecipe, examples: int) -> LoadedRecipe:
    return loaded.with_document(with_values(loaded.recipe.document(), {"data.validation": examples}))


def _plan(
    arms: Mapping[str, LoadedRecipe], registries: Registries, home: Path, data: Path, terms: SearchTerms,
    searched: Sequence[str], workers: int,
) -> Search:  # fmt: skip
    spaces = build_space(arms, registries, searched)
    dataset: Dataset | None = None
    searches: dict[str, ArmSearch] = {}
    for name, loaded in arms.items():
        first = assemble(loaded, registries, data, dataset)
        dataset = dataset or first.dataset
        check_direction(first, terms.metric)
        spent = estimate_bytes_per_round(first)
        reference = next(iter(searches.values())) if searches else None
        length = 1.0
        if terms.equal == "bytes" and reference is not None and spent:
            budget = reference.bytes_per_round * reference.loaded.recipe.rounds
            length = min(1.0, budget / (spent * loaded.recipe.rounds))
        searches[name] = ArmSearch(
            name, loaded, spaces[name], terms, first, home / name, spent, length, _read_trials(home / name)
        )
    return Search(home, searches, registries, data, workers, terms, tuple(searched))


def _read_trials(folder: Path) -> list[SearchTrial]:
    path = folder / SEARCH_FILE
    if not path.is_file():
        return []
    tried = json.loads(path.read_text(encoding="utf-8"))["tried"]
    return [
        SearchTrial(
            one["number"], one["settings"], {int(after): known for after, known in one["scores"].items()}, one["bytes"]
        )
        for one in tried
    ]


def reopen_search(home: Path, registries: Registries, data: Path, workers: int) -> Search:
    """Reopen a search from its folder; what has run is not repeated."""
    manifest = read_manifest(home)
    arms = {name: load_recipe_of(home, registries, document) for name, document in manifest["arms"].items()}
    return _plan(arms, registries, home, data, SearchTerms(**manifest["terms"]), manifest["searched"], workers)

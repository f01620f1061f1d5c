"""Attack benchmark: a recipe under every attack with every aggregation rule, with the same malicious devices."""

import statistics
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from ..data import Dataset
from ..engines import Attack, AttackTransport, ClientData, Lockstep, WorkerPool, malicious, poisoned
from ..evaluation import Row
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..recipe.schema import CompressionConfig, FaultsConfig
from ..registry import suggest
from ..reporting.paired_stats import mean_by_share
from ..runs.build import assemble, build_worker_context
from ..runs.data import read_data_spec
from ..runs.experiment import Experiment
from ..runs.loop import RoundResult, rounds, single_thread
from ..runs.metrics import build_metrics
from .compare import PendingRun, estimate_memory, run_side_by_side

NONE = "none"  # no attack; as a rule: the plain mean


@dataclass(frozen=True)
class AttackCell:
    """Accuracies in % under one attack with one rule, by seed."""

    attack: str
    rule: str
    tiers: dict[str, list[float]]
    mean: list[float]  # over tiers, weighted by share
    worst: list[float]  # of the tiers
    refused: int  # replies, over all seeds


@dataclass(frozen=True)
class AttackBench:
    """The runs of an attack benchmark; they write no run folder and cannot be resumed."""

    experiments: dict[tuple[str, str], list[Experiment]]  # by (attack, rule), then seed
    bad: dict[int, list[str]]  # malicious devices by seed
    test: str
    candidate: str = ""  # empty: the first
    lockstep: Lockstep = field(default_factory=lambda: Lockstep(WorkerPool(1)))
    _evaluated: dict[str, list[Row]] = field(default_factory=dict)

    def round_counts(self) -> dict[str, int]:
        """The number of rounds of each run."""
        return {
            _run_name(attack, rule, experiment): experiment.loaded.recipe.rounds
            for (attack, rule), experiments in self.experiments.items()
            for experiment in experiments
        }

    def rounds(self) -> Generator[tuple[str, RoundResult], None, None]:
        """Run everything, as many runs side by side as memory allows; yields (name, round)."""
        everything = [one for seeds in self.experiments.values() for one in seeds]
        with single_thread(), ExitStack() as ending:
            ending.enter_context(closing(self.lockstep.pool))
            for one in everything:
                ending.enter_context(closing(one.engine))
            for name, done in run_side_by_side(self.lockstep, self._pending()):
                rows = [row for row in done.rows if self._counts(row)]
                if rows:
                    self._evaluated[name] = rows
                yield name, done

    def cells(self) -> list[AttackCell]:
        """The results, once everything has run."""
        return [self._cell(attack, rule, seeds) for (attack, rule), seeds in self.experiments.items()]

    def _cell(self, attack: str, rule: str, seeds: Sequence[Experiment]) -> AttackCell:
        by_seed = [self._accuracies(_run_name(attack, rule, one)) for one in seeds]
        shares = {tier.name: share for tier, share in zip(seeds[0].fleet.tiers, seeds[0].fleet.shares, strict=True)}
        return AttackCell(
            attack,
            rule,
            {tier: [values[tier] for values in by_seed] for tier in by_seed[0]},
            [mean_by_share(values, shares) for values in by_seed],
            [min(values.values()) for values in by_seed],
            sum(len(one.refusals) for one in seeds),
        )

    def _accuracies(self, name: str) -> Mapping[str, float]:
        rows = self._evaluated[name]
        candidate = self.candidate or rows[0].candidate
        return {row.tier: row.value for row in rows if row.candidate == candidate}

    def _counts(self, row: Row) -> bool:
        return (row.device, row.test, row.metric) == ("", self.test, "accuracy")

    def _pending(self) -> Iterator[PendingRun]:
        memory = estimate_memory(next(iter(self.experiments.values()))[0])  # the same for all rules
        for (attack, rule), seeds in self.experiments.items():
            for one in seeds:
                yield PendingRun(_run_name(attack, rule, one), one.simulator, memory, partial(rounds, one))


def _run_name(attack: str, rule: str, experiment: Experiment) -> str:
    return f"{attack} against {rule}, seed {experiment.fleet.seed}"


def build_attack_bench(
    loaded: LoadedRecipe,
    registries: Registries,
    data: Path,
    attacks: Sequence[str],
    rules: Sequence[str],
    share: float,
    seeds: int,
    test: str | None,
    workers: int = 1,
) -> AttackBench:
    """Plan the runs for `seeds` seeds from the recipe's on; runs without attack and with the plain mean are added.

    `test`: by default the one that the method is for.
    """
    _check_names(loaded, attacks, {NONE: None, **registries.attacks}, "attack")
    _check_names(loaded, rules, registries.aggregation, "rule")
    if loaded.recipe.faults != FaultsConfig():
        message = "faults would mix with the effect of the attacks"
        raise loaded.error(RecipeIssue(("faults",), "FAULTS_TOO", message, "leave [faults] out"))
    if loaded.recipe.compression != CompressionConfig():
        message = "attacks are not simulated through compression"
        raise loaded.error(RecipeIssue(("compression",), "COMPRESSION_TOO", message, "leave [compression] out"))
    usual = read_data_spec(loaded, registries, data).task.metrics
    chosen = build_metrics(loaded, registries)
    if "accuracy" not in (usual if chosen is None else [one.name for one in chosen]):
        message = "attacks are measured by accuracy, which the recipe does not evaluate"
        raise loaded.error(RecipeIssue(("evaluation", "metrics"), "METRIC_MISSING", message, 'add "accuracy"'))
    experiments: dict[tuple[str, str], list[Experiment]] = {}
    bad, dataset, lockstep = dict[int, list[str]](), None, Lockstep(WorkerPool(workers))
    for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds):
        for attack in dict.fromkeys([NONE, *attacks]):
            client_data: ClientData | None = None  # shared by all rules, so that they train in one block
            for rule in dict.fromkeys([NONE, *rules]):
                honest = _honest(loaded, registries, data, rule, seed, dataset, lockstep)
                dataset, names = honest.dataset, malicious(honest.fleet, share)
                bad[seed] = sorted(names)
                experiment = honest
                if attack != NONE:
                    malice = registries.attacks[attack]()
                    client_data = client_data or poisoned(malice, honest.simulator.client_data, names)
                    experiment = _attacked(honest, malice, client_data, names)
                experiments.setdefault((attack, rule), []).append(experiment)
    first = next(iter(experiments.values()))[0]
    return AttackBench(experiments, bad, test or first.headline_test, loaded.recipe.compare.candidate or "", lockstep)


def _check_names(loaded: LoadedRecipe, names: Sequence[str], table: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in table:
            message = f"there is no {what} {name!r}"
            raise loaded.error(RecipeIssue((), f"{what.upper()}_NAME", message, suggest(name, table)))


def _honest(
    loaded: LoadedRecipe,
    registries: Registries,
    data: Path,
    rule: str,
    seed: int,
    dataset: Dataset | None,
    lockstep: Lockstep,
) -> Experiment:
    """The recipe with a rule; with its own settings of the rule if it names the same one."""
    document = loaded.recipe.document()
    settings = document["aggregation"]
    if settings["rule"] != rule:
        settings = {key: settings[key] for key in ("low_coverage", "min_contributors")}
    changed = {**document, "seed": seed, "aggregation": {**settings, "rule": rule}}
    return assemble(loaded.with_document(changed), registries, data, dataset, executor=lockstep)


def _attacked(honest: Experiment, attack: Attack, client_data: ClientData, names: frozenset[str]) -> Experiment:
    simulator = replace(honest.simulator, client_data=client_data)
    transport = AttackTransport(attack, names, honest.fleet)
    attacked = replace(honest, engine=simulator, simulator=simulator, attack=transport)
    simulator.executor.register(build_worker_context(attacked))
    return attacked


def accuracy_losses(cells: Sequence[AttackCell]) -> dict[tuple[str, str], float]:
    """Points of mean accuracy lost under each attack and rule, relative to the plain mean without attack.

    A loss includes what the rule itself costs.
    """
    base = next(statistics.fmean(cell.mean) for cell in cells if (cell.attack, cell.rule) == (NONE, NONE))
    return {(cell.attack, cell.rule): base - statistics.fmean(cell.mean) for cell in cells}

"""Attack benchmark: a recipe under every attack with every aggregation rule, with the same malicious devices."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..data import Dataset
from ..engines import ATTACKS, AttackTransport, ClientData, InProcess, Lockstep, WorkerPool, malicious, poisoned
from ..evaluation import Row
from ..footprints import RULES
from ..recipe.errors import RecipeIssue, suggest
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.schema import CompressionConfig, FaultsConfig
from ..reporting.paired_stats import mean_by_share
from ..runs.build import assemble, build_simulation
from ..runs.experiment import Experiment
from ..runs.loop import RoundResult, rounds, single_thread
from .compare import MEMORY_LIMIT, estimate_memory

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

    def rounds(self) -> Iterator[tuple[str, RoundResult]]:
        """Run everything, as many runs side by side as memory allows; yields (name, round)."""
        everything = [one for seeds in self.experiments.values() for one in seeds]
        with single_thread(), ExitStack() as ending:
            ending.enter_context(closing(self.lockstep.pool))
            for one in everything:
                ending.enter_context(closing(one.engine))
            for group in self._side_by_side():
                for simulator, _ in group.values():
                    simulator.client_states.budget //= len(group)
                for name, done in self.lockstep.steps({run: steps for run, (_, steps) in group.items()}):
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

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[RoundResult]]]]:
        """Groups of runs that fit into memory together."""
        group: dict[str, tuple[InProcess, Iterator[RoundResult]]] = {}
        free, size = MEMORY_LIMIT, 0
        for (attack, rule), seeds in self.experiments.items():
            for one in seeds:
                size = size or estimate_memory(one)  # the same for all rules
                if group and size > free:
                    yield group
                    group, free = {}, MEMORY_LIMIT
                group[_run_name(attack, rule, one)] = one.simulator, rounds(one)
                free -= size
        yield group


def _run_name(attack: str, rule: str, experiment: Experiment) -> str:
    return f"{attack} against {rule}, seed {experiment.fleet.seed}"


def build_attack_bench(
    loaded: LoadedRecipe,
    registry: Registry,
    data: Path,
    attacks: Sequence[str],
    rules: Sequence[str],
    share: float,
    seeds: int,
    test: str,
    workers: int = 1,
) -> AttackBench:
    """Plan the runs for `seeds` seeds from the recipe's on; runs without attack and with the plain mean are added."""
    _check_names(loaded, attacks, {NONE: None, **ATTACKS}, "attack")
    _check_names(loaded, rules, RULES, "rule")
    if loaded.recipe.faults != FaultsConfig():
        message = "faults would mix with the effect of the attacks"
        raise loaded.error(RecipeIssue(("faults",), "FAULTS_TOO", message, "leave [faults] out"))
    if loaded.recipe.compression != CompressionConfig():
        message = "attacks are not simulated through compression"
        raise loaded.error(RecipeIssue(("compression",), "COMPRESSION_TOO", message, "leave [compression] out"))
    experiments: dict[tuple[str, str], list[Experiment]] = {}
    bad, dataset, lockstep = dict[int, list[str]](), None, Lockstep(WorkerPool(workers))
    for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds):
        for attack in dict.fromkeys([NONE, *attacks]):
            client_data: ClientData | None = None  # shared by all rules, so that they train in one block
            for rule in dict.fromkeys([NONE, *rules]):
                honest = _honest(loaded, registry, data, rule, seed, dataset, lockstep)
                dataset, names = honest.dataset, malicious(honest.fleet, share)
                bad[seed] = sorted(names)
                if attack != NONE:
                    client_data = client_data or poisoned(ATTACKS[attack], honest.simulator.client_data, names)
                experiment = honest if client_data is None else _attacked(honest, attack, client_data, names)
                experiments.setdefault((attack, rule), []).append(experiment)
    return AttackBench(experiments, bad, test, loaded.recipe.compare.candidate or "", lockstep)


def _check_names(loaded: LoadedRecipe, names: Sequence[str], table: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in table:
            message = f"there is no {what} {name!r}"
            raise loaded.error(RecipeIssue((), f"{what.upper()}_NAME", message, suggest(name, table)))


def _honest(
    loaded: LoadedRecipe,
    registry: Registry,
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
    return assemble(loaded.with_document(changed), registry, data, dataset, executor=lockstep)


def _attacked(honest: Experiment, name: str, client_data: ClientData, names: frozenset[str]) -> Experiment:
    simulator = replace(honest.simulator, client_data=client_data)
    attack = AttackTransport(ATTACKS[name], names, honest.fleet)
    attacked = replace(honest, engine=simulator, simulator=simulator, attack=attack)
    simulator.executor.register(build_simulation(attacked))
    return attacked


def accuracy_losses(cells: Sequence[AttackCell]) -> dict[tuple[str, str], float]:
    """Points of mean accuracy lost under each attack and rule, relative to the plain mean without attack.

    A loss includes what the rule itself costs.
    """
    base = next(statistics.fmean(cell.mean) for cell in cells if (cell.attack, cell.rule) == (NONE, NONE))
    return {(cell.attack, cell.rule): base - statistics.fmean(cell.mean) for cell in cells}

"""A recipe under attack: every attack against every rule, with the same devices bad in all of them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..data import Dataset
from ..engines import ATTACKS, Attacked, ClientData, InProcess, WorkerPool, lockstep, malicious, poisoned
from ..evaluation import Row
from ..fleet import Fleet
from ..footprints import RULES
from ..recipe.errors import RecipeIssue, suggest
from ..recipe.load import LoadedRecipe
from ..recipe.registry import Registry
from ..recipe.schema import CompressionConfig, FaultsConfig
from ..runs.build import Experiment, assemble, member, simulation
from ..runs.loop import RoundResult, one_thread, rounds
from .compare import MEMORY_LIMIT, estimate_memory

NONE = "none"  # of the attacks: everybody is honest; of the rules: the plain mean


@dataclass(frozen=True)
class AttackCell:
    """What became of the recipe under one attack with one rule: accuracies in %, seed by seed."""

    attack: str
    rule: str
    tiers: dict[str, list[float]]
    mean: list[float]  # over tiers, by their shares
    worst: list[float]  # tier
    refused: int  # replies, all seeds together


@dataclass(frozen=True)
class AttackBench:
    """Nothing of it is written down but its result: a run under attack is no run to go on from."""

    experiments: dict[tuple[str, str], list[Experiment]]  # (attack, rule) -> seed by seed
    bad: dict[int, list[str]]  # seed -> the devices that misbehave
    test: str
    candidate: str = ""  # the one that counts; empty: the first there is
    workers: int = 1
    _judged: dict[str, list[Row]] = field(default_factory=dict)

    def round_counts(self) -> dict[str, int]:
        """How many rounds each run has."""
        named = ((place, one) for place, seeds in self.experiments.items() for one in seeds)
        return {_name(*place, one): one.loaded.recipe.rounds for place, one in named}

    def rounds(self) -> Iterator[tuple[str, RoundResult]]:
        """Run everything, as much side by side as memory allows, round by round under a name for each."""
        everything = [one for seeds in self.experiments.values() for one in seeds]
        with one_thread(), ExitStack() as ending:
            crew = ending.enter_context(closing(WorkerPool([member(one) for one in everything], self.workers)))
            for one in everything:
                ending.enter_context(closing(one.engine))
            for some in self._side_by_side():
                for engine, _ in some.values():
                    engine.memory.budget //= len(some)
                for name, done in lockstep(some, crew.outcomes):
                    found = [row for row in done.rows if self._counts(row)]
                    if found:
                        self._judged[name] = found
                    yield name, done

    def cells(self) -> list[AttackCell]:
        """What came of it, once all has run."""
        return [self._cell(attack, rule, seeds) for (attack, rule), seeds in self.experiments.items()]

    def _cell(self, attack: str, rule: str, seeds: Sequence[Experiment]) -> AttackCell:
        by_seed = [self._accuracies(_name(attack, rule, one)) for one in seeds]
        shares = {tier.name: share for tier, share in zip(seeds[0].fleet.tiers, seeds[0].fleet.shares, strict=True)}
        mean = [
            math.fsum(shares[tier] * value for tier, value in one.items()) / math.fsum(shares[tier] for tier in one)
            for one in by_seed
        ]
        return AttackCell(
            attack,
            rule,
            {tier: [one[tier] for one in by_seed] for tier in by_seed[0]},
            mean,
            [min(one.values()) for one in by_seed],
            sum(len(one.refusals) for one in seeds),
        )

    def _accuracies(self, name: str) -> Mapping[str, float]:
        rows = self._judged[name]
        wanted = self.candidate or rows[0].candidate
        return {row.tier: row.value for row in rows if row.candidate == wanted}

    def _counts(self, row: Row) -> bool:
        return (row.device, row.test, row.metric) == ("", self.test, "accuracy")

    def _side_by_side(self) -> Iterator[dict[str, tuple[InProcess, Iterator[RoundResult]]]]:
        some: dict[str, tuple[InProcess, Iterator[RoundResult]]] = {}
        room, size = MEMORY_LIMIT, 0
        for (attack, rule), seeds in self.experiments.items():
            for one in seeds:
                size = size or estimate_memory(one)  # all are of the same recipe but for their rule
                if some and size > room:
                    yield some
                    some, room = {}, MEMORY_LIMIT
                some[_name(attack, rule, one)] = simulation(one), rounds(one)
                room -= size
        yield some


def _name(attack: str, rule: str, experiment: Experiment) -> str:
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
    """The recipe with so many seeds from its own on. The honest fleet and the plain mean are always beside the rest."""
    _known(loaded, attacks, {NONE: None, **ATTACKS}, "attack")
    _known(loaded, rules, RULES, "rule")
    if loaded.recipe.faults != FaultsConfig():
        said = "a bench of attacks has no other faults, so that what is lost is lost to the attack"
        raise loaded.error(RecipeIssue(("faults",), "FAULTS_TOO", said, "leave [faults] out"))
    if loaded.recipe.compression != CompressionConfig():
        said = "what attackers forge here is not what they could send through a codec"
        raise loaded.error(RecipeIssue(("compression",), "CODEC_TOO", said, "leave [compression] out"))
    found: dict[tuple[str, str], list[Experiment]] = {}
    bad, dataset = dict[int, list[str]](), None
    for seed in range(loaded.recipe.seed, loaded.recipe.seed + seeds):
        for attack in dict.fromkeys([NONE, *attacks]):
            client_data: ClientData | None = None  # the same for all rules, so that they can train side by side
            for rule in dict.fromkeys([NONE, *rules]):
                honest = _honest(loaded, registry, data, rule, seed, dataset)
                dataset, names = honest.dataset, malicious(honest.fleet, share)
                bad[seed] = sorted(names)
                if attack != NONE:
                    client_data = client_data or poisoned(ATTACKS[attack], simulation(honest).client_data, names)
                made = honest if client_data is None else _attacked(honest, attack, client_data, names, honest.fleet)
                found.setdefault((attack, rule), []).append(made)
    return AttackBench(found, bad, test, loaded.recipe.compare.candidate or "", workers)


def _known(loaded: LoadedRecipe, names: Sequence[str], table: Mapping[str, object], what: str) -> None:
    for name in names:
        if name not in table:
            said = f"there is no {what} {name!r}"
            raise loaded.error(RecipeIssue((), f"{what.upper()}_NAME", said, suggest(name, table)))


def _honest(loaded: LoadedRecipe, registry: Registry, data: Path, rule: str, seed: int, dataset: Dataset | None) -> Experiment:
    """The recipe with a rule: its own settings of it, where it names the same one."""
    document = loaded.recipe.document()
    own = document["defence"]
    kept = own if own["rule"] == rule else {key: own[key] for key in ("thin", "min_contributors")}
    changed = {**document, "seed": seed, "aggregation": {**kept, "rule": rule}}
    return assemble(loaded.with_document(changed), registry, data, dataset)


def _attacked(
    honest: Experiment, attack: str, client_data: ClientData, names: frozenset[str], fleet: Fleet
) -> Experiment:
    engine = replace(simulation(honest), client_data=client_data)
    return replace(honest, engine=Attacked(engine, ATTACKS[attack], names, fleet))


def accuracy_losses(cells: Sequence[AttackCell]) -> dict[tuple[str, str], float]:
    """In points of the mean over tiers and seeds, what an attack costs with each rule: measured from the plain mean
    without an attack, so that a rule's own price is in it."""
    base = next(statistics.fmean(one.mean) for one in cells if (one.attack, one.rule) == (NONE, NONE))
    return {(one.attack, one.rule): base - statistics.fmean(one.mean) for one in cells}

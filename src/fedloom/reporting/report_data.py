"""Everything a report shows: the folders of runs, finished or still running, grouped into arms by seed."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..evaluation import Row
from ..evaluation.metrics import MetricInfo, UndeclaredDirection
from ..files import read_json_lines
from ..methods import headline_test
from ..registry import suggest
from ..runs.correct_examples import CorrectExamples, read_correct
from ..runs.folder import MANIFEST, evaluated_tests, read_manifest, read_metrics, read_rows
from .paired_stats import Arm, ComparedMetric, ServedModel, metric_of, other_test
from .search import SearchRecord, read_searches
from .tables import DESCRIPTION_FILE, ComparisonResult, ComparisonTerms, conclude
from .targets import BudgetUnit, budget_lines, limit_to_budget

DEFAULT_BASELINES = ("small-for-all", "standalone")  # arms whose final value others are expected to reach


class ReportError(Exception):
    """The folders cannot be reported on."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class RunReader:
    """The files of one run; of a run still being written, as much as there is."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "recipe.toml").read_text(encoding="utf-8"))

    @cached_property
    def fleet(self) -> dict[str, Any]:
        """The fleet's summary; with defaults for runs of older releases, which have none."""
        known: dict[str, Any] = _read_json(self.folder / "fleet.json") or {}
        tiers = [{"name": tier["name"], "share": tier["share"], "trained": True} for tier in self.recipe["tiers"]]
        method = {"name": self.recipe["method"]["name"]}
        return {"tiers": tiers, "method": method, "regions": [], "devices": [], "device_tiers": None, **known}

    @cached_property
    def rows(self) -> list[Row]:
        return list(read_rows(self.folder, strict=False))

    @cached_property
    def events(self) -> list[Mapping[str, Any]]:
        return list(read_json_lines(self.folder / "events.jsonl"))

    @cached_property
    def participation(self) -> list[Mapping[str, Any]]:
        return list(read_json_lines(self.folder / "participation.jsonl"))

    @cached_property
    def timings(self) -> list[Mapping[str, Any]]:
        return list(read_json_lines(self.folder / "timings.jsonl"))

    @cached_property
    def subnets(self) -> list[Mapping[str, Any]]:
        """Subnets evaluated by `fedloom subnet`."""
        return list(read_json_lines(self.folder / "subnets.jsonl"))

    @cached_property
    def cka(self) -> list[dict[str, Any]]:
        return _read_json(self.folder / "cka.json") or []

    @cached_property
    def correct(self) -> CorrectExamples | None:
        """Which test examples its models get right in the end; None if that is not known."""
        return read_correct(self.folder)

    @cached_property
    def metrics(self) -> dict[str, MetricInfo]:
        """Direction and unit of its metrics, by name; empty for runs of older releases."""
        return read_metrics(self.manifest)

    @property
    def headline_test(self) -> str:
        """The test that its method is for; "global" for runs of older releases."""
        return headline_test(self.fleet["method"].get("produces", "global"), evaluated_tests(self.rows))

    @property
    def method(self) -> str:
        return str(self.recipe["method"]["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def rounds(self) -> int:
        """The number of finished rounds."""
        return max((row.round for row in self.rows), default=0)

    @property
    def is_running(self) -> bool:
        return self.manifest.get("status") == "running"

    @cached_property
    def tier_of(self) -> dict[str, str]:
        """Tier by device; empty if tiers are redrawn every round."""
        tiers = self.fleet["device_tiers"]
        return dict(zip(self.fleet["devices"], tiers, strict=True)) if tiers else {}

    @cached_property
    def void_rounds(self) -> frozenset[int]:
        """Rounds that did not count because too few devices replied."""
        return frozenset(event["round"] for event in self.events if event["code"] == "QUORUM")


def is_run_folder(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / "recipe.toml").is_file()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


@dataclass(frozen=True)
class Group:
    """An arm and its runs, by seed."""

    arm: Arm
    readers: Sequence[RunReader]

    @property
    def name(self) -> str:
        return self.arm.name


@dataclass(frozen=True)
class ReportData:
    groups: Sequence[Group]
    terms: ComparisonTerms
    command: str  # repeats it all
    equal: BudgetUnit = "rounds"  # the budget that arms share
    details: Sequence[str] = ()  # sentences of the comparison on single devices and on searches
    notes: Sequence[str] = ()  # its further sentences
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods that do not fit, and why
    unpaired: str = ""  # why runs are only shown side by side; empty: they are compared
    searches: Sequence[SearchRecord] = ()  # for the settings of each arm, if they were searched

    @property
    def has_several_arms(self) -> bool:
        return len(self.groups) > 1

    @property
    def tiers(self) -> Sequence[str]:
        """From the largest to the smallest."""
        return self.terms.tiers

    @property
    def test(self) -> str:
        return self.terms.test

    @property
    def first(self) -> RunReader:
        """The run shown where only one can be."""
        return self.groups[0].readers[0]

    @property
    def readers(self) -> list[RunReader]:
        return [reader for group in self.groups for reader in group.readers]

    @property
    def is_running(self) -> bool:
        return any(reader.is_running for reader in self.readers)

    @property
    def metric(self) -> ComparedMetric:
        return self.groups[0].arm.metric

    @property
    def other_metrics(self) -> list[str]:
        """The metrics besides the one that the report is about: those that the recipe asks for, or that are usual for
        a task other than classification. A metric with several values is one."""
        asked = self.first.recipe.get("evaluation", {}).get("metrics")
        metrics = self.first.metrics
        shown = asked or any(info.headline for info in metrics.values())
        return [name for name in metrics if shown and name not in (self.metric.name, "initial", "personalized")]

    @cached_property
    def is_evaluated(self) -> bool:
        """True if every arm has been evaluated on every tier that it serves."""
        return all(
            group.arm.curves(tier, self.test)[0] or 0 in group.arm.failed
            for group in self.groups
            for tier in self.tiers
            if group.arm.serving[tier].can_run and self._has_devices(tier)
        )

    @cached_property
    def tests_agree(self) -> bool:
        """True if the other test shows the same values, so that showing both would say nothing more."""
        pairs = [
            [
                [self._shown_values(curve) for curve in group.arm.curves(tier, test)]
                for test in (self.test, other_test(self.test))
            ]
            for group in self.groups
            for tier in self.tiers
        ]
        return any(any(second) for _, second in pairs) and all(first == second for first, second in pairs)

    def _shown_values(self, curve: Sequence[Row]) -> list[tuple[int, str]]:
        return [(row.round, self.metric.format(row.value)) for row in curve]

    def _has_devices(self, tier: str) -> bool:
        tiers = self.first.tier_of
        return not tiers or tier in tiers.values()

    @cached_property
    def result(self) -> ComparisonResult | None:
        """The result by the rules of `fedloom compare`; None for a single arm or before all arms were evaluated."""
        if not self.has_several_arms or self.unpaired or not self.is_evaluated or not self.metric.is_directed:
            return None
        arms = [group.arm for group in self.groups]
        result = conclude(limit_to_budget(arms, self.equal), self.terms)
        lengths = {reader.recipe["rounds"] for reader in self.readers}
        budgets = budget_lines(arms, self.equal) if self.equal != "rounds" or len(lengths) > 1 else []
        failures = [
            f"{group.name} failed with seed {group.readers[index].seed}"
            for group in self.groups
            for index in group.arm.failed
        ]
        verdict = [*result.verdict, *budgets, *failures, *self.details, *self.notes]
        return replace(
            result, verdict=verdict, left_out=dict(self.left_out), details=list(self.details)
        )  # fmt: skip

    @property
    def missing_result_reason(self) -> str:
        if self.unpaired:
            return self.unpaired
        if self.has_several_arms and not self.metric.is_directed:
            return str(UndeclaredDirection(self.metric.name))
        return "not all arms have been evaluated yet" if self.has_several_arms else "there is only one arm"

    @property
    def baseline(self) -> str | None:
        """The arm that sets the target: the recipe's, else a default control, else the second arm."""
        names = [group.name for group in self.groups]
        known = [name for name in (self.terms.baseline, *DEFAULT_BASELINES, *names[1:]) if name in names]
        return known[0] if self.has_several_arms else None


def read_report_data(folders: Sequence[Path], test: str | None = None, metric: str | None = None) -> ReportData:
    """Read a run, a comparison, or several runs to be compared.

    `metric`: what the report is about, as rows name it; default: the comparison's, else accuracy or perplexity.
    """
    for folder in folders:
        if not is_run_folder(folder) and not (folder / DESCRIPTION_FILE).is_file():
            hint = "create one with: fedloom run my.toml --out my-run"
            raise ReportError(f"{folder} is not the folder of a run or of a comparison", hint)
    described = [folder for folder in folders if (folder / DESCRIPTION_FILE).is_file()]
    if described and len(folders) > 1:
        raise ReportError("a comparison cannot be combined with other folders", "name its folder alone, or runs")
    return _read_comparison(described[0], test, metric) if described else _combine_runs(folders, test, metric)


def _read_comparison(home: Path, test: str | None, metric: str | None) -> ReportData:
    description = json.loads((home / DESCRIPTION_FILE).read_text(encoding="utf-8"))
    metric = metric or description["terms"].get("metric")
    groups = [_read_group(home, name, arm, metric) for name, arm in description["arms"].items()]
    groups = [group for group in groups if group.readers]
    if not groups:
        raise ReportError(f"no run of {home} has started yet")
    seeds = min(len(group.readers) for group in groups)  # paired; later seeds have not started in every arm
    paired = [_limit_seeds(group, seeds) for group in groups]
    headlines = {group.name: group.readers[0].headline_test for group in paired}
    chosen = {"test": test or description["terms"]["test"], "metric": metric or "", "headlines": headlines}
    terms = ComparisonTerms(**{**description["terms"], **chosen})
    if terms.baseline not in [group.name for group in paired]:
        terms = replace(terms, baseline=None)
    terms = _choose_test(terms, paired[0], test)
    details, notes = (description.get(kind, ()) for kind in ("details", "notes"))
    searches = {one["arm"]: one for one in read_searches(home)}
    return ReportData(
        paired, terms, description["command"], description["equal"], details, notes,
        description.get("left_out", {}), searches=[searches[one.name] for one in paired if one.name in searches],
    )  # fmt: skip


def _read_group(home: Path, name: str, description: Mapping[str, Any], metric: str | None) -> Group:
    readers = [RunReader(home / run) for run in description["runs"] if is_run_folder(home / run)]
    serving = {tier: ServedModel(**served) for tier, served in description["serving"].items()}
    arm = Arm(name, serving, [], description["candidate"], description["shares"])
    return Group(_with_measurements(arm, readers, metric), readers)


def _with_measurements(arm: Arm, readers: Sequence[RunReader], metric: str | None) -> Arm:
    runs = [reader.rows for reader in readers]
    macs = {tier["name"]: tier["macs"] for reader in readers[:1] for tier in reader.fleet["tiers"] if "macs" in tier}
    failed = frozenset(at for at, reader in enumerate(readers) if reader.manifest["status"] == "failed")
    declared = readers[0].metrics if readers else {}
    compared = metric_of((row for rows in runs for row in rows), declared, metric)
    correct = [reader.correct for reader in readers]
    return replace(arm, runs=runs, metric=compared, macs=macs, failed=failed, correct=correct)


def _limit_seeds(group: Group, seeds: int) -> Group:
    arm = replace(group.arm, runs=group.arm.runs[:seeds], correct=group.arm.correct[:seeds])
    return Group(arm, group.readers[:seeds])


def _combine_runs(folders: Sequence[Path], test: str | None, metric: str | None) -> ReportData:
    """Runs that differ only in their seed form one arm."""
    by_recipe: dict[str, list[RunReader]] = {}
    for reader in map(RunReader, folders):
        by_recipe.setdefault(json.dumps({**reader.recipe, "seed": None}, sort_keys=True), []).append(reader)
    arms = [sorted(readers, key=lambda reader: reader.seed) for readers in by_recipe.values()]
    unpaired = _why_unpaired(arms)
    first = arms[0][0]
    known = [tier for readers in arms for tier in readers[0].fleet["tiers"]]
    tiers = list({tier["name"]: tier for tier in reversed(known)}.values())[::-1]
    names = [tier["name"] for tier in sorted(tiers, key=lambda tier: -tier.get("parameters", 0))]
    groups = [
        Group(_build_arm(name, readers, names, metric), readers)
        for name, readers in zip(_arm_names(arms), arms, strict=True)
    ]
    examples = int(first.manifest.get("test_examples", 1))
    terms = ComparisonTerms(
        names, {tier["name"]: tier["share"] for tier in tiers}, test or first.headline_test, examples,
        metric=metric or "", headlines={group.name: group.readers[0].headline_test for group in groups},
    )  # fmt: skip
    paths = " ".join(str(folder) for folder in folders)
    command = f"fedloom report {paths}" if len(folders) > 1 else ""
    return ReportData(groups, _choose_test(terms, groups[0], test), command, unpaired=unpaired)


def _why_unpaired(arms: Sequence[Sequence[RunReader]]) -> str:
    """Why these runs can be shown side by side but not compared; "" if they can. Refuses a run that is named twice."""
    seeds = [[reader.seed for reader in readers] for readers in arms]
    if any(len(set(of_arm)) < len(of_arm) for of_arm in seeds):
        raise ReportError("a run with the same recipe and seed is named twice", "name each run once")
    if len({readers[0].manifest.get("data", "") for readers in arms}) > 1:
        return "the runs have different data"
    tiers = [sorted(tier["name"] for tier in readers[0].fleet["tiers"]) for readers in arms]
    if any(of_arm != tiers[0] for of_arm in tiers):
        return "the runs have different tiers"
    if any(of_arm != seeds[0] for of_arm in seeds):
        return f"the runs have different seeds ({'; '.join(', '.join(map(str, of_arm)) for of_arm in seeds)})"
    return ""


def _arm_names(arms: Sequence[Sequence[RunReader]]) -> list[str]:
    """Their methods; if those are equal, their folders."""
    methods = [readers[0].method for readers in arms]
    folders = [readers[0].folder.resolve().name for readers in arms]
    parents = [readers[0].folder.resolve().parent.name for readers in arms]
    for names in (methods, folders, parents):
        if len(set(names)) == len(arms):
            return names
    return [f"{method} {number}" for number, method in enumerate(methods, 1)]


def _build_arm(name: str, readers: Sequence[RunReader], tiers: Sequence[str], metric: str | None) -> Arm:
    trained = {tier["name"] for tier in readers[0].fleet["tiers"] if tier.get("trained", True)}
    largest = next((tier for tier in tiers if tier in trained), tiers[0])
    own = {tier["name"] for tier in readers[0].fleet["tiers"]}
    serving = {
        tier: ServedModel(tier, tier in trained)
        if tier in trained or tier not in own
        else ServedModel(largest, tiers.index(tier) < tiers.index(largest))
        for tier in tiers
    }
    return _with_measurements(Arm(name, serving, []), readers, metric)


def _choose_test(terms: ComparisonTerms, group: Group, requested: str | None) -> ComparisonTerms:
    """The requested test, or another one if the run does not have it. Refuses a metric that the run does not have."""
    evaluated = [row for row in group.readers[0].rows if row.candidate and not row.device]
    metric, metrics = group.arm.metric.name, list(dict.fromkeys(row.metric for row in evaluated))
    if terms.metric and metrics and metric not in metrics:
        raise ReportError(f"the run has no metric {metric!r}", suggest(metric, metrics))
    known = {row.test for row in evaluated if row.metric == metric}
    if requested and known and requested not in known:
        raise ReportError(f"there is no evaluation on {requested!r}", f"available: {', '.join(sorted(known))}")
    return terms if not known or terms.test in known else replace(terms, test=sorted(known)[0])

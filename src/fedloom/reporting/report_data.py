"""A run as its folder tells it, be it finished or still going on: everything a report is made of.

What a report is about: one run, or several put side by side as arms with their seeds.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..evaluation import Row
from ..runs.folder import MANIFEST, read_manifest
from . import targets
from .paired_stats import Arm, Metric, Serving, metric_of
from .result import DESCRIPTION, Result, Terms, conclude
from .targets import Unit, at_equal_budgets

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunReader:
    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "recipe.toml").read_text(encoding="utf-8"))

    @cached_property
    def fleet(self) -> dict[str, Any]:
        """Who takes part; runs of older releases do not say."""
        known: dict[str, Any] = _document(self.folder / "fleet.json") or {}
        tiers = [{"name": one["name"], "share": one["share"], "trained": True} for one in self.recipe["tiers"]]
        method = {"name": self.recipe["method"]["name"]}
        return {"tiers": tiers, "method": method, "rings": [], "devices": [], "device_tiers": None, **known}

    @cached_property
    def rows(self) -> list[Row]:
        return [
            Row(**{**line, "value": math.nan if line["value"] is None else line["value"]})
            for line in _lines(self.folder / "rows.jsonl")
        ]

    @cached_property
    def events(self) -> list[Line]:
        return list(_lines(self.folder / "events.jsonl"))

    @cached_property
    def participation(self) -> list[Line]:
        return list(_lines(self.folder / "participation.jsonl"))

    @cached_property
    def timings(self) -> list[Line]:
        return list(_lines(self.folder / "timings.jsonl"))

    @cached_property
    def subnets(self) -> list[Line]:
        """Sub-nets that were judged after the run, if any were."""
        return list(_lines(self.folder / "subnets.jsonl"))

    @cached_property
    def cka(self) -> list[dict[str, Any]]:
        return _document(self.folder / "cka.json") or []

    @property
    def method(self) -> str:
        return str(self.recipe["method"]["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def rounds(self) -> int:
        """That are over."""
        return max((row.round for row in self.rows), default=0)

    @property
    def under_way(self) -> bool:
        return self.manifest.get("status") == "running"

    @cached_property
    def tier_of(self) -> dict[str, str]:
        """Of every device, where it keeps its tier."""
        kept = self.fleet["device_tiers"]
        return dict(zip(self.fleet["devices"], kept, strict=True)) if kept else {}

    @cached_property
    def voided(self) -> frozenset[int]:
        """Rounds that did not count, because too few devices were heard."""
        return frozenset(event["round"] for event in self.events if event["code"] == "QUORUM")


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / "recipe.toml").is_file()


def _document(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A line that is just being written is left for the next look."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


FLOOR = ("small-for-all", "standalone")  # arms whose end is a target that others are expected to reach


class NoReport(Exception):  # noqa: N818 - named for what is wrong
    """Folders of which no report can be made."""

    def __init__(self, said: str, hint: str = ""):
        super().__init__(said)
        self.hint = hint


@dataclass(frozen=True)
class Group:
    """An arm and the runs behind it, seed by seed."""

    arm: Arm
    stories: Sequence[RunReader]

    @property
    def name(self) -> str:
        return self.arm.name


@dataclass(frozen=True)
class ReportData:
    groups: Sequence[Group]
    terms: Terms
    command: str  # that runs it all again
    equal: Unit = "rounds"  # what arms may spend alike

    @property
    def several(self) -> bool:
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
        """The run that stands for all where one alone can be shown."""
        return self.groups[0].stories[0]

    @property
    def stories(self) -> list[RunReader]:
        return [story for group in self.groups for story in group.stories]

    @property
    def under_way(self) -> bool:
        return any(story.under_way for story in self.stories)

    @property
    def metric(self) -> Metric:
        return self.groups[0].arm.metric

    @cached_property
    def judged(self) -> bool:
        """Whether every arm has something to show yet."""
        return all(
            group.arm.curves(tier, self.test)[0] or 0 in group.arm.failed
            for group in self.groups
            for tier in self.tiers
            if group.arm.serving[tier].can_carry and self._lives(tier)
        )

    def _lives(self, tier: str) -> bool:
        kept = self.first.tier_of
        return not kept or tier in kept.values()

    @cached_property
    def result(self) -> Result | None:
        """By the rules of `fedloom compare`; None for a run alone, or before there is anything to compare."""
        if not self.several or not self.judged:
            return None
        arms = [group.arm for group in self.groups]
        found = conclude(at_equal_budgets(arms, self.equal), self.terms)
        told = [] if self.equal == "rounds" else targets.said(arms, self.equal)
        lost = [
            f"{group.name} failed with seed {group.stories[at].seed}"
            for group in self.groups
            for at in group.arm.failed
        ]
        return replace(found, verdict=[*found.verdict, *told, *lost])

    @property
    def uncompared(self) -> str:
        """Why there is no result."""
        return "not every arm was judged yet" if self.several else "there is one arm alone"

    @property
    def baseline(self) -> str | None:
        """Whose end is the target: the one that was said, else the humblest arm there is."""
        names = [group.name for group in self.groups]
        found = [name for name in (self.terms.baseline, *FLOOR, *names[1:]) if name in names]
        return found[0] if self.several else None


def report_data_of(folders: Sequence[Path], test: str | None = None) -> ReportData:
    """Of a run, of a comparison's folder, or of runs that are put side by side here."""
    for folder in folders:
        if not is_run(folder) and not (folder / DESCRIPTION).is_file():
            hint = "fedloom run my.toml --out my-run makes one"
            raise NoReport(f"{folder} is not the folder of a run or of a comparison", hint)
    described = [folder for folder in folders if (folder / DESCRIPTION).is_file()]
    if described and len(folders) > 1:
        raise NoReport("a comparison stands alone", "name either its folder, or the folders of runs")
    return _described(described[0], test) if described else _side_by_side(folders, test)


def _described(home: Path, test: str | None) -> ReportData:
    said = json.loads((home / DESCRIPTION).read_text(encoding="utf-8"))
    groups = [_group(home, name, one) for name, one in said["arms"].items()]
    groups = [group for group in groups if group.stories]
    if not groups:
        raise NoReport(f"no run of {home} has begun yet")
    seeds = min(len(group.stories) for group in groups)  # paired; the others have not begun yet
    paired = [_first_seeds(group, seeds) for group in groups]
    terms = Terms(**{**said["terms"], "test": test or said["terms"]["test"]})
    if terms.baseline not in [group.name for group in paired]:
        terms = replace(terms, baseline=None)
    return ReportData(paired, _tested(terms, paired[0].stories[0], test), said["command"], said["equal"])


def _group(home: Path, name: str, said: Mapping[str, Any]) -> Group:
    stories = [RunReader(home / run) for run in said["runs"] if is_run(home / run)]
    serving = {tier: Serving(**one) for tier, one in said["serving"].items()}
    return Group(_measured(Arm(name, serving, [], said["candidate"], said["shares"]), stories), stories)


def _measured(arm: Arm, stories: Sequence[RunReader]) -> Arm:
    """With all that the runs behind it say."""
    runs = [story.rows for story in stories]
    macs = {tier["name"]: tier["macs"] for story in stories[:1] for tier in story.fleet["tiers"] if "macs" in tier}
    failed = frozenset(at for at, story in enumerate(stories) if story.manifest["status"] == "failed")
    return replace(arm, runs=runs, metric=metric_of(row for rows in runs for row in rows), macs=macs, failed=failed)


def _first_seeds(group: Group, seeds: int) -> Group:
    return Group(replace(group.arm, runs=group.arm.runs[:seeds]), group.stories[:seeds])


def _side_by_side(folders: Sequence[Path], test: str | None) -> ReportData:
    """Runs that differ in their seed alone are one arm."""
    alike: dict[str, list[RunReader]] = {}
    for story in map(RunReader, folders):
        alike.setdefault(json.dumps({**story.recipe, "seed": None}, sort_keys=True), []).append(story)
    arms = [sorted(stories, key=lambda story: story.seed) for stories in alike.values()]
    _refuse_unpaired(arms)
    tiers = arms[0][0].fleet["tiers"]
    by_size = sorted(tiers, key=lambda tier: -tier.get("parameters", 0))
    names = [tier["name"] for tier in by_size]
    groups = [Group(_arm(name, stories, names), stories) for name, stories in zip(_names(arms), arms, strict=True)]
    first = arms[0][0]
    examples = int(first.manifest.get("test_examples", 1))
    terms = Terms(names, {tier["name"]: tier["share"] for tier in tiers}, test or "global", examples)
    paths = " ".join(str(folder) for folder in folders)
    command = f"fedloom report {paths}" if len(folders) > 1 else ""
    return ReportData(groups, _tested(terms, first, test), command)


def _refuse_unpaired(arms: Sequence[Sequence[RunReader]]) -> None:
    seeds, tiers = [[one.seed for one in stories] for stories in arms], [_tier_names(one[0]) for one in arms]
    if any(len(set(some)) < len(some) for some in seeds):
        raise NoReport("the same recipe and seed were named twice", "name each run once")
    if any(some != seeds[0] for some in seeds):
        raise NoReport(f"the runs have not the same seeds: {seeds}", "runs are compared seed by seed: name all of them")
    if any(some != tiers[0] for some in tiers):
        raise NoReport("the runs have not the same tiers", "`fedloom compare` knows what becomes of a tier left out")


def _tier_names(story: RunReader) -> list[str]:
    return sorted(tier["name"] for tier in story.fleet["tiers"])


def _names(arms: Sequence[Sequence[RunReader]]) -> list[str]:
    """Their methods, or where two arms have the same one, their folders."""
    methods = [stories[0].method for stories in arms]
    named = [stories[0].folder.resolve().name for stories in arms]
    parents = [stories[0].folder.resolve().parent.name for stories in arms]
    for names in (methods, named, parents):
        if len(set(names)) == len(arms):
            return names
    return [f"{method} {number}" for number, method in enumerate(methods, 1)]


def _arm(name: str, stories: Sequence[RunReader], tiers: Sequence[str]) -> Arm:
    trained = {tier["name"] for tier in stories[0].fleet["tiers"] if tier.get("trained", True)}
    largest = next((tier for tier in tiers if tier in trained), tiers[0])
    serving = {
        tier: Serving(tier, True) if tier in trained else Serving(largest, tiers.index(tier) < tiers.index(largest))
        for tier in tiers
    }
    return _measured(Arm(name, serving, []), stories)


def _tested(terms: Terms, story: RunReader, asked: str | None) -> Terms:
    """The test that is there: devices' own, where the whole set was not asked."""
    known = {row.test for row in story.rows if row.metric == "accuracy" and not row.device}
    if asked and known and asked not in known:
        raise NoReport(f"nothing was judged on {asked!r}", f"there are: {', '.join(sorted(known))}")
    return terms if not known or terms.test in known else replace(terms, test=sorted(known)[0])

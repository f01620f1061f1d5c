"""Run what papers published, at full size or as a claim: into a folder of its own, from where it can go on."""

import hashlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..analysis.costs import tier_costs
from ..files import write_atomic
from ..recipe.errors import recipe_error
from ..recipe.load import LoadedRecipe, load
from ..recipe.registry import Registry
from ..reporting.ledger import (
    ALL,
    ClaimTerms,
    Evidence,
    NotMeasuredError,
    baseline_target,
    claim_record,
    evaluate_claim,
    measured_text,
)
from ..runs.build import assemble
from ..runs.checkpoint import Checkpoint
from ..runs.experiment import Experiment
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.recorder import now
from ..runs.resume import Engage, changes, reopened
from .claims import Claim
from .compare import Comparison, is_comparison, plan_comparison, reopen_comparison
from .published import PublishedNumber, PublishedRow, measure_number

WALL = "wall.json"
KEPT = ("sha256", "devices_sha256", "partition", "started", "seconds")
MACHINE = ("fedloom", "python", "torch", "numpy", "machine", "threads")


@dataclass(frozen=True)
class ReproduceContext:
    """Where things lie, and who works."""

    registry: Registry
    data: Path
    workers: int
    engage: Engage


@dataclass(frozen=True)
class StartedRow:
    """A row's run: finished, or an experiment and where it goes on."""

    folder: Path
    loaded: LoadedRecipe
    experiment: Experiment | None = None
    since: Checkpoint | None = None


def row_folder(home: Path, name: str, sets: Sequence[str]) -> Path:
    """A trial with changes does not stand where the row itself belongs."""
    trial = hashlib.sha256("\n".join(sets).encode()).hexdigest()[:8]
    return home / (f"{name}+{trial}" if sets else name)


def start_row(row: PublishedRow, sets: Sequence[str], folder: Path, place: ReproduceContext) -> StartedRow:
    """Anew, or from the last checkpoint, or as it was finished."""
    loaded = load(row.recipe, place.registry, [*row.changes, *sets])
    if not (folder / MANIFEST).is_file():
        return StartedRow(folder, loaded, assemble(loaded, place.registry, place.data, workers=place.workers))
    before = load(folder / "recipe.toml", place.registry)
    check_same_recipe(folder, before.recipe.document(), loaded.recipe.document())
    if read_manifest(folder)["status"] == "finished":
        return StartedRow(folder, loaded)
    return StartedRow(folder, loaded, *reopened(folder, place.registry, place.data, place.workers, place.engage))


def check_same_recipe(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    different = "; ".join(changes(plain(before), plain(after)))
    if different:
        said, hint = f"another recipe was begun here: {different}", "remove the folder, or say another --runs"
        raise recipe_error(folder, "RECIPE_CHANGED", said, hint)


def plain(document: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(document))


def row_shares(loaded: LoadedRecipe) -> dict[str, float]:
    return {tier.name: tier.share for tier in loaded.recipe.tiers}


def row_numbers(row: PublishedRow, loaded: LoadedRecipe, folder: Path, place: ReproduceContext) -> list[dict[str, Any]]:
    """Every number of a row: as printed, and as it came out."""
    rows = [] if row.costs_only else list(read_rows(folder))
    timed = any(number.metric == "latency_ms" for number, _ in row.numbers)
    costs = (
        {one.name: one.record() for one in tier_costs(loaded, place.registry, place.data, timed)} if not rows else {}
    )

    def found(number: PublishedNumber) -> float | None:
        if number.selection == "cost" and number.tier == ALL:
            return sum(share * float(costs[tier][number.metric]) for tier, share in row_shares(loaded).items())
        if number.selection == "cost":
            return costs[number.tier or next(iter(costs))].get(number.metric)
        return measure_number(number, rows, row_shares(loaded))

    return [{"what": one.label, "published": printed, "measured": found(one)} for one, printed in row.numbers]


def start_comparison(
    claim: Claim, recipes: Path, home: Path, seeds: int, sets: Sequence[str], place: ReproduceContext
) -> Comparison:
    """The comparison that decides a claim: anew, or as far as it has got."""
    folder = row_folder(home, Path(claim.recipe).stem, sets)
    loaded = load(recipes / claim.recipe, place.registry, sets)
    planned = plan_comparison(loaded, place.registry, seeds, (), folder, place.data, place.workers)
    if not is_comparison(folder):
        return planned
    said = read_manifest(folder)
    wanted = {name: runs[0].loaded.recipe.document() for name, runs in planned.experiments.items()}
    check_same_recipe(folder, {"arms": said["arms"], "seeds": said["seeds"]}, {"arms": wanted, "seeds": planned.seeds})
    return reopen_comparison(folder, place.registry, place.data, place.workers)


def is_finished(planned: Comparison) -> bool:
    return is_comparison(planned.home) and read_manifest(planned.home)["status"] == "finished"


class RunsFailed(Exception):  # noqa: N818 - named for what is wrong
    """A comparison of which some runs could not be finished decides nothing."""

    def __init__(self, planned: Comparison):
        left = planned.unfinished_runs()
        self.message = f"{', '.join(left)} failed"
        super().__init__(self.message)
        self.hint = f"errors/traceback.txt in the runs' folders says why: {next(folder for _, folder in left.values())}"


@contextmanager
def record_wall_time(home: Path, commit: str | None) -> Iterator[None]:
    """Add up how long a comparison takes, however often it is taken up again; and keep which code began it."""
    began, before = time.monotonic(), _read_wall_file(home)
    try:
        yield
    finally:
        spent = before.get("seconds", 0.0) + time.monotonic() - began
        home.mkdir(parents=True, exist_ok=True)
        write_atomic(home / WALL, json.dumps({"commit": commit, **before, "seconds": spent}).encode())


def _read_wall_file(home: Path) -> dict[str, Any]:
    path = home / WALL
    said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return said


def wall_seconds(home: Path) -> float:
    return float(_read_wall_file(home).get("seconds", 0.0))


def start_commit(home: Path) -> str | None:
    commit: str | None = _read_wall_file(home).get("commit")
    return commit


def read_evidence(planned: Comparison) -> Evidence:
    runs = {arm: [list(read_rows(folder)) for folder in planned.folders(arm)] for arm in planned.experiments}
    fleets = {arm: experiments[0].fleet for arm, experiments in planned.experiments.items()}
    shares = {
        arm: {tier.name: share for tier, share in zip(fleet.tiers, fleet.shares, strict=True)}
        for arm, fleet in fleets.items()
    }
    return Evidence(runs, shares)


def check_arms(claim: Claim, known: Sequence[str]) -> None:
    missing = sorted(claim.arms - set(known))
    if missing:
        said, hint = f"{claim.name} needs the arm {missing[0]!r}", f"there are: {', '.join(known)}"
        raise recipe_error(claim.recipe, "ARM_NAME", said, hint)


def ledger_entry(claim: Claim, planned: Comparison, seen: Evidence, command: str) -> dict[str, Any]:
    """A claim's line in the ledger."""
    try:
        terms = terms_with_targets(claim, seen)
        found = evaluate_claim(claim.this, claim.other, terms, seen)
    except NotMeasuredError as error:
        raise recipe_error(claim.recipe, "NOT_MEASURED", f"{claim.name}: {error}") from error
    said = {
        "text": measured_text(found, claim.measure, (side_name(claim, 0), side_name(claim, 1))),
        **claim_record(found),
    }
    return {
        "claim": claim.name, "paper": claim.paper, "statement": claim.statement, "published": claim.published,
        "measured": {**said, **({"targets": dict(terms.targets)} if terms.targets else {})},
        "seeds": planned.seeds,
        "verdict": found.verdict, "command": command, "wall_seconds": round(wall_seconds(planned.home), 1),
        "commit": start_commit(planned.home), "date": now(), "recipe": claim.recipe,
    }  # fmt: skip


def terms_with_targets(claim: Claim, seen: Evidence) -> ClaimTerms:
    """With targets, where it is about how soon they are reached."""
    if claim.baseline is None:
        return claim.terms
    tiers = dict.fromkeys((claim.this.tier, claim.other.tier))
    aims = [baseline_target(replace(claim.baseline, tier=tier), claim.terms, claim.margin, seen) for tier in tiers]
    return replace(claim.terms, targets={tier: aim for one in aims for tier, aim in one.items()})


def side_name(claim: Claim, number: int) -> str:
    side, both = (claim.this, claim.other)[number], claim.this.tier != claim.other.tier
    name = f"{side.arm} over {' and '.join(side.others)}" if side.others else side.arm
    return f"{name} ({'all devices' if side.tier == ALL else side.tier})" if both else name


def collect_manifests(planned: Comparison) -> dict[str, Any]:
    """What decides, or proves, the numbers: fingerprints arm by arm and seed by seed, versions and the machine."""
    by_arm = {arm: [read_manifest(folder) for folder in planned.folders(arm)] for arm in planned.experiments}
    first = next(iter(by_arm.values()))[0]
    runs = {
        arm: {str(one["seed"]): {key: one[key] for key in KEPT if key in one} for one in said}
        for arm, said in by_arm.items()
    }
    shared = {key: first[key] for key in (*MACHINE, "data") if key in first}
    return {**shared, "processors": os.cpu_count(), "workers": planned.lockstep.pool.workers, "arms": runs}


def current_commit(folder: Path, written: Sequence[Path] = ()) -> str | None:
    """The commit that a folder is at, marked where files have changed since, other than those that were `written` from
    the runs themselves; None: nobody knows."""
    here, top, changed = (_git(folder, *said) for said in ASKED)
    if here is None or top is None or changed is None:
        return None
    own = {one.resolve() for one in written}
    others = [line for line in changed.splitlines() if Path(top, line[3:]).resolve() not in own]
    return f"{here}+changes" if others else here


ASKED = (
    ("rev-parse", "--short=10", "HEAD"), ("rev-parse", "--show-toplevel"), ("status", "--porcelain", "--untracked=no"),
)  # fmt: skip


def _git(folder: Path, *said: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *said], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None

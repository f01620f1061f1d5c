"""Run published rows at full size, and comparisons that decide claims; both resume from their folder."""

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
from ..recipe.registries import Registries
from ..reporting.ledger import (
    ALL,
    ClaimTerms,
    Evidence,
    NotMeasuredError,
    baseline_target,
    claim_record,
    evaluate_claim,
    flatness,
    full_size_entry,
    measured_text,
)
from ..runs.build import assemble
from ..runs.checkpoint import Checkpoint
from ..runs.experiment import Experiment
from ..runs.folder import MANIFEST, read_manifest, read_rows
from ..runs.own_names import load_recipe_of
from ..runs.recorder import utc_now
from ..runs.resume import AttachEngine, list_changes, reopen_run, with_added_keys
from .compare import Comparison, is_comparison, plan_comparison, reopen_comparison
from .published import Claim, PublishedNumber, PublishedRow, measure_number

WALL_FILE = "wall.json"
FINGERPRINT_KEYS = ("sha256", "devices_sha256", "partition", "kernels", "started", "seconds")
VERSION_KEYS = ("fedloom", "python", "torch", "numpy", "machine", "threads")


@dataclass(frozen=True)
class ReproduceContext:
    """What every run of `fedloom reproduce` shares."""

    registries: Registries
    data: Path
    workers: int
    engage: AttachEngine


@dataclass(frozen=True)
class StartedRow:
    """The run of a row: finished (no experiment), new, or to be resumed from a checkpoint."""

    folder: Path
    loaded: LoadedRecipe
    experiment: Experiment | None = None
    since: Checkpoint | None = None


def row_folder(home: Path, name: str, sets: Sequence[str]) -> Path:
    """The folder of a row; a trial with changes gets its own."""
    trial = hashlib.sha256("\n".join(sets).encode()).hexdigest()[:8]
    return home / (f"{name}+{trial}" if sets else name)


def start_row(row: PublishedRow, sets: Sequence[str], folder: Path, context: ReproduceContext) -> StartedRow:
    """Start a row's run, or resume it, or find it finished."""
    loaded = load(row.recipe, context.registries, [*row.changes, *sets])
    if not (folder / MANIFEST).is_file():
        return StartedRow(folder, loaded, assemble(loaded, context.registries, context.data, workers=context.workers))
    before = load_recipe_of(folder, context.registries)
    check_same_recipe(folder, before.recipe.document(), loaded.recipe.document())
    if read_manifest(folder)["status"] == "finished":
        return StartedRow(folder, loaded)
    return StartedRow(
        folder, loaded, *reopen_run(folder, context.registries, context.data, context.workers, context.engage)
    )


def check_same_recipe(folder: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    different = "; ".join(list_changes(_plain(before), _plain(after)))
    if different:
        message = f"the folder holds runs of another recipe: {different}"
        raise recipe_error(folder, "RECIPE_CHANGED", message, "remove the folder, or choose another with --runs")


def _plain(document: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(document))


def row_shares(loaded: LoadedRecipe) -> dict[str, float]:
    return {tier.name: tier.share for tier in loaded.recipe.tiers}


def row_numbers(
    row: PublishedRow, loaded: LoadedRecipe, folder: Path, context: ReproduceContext
) -> list[dict[str, Any]]:
    """Every number of a row, as published and as measured."""
    rows = [] if row.costs_only else list(read_rows(folder))
    timed = any(number.metric == "latency_ms" for number, _ in row.numbers)
    costs = (
        {one.name: one.record() for one in tier_costs(loaded, context.registries, context.data, timed)}
        if not rows
        else {}
    )

    def measure(number: PublishedNumber) -> float | None:
        if number.selection == "cost" and number.tier == ALL:
            return sum(share * float(costs[tier][number.metric]) for tier, share in row_shares(loaded).items())
        if number.selection == "cost":
            return costs[number.tier or next(iter(costs))].get(number.metric)
        return measure_number(number, rows, row_shares(loaded))

    return [
        {"what": number.label, "published": printed, "measured": measure(number)} for number, printed in row.numbers
    ]


def full_size_entries(row: PublishedRow, folders: Sequence[Path], context: ReproduceContext) -> list[dict[str, Any]]:
    """The numbers of a row at full size, over its seeds, for the ledger: one entry for each published number.

    A run that is not finished counts as far as it got; `rounds` is then less than `of`. Without a run there are none.
    """
    if not folders:
        return []
    loaded = load(row.recipe, context.registries, row.changes)
    shares, planned = row_shares(loaded), loaded.recipe.rounds
    runs = [(list(read_rows(folder)), _full_size_run(folder)) for folder in folders]
    deviation = read_manifest(folders[0]).get("data_deviation", "")
    about = {"row": row.name, "paper": row.source, "of": planned, **({"deviation": deviation} if deviation else {})}
    entries = []
    for number, printed in row.numbers:
        if number.selection != "cost":
            last = number.model_copy(update={"selection": "last"})
            by_seed = [
                {
                    "measured": measure_number(number, rows, shares),
                    "last": measure_number(last, rows, shares),
                    **run,
                    "rounds": min(planned, max((each.round for each in rows), default=0)),
                }
                for rows, run in runs
            ]
            entries.append(full_size_entry({**about, "what": number.label, "published": printed}, by_seed))
    return entries


def _full_size_run(folder: Path) -> dict[str, Any]:
    """What the ledger keeps of a run. Its time includes that of the run it starts from."""
    manifest = read_manifest(folder)
    seconds = max(wall_seconds(wall_folder(folder)), float(manifest.get("seconds", 0.0)))
    return {
        "seed": manifest["seed"], "seconds": round(seconds, 1), "commit": start_commit(wall_folder(folder)),
        "date": manifest["started"],
    }  # fmt: skip


def seed_folder(home: Path, name: str, seed: int) -> Path:
    """The folder of a row at full size: that of the row itself for seed 0, which recipes have."""
    return home / (f"{name}+seed-{seed}" if seed else name)


def wall_folder(folder: Path) -> Path:
    """Where the wall time of a run is kept: beside it, as a run begins with no folder."""
    return folder.parent / "wall" / folder.name


def finished_seeds(home: Path, name: str) -> list[Path]:
    """The folders of a row's finished runs, by seed; if there is none, that of the first seed as far as it got."""
    others = {int(folder.name.rpartition("-")[2]): folder for folder in home.glob(f"{name}+seed-*")}
    folders = [home / name, *(folder for _, folder in sorted(others.items()))]
    begun = [folder for folder in folders if (folder / MANIFEST).is_file()]
    finished = [folder for folder in begun if read_manifest(folder)["status"] == "finished"]
    return finished or [folder for folder in begun[:1] if list(read_rows(folder))]


def start_comparison(
    claim: Claim,
    recipes: Path,
    home: Path,
    seeds: int,
    sets: Sequence[str],
    context: ReproduceContext,
    recorded: Mapping[str, Any] | None = None,
) -> Comparison:
    """Start the comparison that decides a claim, or resume it.

    `recorded`: what the ledger has of an earlier one, whose kernels are used again, so that its sha256 can be compared;
    a comparison that has begun keeps the kernels it began with.
    """
    folder = row_folder(home, Path(claim.recipe).stem, sets)
    manifest = read_manifest(folder) if is_comparison(folder) else None
    kernels = recorded_kernels(recorded) if recorded is not None else None
    if manifest is not None:
        kernels = next(iter(manifest["arms"].values())).get("engine", {}).get("kernels")
    pinned = [f'engine.kernels="{kernels}"'] if kernels else []
    loaded = load(recipes / claim.recipe, context.registries, [*pinned, *sets])
    planned = plan_comparison(loaded, context.registries, seeds, (), folder, context.data, context.workers)
    if manifest is None:
        return planned
    before = {
        "arms": {name: with_added_keys(one) for name, one in manifest["arms"].items()},
        "seeds": manifest["seeds"],
    }
    arms = {name: runs[0].loaded.recipe.document() for name, runs in planned.experiments.items()}
    check_same_recipe(folder, before, {"arms": arms, "seeds": planned.seeds})
    return reopen_comparison(folder, context.registries, context.data, context.workers)


def recorded_kernels(recorded: Mapping[str, Any]) -> str:
    """The kernels that a comparison of the ledger ran with: torch's, unless a run of it says otherwise."""
    runs = (run for seeds in recorded["arms"].values() for run in seeds.values())
    return "lanes" if any("lanes" in run.get("kernels", {}).values() for run in runs) else "torch"


def is_finished(planned: Comparison) -> bool:
    return is_comparison(planned.home) and read_manifest(planned.home)["status"] == "finished"


class RunsFailed(Exception):  # noqa: N818 - named for what is wrong
    """Some runs of a comparison failed, so it decides no claim."""

    def __init__(self, planned: Comparison):
        failed = planned.unfinished_runs()
        self.message = f"{', '.join(failed)} failed"
        super().__init__(self.message)
        self.hint = f"see errors/traceback.txt in {next(folder for _, folder in failed.values())}"


@contextmanager
def record_wall_time(home: Path, commit: str | None) -> Iterator[None]:
    """Add the time spent to that of earlier attempts, and keep the commit of the first one."""
    start, before = time.monotonic(), _read_wall_file(home)
    try:
        yield
    finally:
        spent = before.get("seconds", 0.0) + time.monotonic() - start
        home.mkdir(parents=True, exist_ok=True)
        write_atomic(home / WALL_FILE, json.dumps({"commit": commit, **before, "seconds": spent}).encode())


def _read_wall_file(home: Path) -> dict[str, Any]:
    path = home / WALL_FILE
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


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
    evaluators = [experiments[0].evaluator for experiments in planned.experiments.values()]
    metrics = {name: info for evaluator in evaluators for name, info in evaluator.declared_metrics.items()}
    return Evidence(runs, shares, metrics)


def check_arms(claim: Claim, known: Sequence[str]) -> None:
    missing = sorted(claim.arms - set(known))
    if missing:
        message = f"{claim.name} needs the arm {missing[0]!r}"
        raise recipe_error(claim.recipe, "ARM_NAME", message, f"known arms: {', '.join(known)}")


def ledger_entry(claim: Claim, planned: Comparison, evidence: Evidence, command: str) -> dict[str, Any]:
    """Evaluate a claim and describe the result for the ledger."""
    try:
        terms = terms_with_targets(claim, evidence)
        result = evaluate_claim(claim.this, claim.other, terms, evidence)
    except NotMeasuredError as error:
        raise recipe_error(claim.recipe, "NOT_MEASURED", f"{claim.name}: {error}") from error
    names = (side_name(claim, 0), side_name(claim, 1))
    deviation = planned_deviation(planned)
    text = measured_text(result, claim.measure, names) + (f" ({deviation})" if deviation else "")
    flat = {} if claim.measure == "seconds" else {"flatness": flatness((claim.this, claim.other), terms, evidence)}
    measured = {"text": text, **claim_record(result), **flat}
    return {
        "claim": claim.name, "paper": claim.paper, "statement": claim.statement, "published": claim.published,
        "measured": {**measured, **({"targets": dict(terms.targets)} if terms.targets else {})},
        "seeds": planned.seeds,
        "verdict": result.verdict, "command": command, "wall_seconds": round(wall_seconds(planned.home), 1),
        "commit": start_commit(planned.home), "date": utc_now(), "recipe": claim.recipe,
    }  # fmt: skip


def planned_deviation(planned: Comparison) -> str:
    """How the data differs from the published data set; "" if it does not."""
    return next(iter(planned.experiments.values()))[0].dataset.deviation


def terms_with_targets(claim: Claim, evidence: Evidence) -> ClaimTerms:
    """The claim's terms, with targets if it is about the cost to reach them."""
    if claim.baseline is None:
        return claim.terms
    tiers = dict.fromkeys((claim.this.tier, claim.other.tier))
    targets = [
        baseline_target(replace(claim.baseline, tier=tier), claim.terms, claim.margin, evidence) for tier in tiers
    ]
    return replace(claim.terms, targets={tier: target for by_tier in targets for tier, target in by_tier.items()})


def side_name(claim: Claim, number: int) -> str:
    side, with_tier = (claim.this, claim.other)[number], claim.this.tier != claim.other.tier
    name = f"{side.arm} over {' and '.join(side.others)}" if side.others else side.arm
    return f"{name} ({'all devices' if side.tier == ALL else side.tier})" if with_tier else name


def collect_manifests(planned: Comparison) -> dict[str, Any]:
    """What the numbers depend on: fingerprints by arm and seed, versions and the machine."""
    by_arm = {arm: [read_manifest(folder) for folder in planned.folders(arm)] for arm in planned.experiments}
    first = next(iter(by_arm.values()))[0]
    runs = {
        arm: {str(one["seed"]): {key: one[key] for key in FINGERPRINT_KEYS if key in one} for one in manifests}
        for arm, manifests in by_arm.items()
    }
    shared = {key: first[key] for key in (*VERSION_KEYS, "data") if key in first}
    return {**shared, "processors": os.cpu_count(), "workers": planned.lockstep.pool.workers, "arms": runs}


def current_commit(folder: Path, generated: Sequence[Path] = ()) -> str | None:
    """The commit of a folder, with "+changes" if files other than `generated` ones have changed; None if unknown."""
    commit, top, changed = (_git(folder, *arguments) for arguments in GIT_QUERIES)
    if commit is None or top is None or changed is None:
        return None
    ignored = {path.resolve() for path in generated}
    others = [line for line in changed.splitlines() if Path(top, line[3:]).resolve() not in ignored]
    return f"{commit}+changes" if others else commit


GIT_QUERIES = (
    ("rev-parse", "--short=10", "HEAD"), ("rev-parse", "--show-toplevel"), ("status", "--porcelain", "--untracked=no"),
)  # fmt: skip


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(folder), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.rstrip("\n") if result.returncode == 0 else None

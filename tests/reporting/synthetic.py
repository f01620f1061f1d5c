"""Folders of runs and comparisons that never ran: every number is what a test says, so that sentences can be turned."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedloom.runs.correct_examples import CORRECT_FILE, describe_correct

SHARES = {"large": 0.5, "small": 0.5}
SERVING: dict[str, dict[str, tuple[str, bool]]] = {
    "small-for-all": {"large": ("small", True), "small": ("small", True)},
    "drop-the-small": {"large": ("large", True), "small": ("large", False)},
    "all-large": {"large": ("large", True), "small": ("large", False)},
}
DEVICES = ("d0", "d1", "d2", "d3")
DEVICE_TIERS = ("large", "large", "small", "small")


@dataclass(frozen=True)
class Made:
    """What a run is to have measured; the last value of a tier counts."""

    values: Mapping[str, Sequence[float]]  # by tier, one per round
    method: str = "heterofl"
    local: Mapping[str, Sequence[float]] | None = None
    metric: str = "accuracy"
    higher_is_better: bool | None = True
    unit: str = "%"
    produces: str = "global"
    status: str = "finished"
    rounds: int | None = None  # planned; None: as many as there are values
    devices: Mapping[str, float] = field(default_factory=dict)  # the last local value of each
    fine_tuned: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    participation: Sequence[Mapping[str, Any]] | None = None
    events: Sequence[Mapping[str, Any]] = ()
    simulated: float | None = None  # seconds per round
    bytes_each_way: float = 1000.0
    counts: Sequence[Sequence[int]] = ((5, 5), (9, 1), (5, 5), (10, 0))
    cka: Sequence[Mapping[str, Any]] = ()
    subnets: Sequence[Mapping[str, Any]] = ()
    seconds: float = 2.0  # per round
    uploads: str = "weights"
    features: str = ""
    epsilon: float | None = None
    data: str = "data"
    examples: int = 10_000
    tiers: Sequence[str] = ("large", "small")
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # other metrics: final values by tier
    correct: Mapping[str, Sequence[bool]] = field(default_factory=dict)  # by tier, for each test example


def write_run(folder: Path, made: Made, seed: int = 0) -> Path:
    """Write the folder of a run."""
    folder.mkdir(parents=True)
    rounds = len(next(iter(made.values.values())))
    document = {
        "seed": seed, "rounds": made.rounds or rounds, "method": {"name": made.method},
        "data": {"dataset": "digits", "devices": len(DEVICES)},
        "tiers": [{"name": tier, "share": 1 / len(made.tiers)} for tier in made.tiers],
    }  # fmt: skip
    (folder / "recipe.toml").write_text(tomli_w.dumps(document))
    names = [made.metric, *dict.fromkeys(name.partition("[")[0] for name in made.others)]
    metrics = {name: {"higher_is_better": made.higher_is_better, "unit": made.unit, "headline": True} for name in names}
    manifest = {
        "seed": seed, "status": made.status, "started": "2026-01-01T00:00:00+00:00", "test_examples": made.examples,
        "metrics": metrics, "fedloom": "0", "data": made.data, "sha256": "ab",
    }  # fmt: skip
    _write_json(folder / "manifest.json", manifest)
    sizes = {tier: 1000 // (at + 1) for at, tier in enumerate(made.tiers)}
    fleet = {
        "tiers": [
            {"name": tier, "share": 1 / len(made.tiers), "parameters": size, "macs": 10 * size, "trained": True}
            for tier, size in sizes.items()
        ],
        "method": {
            "name": made.method, "produces": made.produces, "uploads": made.uploads, "shares_features": made.features,
        },
        "regions": [["large"], ["large", "small"]], "devices": list(DEVICES), "device_tiers": list(DEVICE_TIERS),
        "holdings": {"classes": ["a", "b"], "counts": [list(line) for line in made.counts]},
    }  # fmt: skip
    _write_json(folder / "fleet.json", fleet)
    rows = [
        _row(number, tier, test, made.metric, value)
        for test, by_tier in (("global", made.values), ("local", made.local or {}))
        for tier, values in by_tier.items()
        for number, value in enumerate(values, 1)
    ]
    tiers = dict(zip(DEVICES, DEVICE_TIERS, strict=True))
    rows += [_row(rounds, tiers[name], "local", made.metric, value, name) for name, value in made.devices.items()]
    for name, pair in made.fine_tuned.items():
        both = zip(("initial", "personalized"), pair, strict=True)
        rows += [_row(rounds, tiers[name], "local", metric, value, name) for metric, value in both]
    rows += [
        _row(rounds, tier, "global", name, value)
        for name, values in made.others.items()
        for tier, value in values.items()
    ]
    for number in range(1, rounds + 1):
        rows += [_row(number, "", "", f"bytes_{way}", made.bytes_each_way, who="") for way in ("down", "up")]
        if made.simulated is not None:
            rows.append(_row(number, "", "", "simulated_seconds", made.simulated, who=""))
        if made.epsilon is not None:
            rows.append(_row(number, "", "", "epsilon", made.epsilon, who=""))
    _write_lines(folder / "rows.jsonl", rows)
    everyone = [reply(number, tier) for number in range(1, rounds + 1) for tier in ("large", "small")]
    _write_lines(folder / "participation.jsonl", everyone if made.participation is None else made.participation)
    _write_lines(folder / "events.jsonl", made.events)
    _write_lines(folder / "subnets.jsonl", made.subnets)
    timing = {"seconds": made.seconds, "evaluation_seconds": made.seconds / 4, "saving_seconds": 0.0}
    lines = [{"round": number, **timing, "peak_memory": 1e8} for number in range(1, rounds + 1)]
    _write_lines(folder / "timings.jsonl", lines)
    if made.correct:
        flags = {("server", tier): torch.tensor(one) for tier, one in made.correct.items()}
        _write_json(folder / CORRECT_FILE, describe_correct(rounds, flags))
    if made.cka:
        _write_json(folder / "cka.json", made.cka)
    return folder


def reply(
    number: int, tier: str, outcome: str = "admitted", devices: Sequence[str] | None = None, norm: float = 1.0
) -> dict[str, Any]:
    """A line of participation."""
    named = [name for name, of in zip(DEVICES, DEVICE_TIERS, strict=True) if of == tier]
    sent = {"weights": 100} if outcome == "admitted" else {}
    line = {"round": number, "tier": tier, "outcome": outcome, "devices": list(devices or named), "bytes_down": 100}
    return {**line, "bytes_up": sent, "norms": [norm / 2, norm, norm * 2]}


def write_comparison(
    home: Path, arms: Mapping[str, Sequence[Made]], controls: Sequence[str] = (), **terms: Any
) -> Path:
    """Write the folder of a comparison; each arm has a run per seed."""
    described = {}
    for name, runs in arms.items():
        folders = [write_run(home / name / f"seed-{seed}", made, seed) for seed, made in enumerate(runs)]
        served = SERVING.get(name, {tier: (tier, True) for tier in SHARES})
        described[name] = {
            "runs": [str(folder.relative_to(home)) for folder in folders], "candidate": "", "shares": {},
            "serving": {tier: {"tier": of, "can_run": can_run} for tier, (of, can_run) in served.items()},
        }  # fmt: skip
    names = [name for name in arms if name in (*SERVING, "standalone")]
    basis = {
        "tiers": list(SHARES), "shares": SHARES, "test": "global", "controls": controls or names, "baseline": None,
        "examples": 10_000, "margin": 1.0, "metric": "", "headlines": {},
    }  # fmt: skip
    description = {"format": "fedloom comparison 1", "arms": described, "terms": {**basis, **terms}}
    _write_json(home / "comparison.json", {**description, "equal": "rounds", "command": "fedloom compare my.toml"})
    started = {"kind": "comparison", "status": "finished", "started": "2026-01-01T00:00:00+00:00", "arms": {}}
    _write_json(home / "manifest.json", started)
    return home


def searched(
    arm: str, trials: Sequence[Mapping[int, float | None]], settings: Sequence[Mapping[str, Any]] = (), rounds: int = 9,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The record of a search. `trials` has each one's score by rounds; the best after all rounds is the choice."""
    known = [dict(one) for one in settings] or [{"training.optimizer.lr": 0.1 * 2**at} for at in range(len(trials))]
    higher = changes.get("higher_is_better", True)
    ended = {at: scores[rounds] for at, scores in enumerate(trials) if scores.get(rounds) is not None}
    best = (max if higher else min)(ended, key=lambda at: float(ended[at] or 0.0), default=None)
    choice = None if best is None else {"trial": best, "settings": known[best], "score": ended[best]}
    tried = [
        {"number": at, "settings": own, "scores": {str(after): {"0": score} for after, score in scores.items()},
         "bytes": {"0": 1000.0}}
        for at, (own, scores) in enumerate(zip(known, trials, strict=True))
    ]  # fmt: skip
    return {
        "format": "fedloom search 1", "arm": arm, "metric": "accuracy", "unit": " %", "higher_is_better": True,
        "validation_examples": 100, "seeds": [0], "rounds": rounds, "trials": len(trials), "equal": "rounds",
        "space": dict.fromkeys(known[0], "0.01..1.0:log"), "bytes": 1000.0 * len(trials), "choice": choice,
        "tried": tried, **changes,
    }  # fmt: skip


def write_search(home: Path, searches: Sequence[Mapping[str, Any]], status: str = "finished") -> Path:
    """Write the folder of a search."""
    recipe = {"data": {"dataset": "digits", "devices": len(DEVICES)}}
    for search in searches:
        (home / search["arm"]).mkdir(parents=True)
        _write_json(home / search["arm"] / "search.json", search)
    arms = {search["arm"]: recipe for search in searches}
    started = {"kind": "search", "status": status, "started": "2026-01-01T00:00:00+00:00", "arms": arms}
    home.mkdir(parents=True, exist_ok=True)
    _write_json(home / "manifest.json", started)
    return home


def finals(large: float, small: float, **changes: Any) -> Made:
    """A run that ends at these values after two rounds."""
    return Made({"large": [large / 2, large], "small": [small / 2, small]}, **changes)


def _row(
    number: int, tier: str, test: str, metric: str, value: float, device: str = "", who: str = "server"
) -> dict[str, Any]:
    return {
        "round": number, "candidate": who, "tier": tier, "device": device, "test": test, "metric": metric,
        "value": value,
    }  # fmt: skip


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

"""python -m tests.fleet_chaos: runs of a real fleet on loopback, in each of which one process is killed.

If no device was lost, the run must end with the weights of an undisturbed run; otherwise the missing reply must be
reported.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedloom.recipe.load import dumps, load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.recorder import record_rounds
from tests.real_fleet import Killer, read_lines, real_fleet

TIERS = ("large", "medium", "small")


def recipe(rounds: int, devices: int) -> dict[str, object]:
    widths = (1.0, 0.5, 0.25)
    return {
        "rounds": rounds,
        "data": {"dataset": "digits", "devices": devices, "max_examples": 40},
        "model": {"family": "mlp", "hidden": [16]},
        "tiers": [
            {"name": n, "share": s, "width": w} for n, s, w in zip(TIERS, (0.34, 0.33, 0.33), widths, strict=True)
        ],
        "training": {"batch_size": 10, "optimizer": {"kind": "sgd", "lr": 0.1}},
        "method": {"name": "heterofl"},
        "evaluation": {"tests": ["global"], "every": rounds},
        "faults": {"deadline": 240.0},
    }


def run_undisturbed(document: dict[str, object], tiers: list[str], folder: Path) -> str:
    """The sha256 of the same run in process."""
    settings = {**document, "fleet": {"device_tiers": tiers}}
    del settings["faults"]
    for _ in record_rounds(assemble(load(settings, Registries()), Registries(), folder), folder / "here"):
        pass
    return str(json.loads((folder / "here" / "manifest.json").read_text())["sha256"])


def run_with_kills(targets: Sequence[str], seed: int, devices: int = 3, rounds: int = 4) -> str:
    """Kill these one after the other, each in a later round; return a summary."""
    draw = random.Random(seed)
    document = recipe(rounds, devices)
    tiers = [TIERS[number * len(TIERS) // devices] for number in range(devices)]
    with tempfile.TemporaryDirectory() as scratch:
        home, out = Path(scratch), Path(scratch) / "run"
        (home / "recipe.toml").write_text(dumps(document), encoding="utf-8")
        with real_fleet(home, [f"d{number}:{tier}" for number, tier in enumerate(tiers)]) as fleet:
            killer = Killer(fleet, out, list(targets), draw)
            fleet.serve(home / "recipe.toml", out)
            fleet.join()
            began = time.monotonic()
            fleet.await_end(1200, killer)
            took = time.monotonic() - began
        digest = json.loads((out / "manifest.json").read_text())["sha256"]
        same = digest == run_undisturbed(document, tiers, home)
        events = [
            f"{event['code']} {event['device']} round {event['round']}" for event in read_lines(out / "events.jsonl")
        ]
        degraded = [row["round"] for row in read_lines(out / "rows.jsonl") if row["metric"] == "degraded"]
        assert not killer.targets, f"{killer.targets} not killed"
        assert same or ("node" in targets and events), (killer.killed, events)
        result = "the same weights" if same else f"without {events}"
        killed, rounds_hurt = ", ".join(killer.killed), sorted(set(degraded))
        return f"{killed}: finished in {took:.0f} s, {result}, degraded rounds {rounds_hurt}, events {events}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=3)
    options = parser.parse_args()
    for number in range(options.runs):
        target = ("link", "node", "app", "server")[number % 4]
        print(run_with_kills([target], options.seed + number, options.devices), flush=True)

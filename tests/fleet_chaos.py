"""python -m tests.fleet_chaos: a real fleet on loopback, in each run of which one process is killed at some moment.

Where no device was lost, a run must end with the weights of one that nobody disturbed; where one was, a round in which
its reply is missing must be told of.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedloom.recipe.load import load
from fedloom.recipe.registry import Registry
from fedloom.recipe.toml import dumps
from fedloom.runs.build import assemble
from fedloom.runs.recorder import recorded
from tests.real_fleet import Killer, lines, real_fleet

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
        "training": {"batch_size": 10, "optimizer": {"kind": "sgd", "learning_rate": 0.1}},
        "method": {"name": "heterofl"},
        "evaluation": {"tests": ["global"], "every": rounds},
        "faults": {"deadline": 240.0},
    }


def undisturbed(document: dict[str, object], given: list[str], folder: Path) -> str:
    """The weights of the same run in process."""
    said = {**document, "fleet": {"device_tiers": given}}
    del said["faults"]
    for _ in recorded(assemble(load(said, Registry()), Registry(), folder), folder / "here"):
        pass
    return str(json.loads((folder / "here" / "manifest.json").read_text())["sha256"])


def one_run(targets: Sequence[str], seed: int, devices: int = 3, rounds: int = 4) -> str:
    """Kill these, one after the other, each in a later round; what came of it."""
    draw = random.Random(seed)
    document = recipe(rounds, devices)
    given = [TIERS[number * len(TIERS) // devices] for number in range(devices)]
    with tempfile.TemporaryDirectory() as scratch:
        home, out = Path(scratch), Path(scratch) / "run"
        (home / "recipe.toml").write_text(dumps(document), encoding="utf-8")
        with real_fleet(home, [f"d{number}:{tier}" for number, tier in enumerate(given)]) as fleet:
            killer = Killer(fleet, out, list(targets), draw)
            fleet.serve(home / "recipe.toml", out)
            fleet.join()
            began = time.monotonic()
            fleet.await_end(1200, killer)
            took = time.monotonic() - began
        found = json.loads((out / "manifest.json").read_text())["sha256"]
        same = found == undisturbed(document, given, home)
        events = [f"{one['code']} {one['device']} round {one['round']}" for one in lines(out / "events.jsonl")]
        degraded = [one["round"] for one in lines(out / "rows.jsonl") if one["metric"] == "degraded"]
        assert not killer.targets, f"{killer.targets} not killed"
        assert same or ("node" in targets and events), (killer.done, events)
        said = "the same weights" if same else f"without {events}"
        killed, rounds_hurt = ", ".join(killer.done), sorted(set(degraded))
        return f"{killed}: finished in {took:.0f} s, {said}, degraded rounds {rounds_hurt}, events {events}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=3)
    asked = parser.parse_args()
    for number in range(asked.runs):
        target = ("link", "node", "app", "server")[number % 4]
        print(one_run([target], asked.seed + number, asked.devices), flush=True)

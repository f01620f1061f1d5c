"""python -m benchmarks full_size: one round of recipes as papers have them, and what it takes in time and memory."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.apart import ROOT
from benchmarks.memory import of_session
from benchmarks.output import progress, say, table
from fedloom.studies.reproduce import current_commit

PAPERS = ROOT / "recipes" / "papers"
ONE_OF_EACH: dict[str, list[str]] = {
    "heterofl_mnist": [],
    "heterofl_cifar10": [],
    "heterofl_wikitext2": [],
    "fedhen_cifar10": [],
    "fedsup_table7": [],
    "efedsup_table8": [],
    # the fewest epochs of its arms: a round of twenty takes hours, the last one, with everybody, days; and
    # two rounds, since there is nothing to align with in the first
    "fedhenn_epochs": ["rounds=2", "training.epochs=1", "method.last_round=false"],
    "fedin_cifar10": [],
}  # and what is set for it
EVERY = 0.5  # seconds between two looks at the memory


def measured(name: str, home: Path, workers: int, sets: list[str]) -> dict[str, Any]:
    """One round and its evaluation; memory is that of all processes together, shared pages counted once."""
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    changes = [word for one in ["rounds=1", *sets] for word in ("--set", one)]
    said = ["run", str(PAPERS / f"{name}.toml"), *changes, "--out", str(folder), "--no-report", "--quiet"]
    began, most = time.monotonic(), 0.0
    log = home / f"{name}.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "fedloom", *said, "--workers", str(workers)]
        process = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                most = max(most, of_session(process.pid))
                time.sleep(EVERY)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    spent = round(time.monotonic() - began, 1)
    found = {"recipe": " ".join([name, *sets]), "commit": current_commit(ROOT), "seconds": spent, "megabytes": round(most)}
    if process.returncode:
        return {**found, "failed": (log.read_text().strip().splitlines() or ["?"])[-1]}
    return {**found, **_inside(folder)}


def _inside(folder: Path) -> dict[str, Any]:
    """What the run says of itself, of the last of its rounds: a last exchange with everybody, which some methods have,
    is another. Judging is of all."""
    number = tomllib.loads((folder / "recipe.toml").read_text())["rounds"]
    timings = {one["round"]: one for one in map(json.loads, (folder / "timings.jsonl").read_text().splitlines())}
    judging = sum(one["evaluation_seconds"] for one in timings.values())
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    moved = sum(row["value"] for row in rows if row["metric"] in ("bytes_down", "bytes_up") and row["round"] == number)
    training = timings[number]["seconds"] - timings[number]["evaluation_seconds"]
    return {"training": round(training, 1), "judging": round(judging, 1), "moved": moved}


def text(found: list[dict[str, Any]]) -> str:
    def cells(one: dict[str, Any]) -> list[str]:
        if "failed" in one:
            return [one["recipe"], f"{one['seconds']:.0f}", one["failed"], "", "", ""]
        spent = (f"{one[key]:.0f}" for key in ("seconds", "training", "judging", "megabytes"))
        return [one["recipe"], *spent, f"{one['moved'] / 1e6:,.1f}"]

    return table(["recipe", "seconds", "a round", "judging", "MB", "MB moved"], [cells(one) for one in found])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks full_size", description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes of recipes/papers; else one of each")
    parser.add_argument("--home", type=Path, default=Path("runs/full_size"), help="what is there is not run again")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="as of fedloom run")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    said = parser.parse_args(arguments)
    said.home.mkdir(parents=True, exist_ok=True)
    kept = said.home / "found.json"
    known: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    found = []
    wanted = {name: [] for name in said.names} or ONE_OF_EACH
    for name, usual in wanted.items():
        sets = [*usual, *said.sets]
        key = " ".join([name, f"workers={said.workers}", *sets])  # a trial is not the recipe itself
        one = known.get(key)
        if one is None:
            progress(name)
            one = measured(name, said.home, said.workers, sets)
            if "failed" not in one:
                known[key] = one
                kept.write_text(json.dumps(known, indent=2) + "\n")
        found.append(one)
    say(text(found), {"recipes": found}, said.format)

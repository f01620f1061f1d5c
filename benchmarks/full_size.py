"""python -m benchmarks full_size: time and memory of one round of papers' recipes."""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from benchmarks.isolated import ROOT, environment
from benchmarks.memory import session_memory
from benchmarks.output import format_table, progress, write_output
from fedloom.files import read_json_lines
from fedloom.studies.reproduce import current_commit

PAPERS = Path("recipes", "papers")
DEFAULT_RECIPES: dict[str, list[str]] = {
    "heterofl_mnist": [],
    "heterofl_cifar10": [],
    "heterofl_wikitext2": [],
    "fedhen_cifar10": [],
    "fedsup_table7": [],
    "efedsup_table8": [],
    # the fewest epochs of its arms, since a round of twenty takes hours; no last round, which takes days with all
    # devices; two rounds, since the first has nothing to align with
    "fedhenn_epochs": ["rounds=2", "training.epochs=1", "method.last_round=false"],
    "fedin_cifar10": [],
}  # recipe -> changes
POLL_INTERVAL = 0.5  # seconds between two readings of the memory


def measure(name: str, home: Path, workers: int, sets: list[str], tree: Path = ROOT) -> dict[str, Any]:
    """Run one round and its evaluation by the recipe and the code of a source tree.

    Memory is that of all processes, shared pages counted once; CPU seconds are those of all processes.
    """
    folder = home / name
    shutil.rmtree(folder, ignore_errors=True)
    changes = [word for change in ["rounds=1", *sets] for word in ("--set", change)]
    recipe = tree / PAPERS / f"{name}.toml"
    arguments = ["run", str(recipe), *changes, "--out", str(folder), "--no-report", "--quiet"]
    start, peak, before = time.monotonic(), 0.0, _cpu_of_children()
    log = home / f"{name}.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "fedloom", *arguments, "--workers", str(workers)]
        process = subprocess.Popen(
            command, env=environment(tree), start_new_session=True, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                peak = max(peak, session_memory(process.pid))
                time.sleep(POLL_INTERVAL)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    spent = round(time.monotonic() - start, 1)
    facts = {
        "recipe": " ".join([name, *sets]),
        "commit": current_commit(tree),
        "seconds": spent,
        "cpu_seconds": round(_cpu_of_children() - before, 1),
        "megabytes": round(peak),
    }
    if process.returncode:
        return {**facts, "failed": (log.read_text().strip().splitlines() or ["?"])[-1]}
    return {**facts, **_read_run(folder)}


def _cpu_of_children() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_run(folder: Path) -> dict[str, Any]:
    """Training time and bytes of the last ordinary round (a method may have an exchange after it); evaluation time of
    all rounds."""
    number = tomllib.loads((folder / "recipe.toml").read_text())["rounds"]
    timings = {timing["round"]: timing for timing in read_json_lines(folder / "timings.jsonl", strict=True)}
    evaluation = sum(timing["evaluation_seconds"] for timing in timings.values())
    rows = list(read_json_lines(folder / "rows.jsonl", strict=True))
    moved = sum(row["value"] for row in rows if row["metric"] in ("bytes_down", "bytes_up") and row["round"] == number)
    training = timings[number]["seconds"] - timings[number]["evaluation_seconds"]
    return {"training": round(training, 1), "evaluation": round(evaluation, 1), "moved": moved}


def format_rows(results: list[dict[str, Any]]) -> str:
    def cells(result: dict[str, Any]) -> list[str]:
        if "failed" in result:
            return [result["recipe"], f"{result['seconds']:.0f}", result["failed"], "", "", ""]
        spent = (f"{result[key]:.0f}" for key in ("seconds", "training", "evaluation", "megabytes"))
        return [result["recipe"], *spent, f"{result['moved'] / 1e6:,.1f}"]

    return format_table(
        ["recipe", "seconds", "training", "evaluation", "MB", "MB moved"], [cells(result) for result in results]
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks full_size", description=__doc__)
    parser.add_argument("names", nargs="*", help="recipes of recipes/papers; default: one per paper")
    parser.add_argument(
        "--home", type=Path, default=Path("runs/full_size"), help="results that exist are not measured again"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="as for fedloom run")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    options.home.mkdir(parents=True, exist_ok=True)
    file = options.home / "found.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    results = []
    recipes = {name: [] for name in options.names} or DEFAULT_RECIPES
    for name, changes in recipes.items():
        sets = [*changes, *options.sets]
        key = " ".join([name, f"workers={options.workers}", *sets])  # changes make another entry
        result = known.get(key)
        if result is None:
            progress(name)
            result = measure(name, options.home, options.workers, sets)
            if "failed" not in result:
                known[key] = result
                file.write_text(json.dumps(known, indent=2) + "\n")
        results.append(result)
    write_output(format_rows(results), {"recipes": results}, options.format)

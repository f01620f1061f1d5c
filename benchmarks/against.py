"""python -m benchmarks against TREE: a round of papers' recipes by this code and by that of another source tree.

Such a tree is a checkout of an earlier commit: `git worktree add ../before COMMIT`. Each side reads its own recipe
file, since an older tree refuses keys that it does not know; where the two differ, the output says so. They take turns,
since the speed of a shared machine drifts; a ratio is the median over neighboring runs. The first repeat may compile
kernels.
"""

import argparse
import difflib
import os
import statistics
from pathlib import Path
from typing import Any

from benchmarks import full_size
from benchmarks.isolated import ROOT
from benchmarks.output import format_table, progress, write_output

DEFAULT_RECIPES = ("heterofl_mnist", "fedsup_table7")
KEYS = ("seconds", "cpu_seconds", "training", "evaluation")
HEADERS = ("+++", "---", "@@")


def compare(name: str, tree: Path, home: Path, workers: int, sets: list[str], repeats: int) -> dict[str, Any]:
    """Seconds of both sides, and how ours relate to theirs."""
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for repeat in range(repeats):
        for side, source in (("ours", ROOT), ("theirs", tree)):
            progress(f"{name}, repeat {repeat + 1} of {repeats}: {side}")
            (home / side).mkdir(parents=True, exist_ok=True)
            found = full_size.measure(name, home / side, workers, sets, source)
            if "failed" in found:
                return {"recipe": found["recipe"], "failed": f"{side}: {found['failed']}"}
            sides[side].append(found)
    return {
        "recipe": sides["ours"][0]["recipe"],
        "changed_lines": changed_lines(name, tree),
        **{key: _summarize(sides, key) for key in KEYS},
        "runs": sides,
    }


def changed_lines(name: str, tree: Path) -> list[str]:
    """What differs between our recipe (+) and theirs (-)."""
    theirs, ours = ((side / full_size.PAPERS / f"{name}.toml").read_text().splitlines() for side in (tree, ROOT))
    return [line for line in difflib.unified_diff(theirs, ours, n=0, lineterm="") if not line.startswith(HEADERS)]


def _summarize(sides: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    ours, theirs = ([run[key] for run in sides[side]] for side in ("ours", "theirs"))
    ratios = [a / b if b else float("nan") for a, b in zip(ours, theirs, strict=True)]
    medians = {"ours": statistics.median(ours), "theirs": statistics.median(theirs), "ratio": statistics.median(ratios)}
    return {**{name: round(number, 3) for name, number in medians.items()}, "low": min(ratios), "high": max(ratios)}


def format_rows(results: list[dict[str, Any]]) -> str:
    head = ["recipe", "", "ours", "theirs", "ratio", "low", "high"]
    rows = []
    for result in results:
        if "failed" in result:
            rows.append([result["recipe"], result["failed"], *[""] * 5])
            continue
        for key in KEYS:
            one = result[key]
            numbers = [f"{one[side]:.1f}" for side in ("ours", "theirs")]
            rows.append([result["recipe"], key, *numbers, *(f"{one[part]:.3f}" for part in ("ratio", "low", "high"))])
    notes = [
        f"{result['recipe']}: the recipes differ: {'; '.join(result['changed_lines'])}"
        for result in results
        if result.get("changed_lines")
    ]
    return "\n".join([format_table(head, rows, left=2), *notes])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks against", description=__doc__)
    parser.add_argument("tree", type=Path, help="the other source tree")
    parser.add_argument("names", nargs="*", default=DEFAULT_RECIPES, help="recipes of recipes/papers")
    parser.add_argument("--home", type=Path, default=Path("runs/against"), help="where runs are written")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", dest="sets", action="append", default=[], help="as for fedloom run")
    parser.add_argument("--format", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    if not (options.tree / "src" / "fedloom").is_dir():
        parser.error(f"{options.tree} is no source tree: it has no src/fedloom")
    results = [
        compare(name, options.tree.resolve(), options.home, options.workers, options.sets, options.repeats)
        for name in options.names
    ]
    write_output(format_rows(results), {"against": str(options.tree), "recipes": results}, options.format)

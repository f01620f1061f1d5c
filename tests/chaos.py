"""Kill runs at random moments, resume them and compare the results: python -m tests.chaos --kills 200.

A run is a forked process, killed with SIGKILL after a random time; the next one resumes from what is on disk.
With a checkpoint after every round of a few milliseconds, most kills fall into the writing of one.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.folder import read_manifest
from fedloom.runs.recorder import record_rounds
from fedloom.runs.resume import reopen_run
from fedloom.tensors import fingerprint

TIERS = [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "width": 0.5}]
FAMILIES: dict[str, dict[str, Any]] = {
    "heterofl": {"method": {"name": "heterofl"}, "model": {"hidden": [2, 4]}},
    "top_k": {
        "method": {"name": "heterofl"}, "model": {"hidden": [2, 4]},
        "compression": {"uplink": {"kind": "top_k", "share": 0.1}, "downlink": {"kind": "int8"}},
    },
    "fedhen": {
        "method": {"name": "fedhen"},
        "model": {"family": "preactresnet", "hidden": [2, 3], "blocks": [1, 1], "exit_after": 1},
        "tiers": [{"name": "complex", "share": 0.5}, {"name": "simple", "share": 0.5, "stages": 1}],
    },
    "fedsup": {"method": {"name": "fedsup", "space": {"hidden": [[1, 2], [2, 4]]}}, "model": {"hidden": [2, 4]}},
    "fedhenn": {
        "method": {"name": "fedhenn", "strength": 0.5, "probe_size": 6, "kernels_on": "devices"},
        "tiers": [
            {"name": "net", "share": 0.5, "family": "mlp", "hidden": [6, 5]},
            {"name": "other", "share": 0.5, "family": "mlp", "hidden": [4]},
        ],
    },
    "fedin": {
        "method": {"name": "fedin", "pairs": 4, "batch": 6},
        "model": {"family": "splitnet", "channels": 4, "conv_bias": False},
        "tiers": [
            {"name": "large", "share": 0.5, "extra": [1, 0]}, {"name": "small", "share": 0.5, "extra": [0, 0]},
        ],
    },
}  # fmt: skip


def recipe(family: str, rounds: int) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "data": {
            "dataset": "digits", "devices": 6, "max_examples": 12, "test_examples": 30, "public": {"examples": 20},
        },
        "fleet": {"participation": 0.5},
        "tiers": TIERS,
        "training": {"batch_size": 6},
        "evaluation": {"every": 3},
        "checkpoints": {"every": 1},
        **FAMILIES[family],
    }  # fmt: skip


def begin(document: dict[str, Any], folder: Path, workers: int) -> None:
    for _ in record_rounds(assemble(load(document, Registries()), Registries(), folder, workers=workers), folder):
        pass


def resume(document: dict[str, Any], folder: Path, workers: int) -> None:
    if not folder.exists():  # killed before there was anything
        begin(document, folder, workers)
        return
    if read_manifest(folder)["status"] == "finished":  # killed after all was done
        return
    experiment, since = reopen_run(folder, Registries(), folder, workers)
    for _ in record_rounds(experiment, folder, since):
        pass


def forked(work: Callable[[], None], killed_after: float | None = None) -> bool:
    """Whether the work was done: in a process of its own, which is killed if it takes longer."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # workers are killed with it
            work()
            code = 0
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    deadline = time.monotonic() + (killed_after if killed_after is not None else 300)
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            if os.waitstatus_to_exitcode(status):
                raise AssertionError("the run failed by itself")
            return True
        time.sleep(0.0005)
    for group in (os.killpg, os.kill):
        try:
            group(child, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            continue
    os.waitpid(child, 0)
    if killed_after is None:
        raise AssertionError("the run did not end")
    return False


def outcome(folder: Path) -> dict[str, Any]:
    """Everything in a run folder that must not depend on interruptions."""
    manifest = read_manifest(folder)
    models = sorted((folder / "models").glob("*")) if (folder / "models").is_dir() else []
    return {
        "status": manifest["status"],
        "sha256": manifest["sha256"],
        "devices_sha256": manifest["devices_sha256"],
        "rows": (folder / "rows.jsonl").read_bytes(),
        "events": (folder / "events.jsonl").read_bytes(),
        "participation": (folder / "participation.jsonl").read_bytes(),
        **{path.name: fingerprint({"weights": load_file(path)}) for path in models},  # their headers have no order
    }


@dataclass(frozen=True)
class ChaosResult:
    family: str
    kills: int
    same: bool


def run_chaos(family: str, kills: int, seed: int, home: Path, rounds: int = 8, workers: int = 1) -> ChaosResult:
    """Compare an uninterrupted run with runs that are killed `kills` times in all, at random moments."""
    document, draw = recipe(family, rounds), random.Random(f"{family} {seed}")
    began = time.monotonic()
    forked(lambda: begin(document, home / "whole", workers))
    takes = time.monotonic() - began
    done, same, number = 0, True, 0
    while done < kills:
        number += 1
        folder, finished = home / str(number), False
        while done < kills and not finished:
            finished = forked(lambda: resume(document, folder, workers), draw.uniform(0, 0.7 * takes))  # noqa: B023
            done += not finished
        if not finished:
            forked(lambda: resume(document, folder, workers))  # noqa: B023
        same = same and outcome(folder) == outcome(home / "whole")
    return ChaosResult(family, done, same)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    each = -(-arguments.kills // len(FAMILIES))
    results = []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as home:
            results.append(run_chaos(family, each, arguments.seed, Path(home), workers=arguments.workers))
        outcome_is = "the same" if results[-1].same else "NOT THE SAME"
        print(f"{family:10s} {results[-1].kills} kills, {outcome_is}", flush=True)
    if not all(one.same for one in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

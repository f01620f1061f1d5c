"""python -m tests.fleet_at_length: six devices in three tiers, each with a folder of its own data, behind TLS and keys;
HeteroFL, then FedHeNN with models that stay on the devices' disks, five rounds each."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.npz import digits
from fedloom.recipe.toml import dumps
from tests.real_fleet import RealFleet, lines, real_fleet

DEVICES = ["g0:large", "g1:large", "p0:medium", "p1:medium", "s0:small", "s1:small"]


def recipe(method: dict[str, Any], rounds: int, tests: list[str]) -> dict[str, Any]:
    tiers = (("large", 0.34, 1.0), ("medium", 0.33, 0.5), ("small", 0.33, 0.25))
    return {
        "rounds": rounds,
        "data": {
            "dataset": "npz", "file": "mine.npz", "classes": 10, "devices": len(DEVICES), "partition": {"kind": "own"},
            "public": {"examples": 40},
        },
        "model": {"family": "mlp", "hidden": [32]},
        "tiers": [{"name": name, "share": share, "width": width} for name, share, width in tiers],
        "training": {"epochs": 4, "batch_size": 10, "optimizer": {"kind": "sgd", "learning_rate": 0.2}},
        "method": method,
        "evaluation": {"tests": tests, "every": rounds},
        "faults": {"deadline": 300.0, "quorum": 0.5},
    }  # fmt: skip


def data_folders(home: Path) -> list[Path]:
    """One for each device, with other examples in each, and the server's last."""
    whole, folders = digits(), []
    x, y = whole.train.x.numpy(), whole.train.y.numpy()
    for number in range(len(DEVICES) + 1):
        part = slice(number, None, len(DEVICES) + 1)
        folders.append(home / f"data{number}")
        folders[-1].mkdir(parents=True)
        test = whole.test if number == len(DEVICES) else None
        tx = test.x.numpy() if test else x[part][-20:]
        ty = test.y.numpy() if test else y[part][-20:]
        mine = x[part] if test else x[part][:-20]
        np.savez(folders[-1] / "mine.npz", x_train=mine, y_train=y[part][: len(mine)], x_test=tx, y_test=ty)
    return folders


def served(fleet: RealFleet, home: Path, document: dict[str, Any], data: Path) -> str:
    name = document["method"]["name"]
    path, out, began = home / f"{name}.toml", home / name, time.monotonic()
    path.write_text(dumps(document), encoding="utf-8")
    fleet.serve(path, out, "--data-dir", str(data))
    fleet.await_end(1800)
    rows = [one for one in lines(out / "rows.jsonl") if one["round"] == document["rounds"] and not one["device"]]
    judged = {
        f"{one['candidate']} {one['tier']}": round(one["value"], 1) for one in rows if one["metric"] == "accuracy"
    }
    moved = {one["metric"]: one["value"] for one in rows if one["metric"] in ("bytes_down", "bytes_up", "down", "up")}
    disks = sorted(path.parent.name for path in fleet.folder.glob("devices/*/memory/*/*/*.memory"))
    assert json.loads((out / "manifest.json").read_text())["status"] == "finished"
    assert (out / "report.html").exists()
    return (
        f"{name}: {time.monotonic() - began:.0f} s, accuracy {judged}, bytes {moved}, "
        f"refusals {[one['code'] for one in lines(out / 'events.jsonl')]}, memories on disks {len(disks)}"
    )


def at_length(rounds: int = 5) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        *own, servers = data_folders(home)
        with real_fleet(home, DEVICES, own) as fleet:
            fleet.join()
            hetero = recipe({"name": "heterofl"}, rounds, ["global"])
            personal = recipe({"name": "fedhenn"}, rounds, ["local"])
            return [served(fleet, home, one, servers) for one in (hetero, personal)]


if __name__ == "__main__":
    for said in at_length():
        print(said, flush=True)

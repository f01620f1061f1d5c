"""python -m tests.fleet_at_length: six real devices in three tiers, each with its own data, TLS and a key.

HeteroFL, then FedHeNN with personal models on the devices' disks, five rounds each.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.data.npz import digits
from fedloom.recipe.load import dumps
from tests.real_fleet import RealFleet, read_lines, real_fleet

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
        "training": {"epochs": 4, "batch_size": 10, "optimizer": {"kind": "sgd", "lr": 0.2}},
        "method": method,
        "evaluation": {"tests": tests, "every": rounds},
        "faults": {"deadline": 300.0, "quorum": 0.5},
    }  # fmt: skip


def data_folders(home: Path) -> list[Path]:
    """A folder with different examples for each device, and the server's last."""
    data, folders = digits(), []
    x, y = data.train.x.numpy(), data.train.y.numpy()
    for number in range(len(DEVICES) + 1):
        part = slice(number, None, len(DEVICES) + 1)
        folders.append(home / f"data{number}")
        folders[-1].mkdir(parents=True)
        test = data.test if number == len(DEVICES) else None
        tx = test.x.numpy() if test else x[part][-20:]
        ty = test.y.numpy() if test else y[part][-20:]
        mine = x[part] if test else x[part][:-20]
        np.savez(folders[-1] / "mine.npz", x_train=mine, y_train=y[part][: len(mine)], x_test=tx, y_test=ty)
    return folders


def run_fleet(fleet: RealFleet, home: Path, document: dict[str, Any], data: Path) -> str:
    name = document["method"]["name"]
    path, out, began = home / f"{name}.toml", home / name, time.monotonic()
    path.write_text(dumps(document), encoding="utf-8")
    fleet.serve(path, out, "--data-dir", str(data))
    fleet.await_end(1800)
    rows = [row for row in read_lines(out / "rows.jsonl") if row["round"] == document["rounds"] and not row["device"]]
    accuracy = {
        f"{row['candidate']} {row['tier']}": round(row["value"], 1) for row in rows if row["metric"] == "accuracy"
    }
    traffic = {row["metric"]: row["value"] for row in rows if row["metric"] in ("bytes_down", "bytes_up")}
    disks = sorted(path.parent.name for path in fleet.folder.glob("devices/*/state/*/*/*.state"))
    assert json.loads((out / "manifest.json").read_text())["status"] == "finished"
    assert (out / "report.html").exists()
    return (
        f"{name}: {time.monotonic() - began:.0f} s, accuracy {accuracy}, bytes {traffic}, "
        f"refusals {[event['code'] for event in read_lines(out / 'events.jsonl')]}, state files {len(disks)}"
    )


def at_length(rounds: int = 5) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        *device_data, server_data = data_folders(home)
        with real_fleet(home, DEVICES, device_data) as fleet:
            fleet.join()
            hetero = recipe({"name": "heterofl"}, rounds, ["global"])
            personal = recipe({"name": "fedhenn"}, rounds, ["local"])
            return [run_fleet(fleet, home, document, server_data) for document in (hetero, personal)]


if __name__ == "__main__":
    for summary in at_length():
        print(summary, flush=True)

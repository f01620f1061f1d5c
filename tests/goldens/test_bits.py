"""Golden sha256: every method, and every recipe option that draws at random, still gives the bits it gave before.

The hashes leave out the names of rows, metrics and recipe keys, so that a rename does not touch them. Processors round
differently, also with the same torch and instruction set, so bits.json has the hashes of several: a machine is known by
what torch's kernels make of fixed numbers, or by HeteroFL's golden result. On others only sums are compared. Run
`python -m tests.goldens.test_bits` to add a machine, at a commit whose results are known to be right, or when a change
is meant to change results: hashes of other machines are then left out wherever this machine's have changed.
"""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import fedloom
from fedloom.evaluation import Row
from fedloom.fleet import Request
from fedloom.methods import METHODS
from fedloom.tensors import Parcel, fingerprint
from fedloom.testing import TinyWorld
from tests.conftest import build_method

FILE = Path(__file__).with_name("bits.json")
GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
SIZES = (8, 5, 9, 8, 12, 7)
LABELS = [[0, 1], [1, 2], [0, 1, 2, 3], [3], [0, 2], [1, 3]]
TOLERANCE = {"fedin": 0.05}
"""Of sums on other machines: FedIN trains on others' features, and a difference by rounding grows fast."""

BASE: dict[str, Any] = {
    "rounds": 2,
    "data": {"dataset": "digits", "devices": 10, "max_examples": 12, "test_examples": 60},
    "model": {"family": "mlp", "hidden": [8, 6]},
    "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
    "training": {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}},
    "method": {"name": "heterofl"},
    "engine": {"kernels": "torch"},  # those of the golden file, also where others are installed
}

SPEEDS = [
    {"name": "large", "share": 0.5, "width": 1.0, "speed": 1e6, "bandwidth": 1e4},
    {"name": "small", "share": 0.5, "width": 0.5, "speed": 5e5, "bandwidth": 1e4},
]

# one run for every random stream that the methods alone do not use
RECIPES: dict[str, dict[str, Any]] = {
    "label_shards": {"data": {"partition": {"kind": "label_shards", "labels_per_device": 2}}},
    "sorted_shards": {"data": {"partition": {"kind": "sorted_shards", "shards_per_device": 2}}},
    "dirichlet": {"data": {"partition": {"kind": "dirichlet", "alpha": 0.5, "min_examples": 2}}},
    "dirichlet_per_device": {"data": {"partition": {"kind": "dirichlet_per_device", "alpha": 0.5}}},
    "quantity": {"data": {"partition": {"kind": "quantity", "alpha": 0.7, "min_examples": 3}}},
    "subsample": {"data": {"subsample": {"devices": 0.5, "keep": 0.5}, "tier_label_correlation": 0.5}},
    "validation": {"data": {"validation": 50}},
    "redrawn": {"fleet": {"assignment": "redrawn", "participation": 0.7}},
    "poisson": {"fleet": {"sampling": "poisson", "participation": 0.6}},
    "holdout_devices": {"fleet": {"holdout_fraction": 0.34}},
    "dropout": {"faults": {"dropout": 0.4}},
    "corrupt": {"faults": {"corrupt": {"devices": 2, "how": "any"}}},
    "stragglers": {
        "tiers": SPEEDS,
        "faults": {"stragglers": {"kind": "lognormal"}, "deadline": 0.5, "over_selection": 0.3},
        "fleet": {"participation": 0.6},
    },
    "privacy": {
        "method": {"name": "heterofl", "only_seen_rows": False},
        "fleet": {"sampling": "poisson", "participation": 0.9},
        "privacy": {"clip": 1.0, "noise": 0.5},
    },
    "top_k": {"compression": {"uplink": {"kind": "top_k", "share": 0.2}, "downlink": {"kind": "float16"}}},
    "int8": {"compression": {"uplink": {"kind": "int8"}, "downlink": {"kind": "int8"}}},
    "median": {"aggregation": {"rule": "median"}},
    "robust_default": {"aggregation": {"rule": "default"}},
    "server_yogi": {"aggregation": {"server_optimizer": {"kind": "yogi", "lr": 0.05}}},
    "norm_screening": {"admission": {"norm": 1.05, "quarantine": 1}},
    "cosine_adam": {
        "training": {
            "optimizer": {"kind": "adam"},
            "lr_schedule": {"kind": "cosine", "rounds": 2},
            "loss": {"kind": "cross_entropy", "label_smoothing": 0.1},
        }
    },
    "static_batch_norm": {
        "model": {"family": "convnet", "hidden": [4, 6], "normalization": "static_batch"},
        "data": {"preparation": "crop_flip"},
    },
    "fine_tune": {"evaluation": {"fine_tune": {"part": "head", "epochs": 1, "lr": 0.1}}},
    "augmented": {"data": {"preparation": "crop_flip"}},
    "fedhen_report": {
        "model": {"family": "preactresnet", "hidden": [4, 6], "blocks": [1, 1], "exit_after": 1},
        "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "stages": 1}],
        "method": {"name": "fedhen", "report": True},
    },
    "efedsup": {
        "model": {"family": "mobilenet", "stem": 3, "widths": [4, 6], "depths": [1, 2], "kernels": [5, 5]},
        "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "depths": [1, 1]}],
        "method": {"name": "efedsup"},
    },
    "fedhenn_holdout": {
        "data": {"public": {"examples": 20}},
        "method": {"name": "fedhenn", "probe_size": 6},
    },
}


# the model family of each method, where it is not the first that the method accepts
FAMILIES: dict[str, tuple[str | None, ...]] = {
    "fedhen": ("preactresnet",),
    "noside": ("preactresnet",),
    "decouple": ("preactresnet",),
    "everytier": ("columnnet",),
    "heterofl": (None, "transformer"),
    "inclusivefl": ("transformer",),
    "fedhenn": (None, "lstm"),
}
PLAYED = [(name, family) for name in sorted(METHODS) for family in FAMILIES.get(name, (None,))]


def played_name(name: str, family: str | None) -> str:
    """The key in the golden file, which was recorded before the spelling of one method changed."""
    name = {"centralized": "centralised"}.get(name, name)
    return f"{name}-{family}" if family else name


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two recipes: tables are merged; a model, a method or a list is replaced."""
    made = dict(base)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict) and key not in ("model", "method")
        made[key] = {**made[key], **value} if both else value
    return made


def digest_rows(rows: Iterable[Row]) -> str:
    """A digest of the values, not of the names of rows."""
    values = sorted((row.round, row.tier, row.device, float(row.value).hex()) for row in rows)
    return hashlib.sha256(repr(values).encode()).hexdigest()


def sums(parcels: Iterable[Parcel], rows: Iterable[Row]) -> list[float]:
    """For machines that round differently: the norm of all weights and the sum of all figures."""
    squares = (float(t.double().square().sum()) for p in parcels for b in p.values() for t in b.values())
    return [math.sqrt(sum(squares)), sum(row.value for row in rows if math.isfinite(row.value))]


def bits_of_method(name: str, family: str | None) -> dict[str, Any]:
    method = build_method(name)
    world = TinyWorld.for_method(method, family, sizes=SIZES, labels=LABELS)
    engine = world.engine(method)
    server = world.play(method, engine, rounds=3, participation=0.7)
    states = dict(sorted(engine.client_states.committed.items()))
    rows = world.evaluator().rows(
        method.eval_targets(server), world.fleet, lambda task, inboxes: engine.ask(Request(task, inboxes, 3)), 3, True
    )
    assert world.refusals == []
    flat = {f"{device} {bundle}": tensors for device, state in states.items() for bundle, tensors in state.items()}
    bits = {"server": fingerprint(server), "devices": fingerprint(flat), "rows": digest_rows(rows)}
    return {"sums": sums([server, flat], rows), "bits": bits}


def bits_of_recipe(name: str, folder: Path) -> dict[str, Any]:
    run = fedloom.run(merged(BASE, RECIPES[name]), out=folder / name)
    manifest = json.loads((run.folder / "manifest.json").read_text(encoding="utf-8"))
    rows = run.rows()
    bits = {
        "server": manifest["sha256"],
        "devices": manifest["devices_sha256"],
        "partition": manifest["partition"],
        "rows": digest_rows(rows),
    }
    return {"sums": sums([], rows), "bits": bits}


def bits_of_attack(folder: Path) -> dict[str, Any]:
    """Every attack against the default rule: the figures that `fedloom attack` prints."""
    recipe = folder / "attacked.toml"
    recipe.write_text(
        """
        rounds = 1
        data = { dataset = "digits", devices = 10, max_examples = 12, test_examples = 60 }
        model = { family = "mlp", hidden = [8, 6] }
        tiers = [{ name = "large", share = 0.5, width = 1.0 }, { name = "small", share = 0.5, width = 0.5 }]
        method = { name = "heterofl" }
        """,
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "fedloom", "attack", str(recipe), "--seeds", "2", "--format", "json"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
    numbers = sorted(float(one).hex() for one in numbers_in(json.loads(made)["data"]))
    assert len(numbers) > 50
    bits = {"figures": hashlib.sha256(repr(numbers).encode()).hexdigest()}
    return {"sums": [math.fsum(map(float.fromhex, numbers))], "bits": bits}


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def rounding() -> str:
    """What torch's kernels make of fixed numbers."""
    x, y = ((torch.arange(size, dtype=torch.float32) * 0.7).sin() for size in (60 * 3 * 12 * 12, 9 * 3 * 3 * 3))
    images, kernels = x.view(60, 3, 12, 12).requires_grad_(), y.view(9, 3, 3, 3).requires_grad_()
    maps = torch.conv2d(images, kernels, padding=1)
    products = maps.flatten(2) @ maps.flatten(2).mT
    outputs = [maps, products, products.softmax(-1), products.flatten(1) @ products.flatten(1).mT]
    gradients = torch.autograd.grad(products.log_softmax(-1).square().mean(), [images, kernels])
    return fingerprint({"kernels": {str(number): tensor for number, tensor in enumerate([*outputs, *gradients])}})


def machine() -> dict[str, str]:
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "rounding": rounding(),
    }


@cache
def known_machine() -> str | None:
    """The name of this machine in the golden file."""
    mine = machine()
    return next((str(name) for name, golden in GOLDEN["machines"].items() if golden == mine), None)


def check(found: Mapping[str, Any], golden: Mapping[str, Any], tolerance: float = 1e-5) -> None:
    bits = golden["bits"].get(known_machine())
    assert bits is None or found["bits"] == bits
    assert found["sums"] == pytest.approx(golden["sums"], rel=tolerance)


def test_machine_has_golden_bits() -> None:
    """Without them the tests below compare sums, to a relative tolerance."""
    if known_machine() is None:
        pytest.skip("no bits of a machine that rounds like this one: python -m tests.goldens.test_bits adds them")


def test_golden_file_covers_every_method_and_recipe() -> None:
    assert GOLDEN["methods"].keys() == {played_name(*one) for one in PLAYED}
    assert GOLDEN["recipes"].keys() == RECIPES.keys()


@pytest.mark.parametrize(("name", "family"), PLAYED)
def test_method_gives_golden_bits(name: str, family: str | None) -> None:
    check(bits_of_method(name, family), GOLDEN["methods"][played_name(name, family)], TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_gives_golden_bits(name: str, tmp_path: Path) -> None:
    check(bits_of_recipe(name, tmp_path), GOLDEN["recipes"][name])


def test_attacks_give_golden_bits(tmp_path: Path) -> None:
    check(bits_of_attack(tmp_path), GOLDEN["attack"])


def written(found: dict[str, Any], golden: Mapping[str, Any] | None, name: str) -> dict[str, Any]:
    """A result with the hashes of this machine, and those of others unless this machine's have changed."""
    if golden is None or golden["bits"].get(name, found["bits"]) != found["bits"]:
        return {"sums": found["sums"], "bits": {name: found["bits"]}}
    return {"sums": golden["sums"], "bits": {**golden["bits"], name: found["bits"]}}


def write() -> None:
    os.environ.setdefault("FEDLOOM_REPORT", "off")
    name = known_machine() or f"machine {len(GOLDEN['machines']) + 1}"
    with TemporaryDirectory() as folder:
        methods = {played_name(*one): bits_of_method(*one) for one in PLAYED}
        recipes = {recipe: bits_of_recipe(recipe, Path(folder)) for recipe in RECIPES}
        attack = bits_of_attack(Path(folder))
    made = {
        "machines": {**GOLDEN["machines"], name: machine()},
        "methods": {key: written(found, GOLDEN["methods"].get(key), name) for key, found in methods.items()},
        "recipes": {key: written(found, GOLDEN["recipes"].get(key), name) for key, found in recipes.items()},
        "attack": written(attack, GOLDEN["attack"], name),
    }
    FILE.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())

"""A cut data set is named wherever a published value stands beside what was measured on it."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import fedloom
from fedloom.data.idx import FILES
from fedloom.runs.folder import read_manifest

CUT = "not mnist as published: 80 training examples instead of 60,000, 20 test examples instead of 10,000"
RECIPE = """
rounds = 1
data = { dataset = "mnist", devices = 2 }
model = { family = "mlp", hidden = [4] }
tiers = [{ name = "large", share = 0.5, width = 1.0 }, { name = "small", share = 0.5, width = 0.5 }]
method = { name = "heterofl" }
[compare.arms]
unmasked = ["method.mask_unseen_labels=false"]
"""
ROWS = """
paper = "Own"
levels = { large = 1.0 }
[choices]
short = ["rounds=1"]
[[tables]]
name = "own"
source = "Table 1"
recipe = "my.toml"
numbers = [{ tier = "large" }]
rows = { "short" = [90.5] }
"""
CLAIMS = """
seeds = 1
[[claims]]
name = "alike"
paper = "Own"
statement = "With all labels everywhere the mask changes nothing."
published = "90.5 against 90.5"
recipe = "my.toml"
this = { arm = "heterofl", tier = "large" }
other = { arm = "unmasked", tier = "large" }
relation = "at least"
"""


@pytest.fixture
def cut_mnist(tmp_path: Path) -> Path:
    """A folder with a hundred images in MNIST's format."""
    folder, generator = tmp_path / "data", np.random.default_rng(0)
    (folder / "mnist").mkdir(parents=True)
    labels = [np.arange(count) % 10 for count in (80, 20)]
    images = [generator.integers(0, 256, (len(one), 28, 28)) for one in labels]
    for name, array in zip(FILES, (images[0], labels[0], images[1], labels[1]), strict=True):
        (folder / "mnist" / name).write_bytes(_idx(array))
    return folder


def _idx(array: npt.NDArray[Any]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def test_run_on_a_cut_set_is_named_in_manifest_and_report(cut_mnist: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "my.toml"
    recipe.write_text(RECIPE)
    run = fedloom.run(recipe, data_dir=cut_mnist, out=tmp_path / "run", sets=["data.validation=30"])
    assert read_manifest(run.folder)["data_deviation"] == CUT  # the files, not what the recipe leaves of them
    fedloom.report(run.folder)
    assert CUT in (run.folder / "report.html").read_text()


def test_run_on_the_listed_set_says_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "my.toml"
    recipe.write_text(RECIPE.replace('"mnist"', '"digits"'))
    changes = ["data.max_examples=5", "data.test_examples=20"]
    run = fedloom.run(recipe, out=tmp_path / "run", sets=changes)
    assert "data_deviation" not in read_manifest(run.folder)
    fedloom.report(run.folder)
    assert "as published:" not in (run.folder / "report.html").read_text()


def test_reproduce_on_a_cut_set_names_it_beside_published_values(cut_mnist: Path, tmp_path: Path) -> None:
    home, results = tmp_path / "own", tmp_path / "docs" / "results.json"
    (home / "ledger").mkdir(parents=True)
    results.parent.mkdir()
    (results.parent / "results.md").write_text("# Results\n")
    (home / "my.toml").write_text(RECIPE)
    (home / "ledger" / "own.toml").write_text(ROWS)
    (home / "ledger" / "claims.toml").write_text(CLAIMS)
    places: dict[str, Any] = {"recipes": home, "runs": tmp_path / "runs", "results": results, "data_dir": cut_mnist}
    row = fedloom.reproduce("own_short", **places)
    assert row.title == f"Own, Table 1 ({CUT})"
    assert row.to_dict()["deviation"] == CUT
    fedloom.reproduce(claim="alike", **places)
    (entry,) = json.loads(results.read_text())["claims"]
    assert entry["measured"]["text"].endswith(f" ({CUT})")
    assert CUT in (results.parent / "results.md").read_text()

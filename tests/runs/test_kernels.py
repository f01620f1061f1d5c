"""The recipe chooses the kernels, the manifest says which ran, and other ones are compared but for rounding."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedloom
from fedloom.models import lanes
from fedloom.recipe.errors import RecipeError
from fedloom.runs.folder import read_manifest
from fedloom.studies.reproduce import recorded_kernels

RECIPE: dict[str, Any] = {
    "rounds": 2,
    "data": {"dataset": "digits", "devices": 6, "max_examples": 12, "test_examples": 40},
    "model": {"family": "mlp", "hidden": [8]},
    "tiers": [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}],
    "method": {"name": "heterofl"},
}


def run(folder: Path, kernels: str, **options: Any) -> fedloom.Run:
    return fedloom.run({**RECIPE, "engine": {"kernels": kernels}}, out=folder, **options)


def test_small_nets_run_by_torch_unless_asked(tmp_path: Path) -> None:
    made = run(tmp_path / "auto", "auto")
    assert read_manifest(made.folder)["kernels"] == {"large": "torch", "small": "torch"}


def test_lanes_without_numba_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="needs Numba"):
        run(tmp_path / "run", "lanes")


def test_older_run_is_verified_with_torch_kernels(tmp_path: Path) -> None:
    """Its manifest has no kernels, and its recipe no setting for them."""
    made = run(tmp_path / "run", "torch")
    manifest, recipe = made.folder / "manifest.json", made.folder / "recipe.toml"
    manifest.write_text(json.dumps({k: v for k, v in read_manifest(made.folder).items() if k != "kernels"}))
    recipe.write_text(recipe.read_text().replace('kernels = "torch"\n', ""))
    for about in (made.folder / "checkpoints").glob("**/*.json"):
        about.write_text(about.read_text().replace(', "kernels": "torch"', ""))
    verdict = fedloom.verify(made.folder)
    assert verdict.differences == ()
    assert verdict.kernels == ()


def test_lane_run_is_same_for_workers_and_compared_but_for_rounding_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    made, shared = run(tmp_path / "run", "lanes"), run(tmp_path / "shared", "lanes", workers=2)
    manifest = read_manifest(made.folder)
    assert manifest["kernels"] == {"large": "lanes", "small": "lanes"}
    assert manifest["sha256"] == read_manifest(shared.folder)["sha256"]
    assert fedloom.verify(made.folder).sameness == "the same to the bit"
    # as if the run had been made with torch's kernels
    (made.folder / "manifest.json").write_text(json.dumps({**manifest, "sha256": "", "kernels": {"large": "torch"}}))
    verdict = fedloom.verify(made.folder)
    assert verdict.differences == ()
    assert verdict.kernels == ("large: torch then, lanes now", "small: None then, lanes now")
    assert "but for rounding" in verdict.title
    rows = made.folder / "rows.jsonl"
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    changed = [{**line, "value": line["value"] * 2} if line["metric"] == "accuracy" else line for line in lines]
    rows.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert "accuracy" in fedloom.verify(made.folder).differences[0]


def test_comparison_of_ledger_runs_again_with_its_kernels() -> None:
    def recorded(*kernels: dict[str, str]) -> dict[str, Any]:
        runs = {str(seed): ({"kernels": one} if one else {}) for seed, one in enumerate(kernels)}
        return {"arms": {"fedavg": runs}}

    assert recorded_kernels(recorded({}, {})) == "torch"
    assert recorded_kernels(recorded({"large": "torch"}, {"large": "torch"})) == "torch"
    assert recorded_kernels(recorded({"large": "lanes", "small": "torch"})) == "lanes"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{"kind": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 1.0}, {"kind": "adam"}])
def test_lane_run_has_one_sha256_for_any_blocks(optimizer: dict[str, Any], tmp_path: Path) -> None:
    """Single precision: a device alone, in blocks that are filled up, in whole vectors, and in workers."""
    pytest.importorskip("numba")
    found = set()
    for size in (1, 3, 8, 16):
        recipe = {
            **RECIPE,
            "data": {**RECIPE["data"], "devices": 12, "max_examples": 40},
            "model": {"family": "convnet", "hidden": [4, 6]},
            "training": {"optimizer": optimizer},
            "engine": {"kernels": "lanes", "devices_per_block": size},
        }
        made = fedloom.run(recipe, out=tmp_path / str(size), workers=2 if size == 3 else 1)
        found.add(read_manifest(made.folder)["sha256"])
    assert len(found) == 1

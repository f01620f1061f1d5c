"""HeteroFL on MNIST from its recipes, shortened to seconds. Needs the real files; skipped without them."""

import os
from pathlib import Path

import pytest

import fedloom

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ["rounds=3", "training.epochs=1", "evaluation.every=3", "evaluation.statistics.max_batches=20"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(os.environ.get("FEDLOOM_DATA", "/nowhere")) / "mnist").is_dir(),
        reason="FEDLOOM_DATA names no folder with mnist",
    ),
]


def last(run: object, test: str) -> dict[str, float]:
    return {one.tier: one.value for one in run.final if one.test == test and one.metric == "accuracy"}  # type: ignore[attr-defined]


def test_heterofl_levels_c_d_e_reach_accuracy_on_iid_data(tmp_path: Path) -> None:
    found = last(fedloom.run(RECIPES / "heterofl_mnist_cde.toml", sets=SHORT, out=tmp_path / "run"), "global")
    assert set(found) == {"c", "d", "e"}
    assert found["c"] > 60  # guessing gives 10


def test_heterofl_masked_loss_raises_local_accuracy(tmp_path: Path) -> None:
    recipe = RECIPES / "heterofl_mnist_cde_noniid.toml"
    masked = last(fedloom.run(recipe, sets=SHORT, out=tmp_path / "masked"), "local")
    off = [*SHORT, "method.mask_unseen_labels=false"]
    plain = last(fedloom.run(recipe, sets=off, out=tmp_path / "plain"), "local")
    assert all(masked[tier] > plain[tier] + 10 for tier in ("c", "d", "e"))

"""The recipes of other tasks, compared under eight methods: each learns, and reports speak of the task's metrics."""

import json
from pathlib import Path

import pytest

import fedloom as fl
from fedloom.evaluation.metrics import metric_sign
from fedloom.runs.folder import read_rows

RECIPES = Path(__file__).parents[2] / "recipes"
METHODS = ("fedrolex", "fjord", "fedsup", "efedsup", "lgfedavg", "fedrep", "decouple")
TRIVIAL = {  # what a prediction that ignores the input reaches, and the headline
    "regression_diabetes": ("rmse", 1.0, {"rmse", "mae", "r2", "loss"}),
    "multilabel_digits": (
        "auroc", 50.0, {"auroc", "f1", "average_precision", "accuracy", "exact_match", "loss"},
    ),
    "segmentation_digits": ("mean_iou", 21.1, {"mean_iou", "accuracy", "loss"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIVIAL)
def test_compare_recipe_of_task_beats_the_trivial_prediction_under_every_method(name: str, tmp_path: Path) -> None:
    headline, trivial, metrics = TRIVIAL[name]
    compared = fl.compare(
        RECIPES / f"{name}.toml", methods=METHODS, controls=["standalone"], seeds=1, out=tmp_path / "comparison"
    )
    sign = metric_sign(headline)
    content = compared.to_dict()
    assert {record["arm"] for record in content["arms"]} == {"heterofl", *METHODS, "standalone"}
    for arm in ("heterofl", *METHODS):
        rows = list(read_rows(tmp_path / "comparison" / arm / "seed-0"))
        last = max(row.round for row in rows)
        final = [row for row in rows if row.round == last and row.candidate and not row.device]
        assert {row.metric for row in final} >= metrics
        reached = [row.value for row in final if row.metric == headline and row.test == "global"]
        assert reached and all(sign * (value - trivial) > 0 for value in reached), (arm, reached)
        devices = {row.device for row in rows if row.device and row.metric == headline}
        assert len(devices) == 6
    description = json.loads((tmp_path / "comparison" / "comparison.json").read_text())
    assert description["terms"]["metric"] in ("", headline)
    assert any(line.startswith(("heterofl beats ", "heterofl and ")) for line in compared.result.verdict)
    page = Path(fl.report(tmp_path / "comparison")).read_text(encoding="utf-8")
    direction = "higher is better" if sign > 0 else "lower is better"
    assert f"{headline}" in page and direction in page


@pytest.mark.parametrize("name", TRIVIAL)
def test_recipe_of_task_is_valid_and_small(name: str) -> None:
    recipe = fl.Simulation.from_recipe(RECIPES / f"{name}.toml").recipe
    assert recipe["rounds"] <= 20 and len(recipe["tiers"]) >= 2

"""A recipe's metrics: rows on every test, by tier and device; direction and unit in the manifest; refusals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.data import Dataset, Examples, Preparation
from fedloom.evaluation import Row
from fedloom.evaluation.metrics import MetricInfo
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import assemble
from fedloom.runs.experiment import Experiment
from fedloom.runs.folder import read_manifest, read_metrics, read_rows, summarize
from fedloom.runs.loop import rounds
from fedloom.runs.metrics import build_metrics
from fedloom.runs.recorder import checkpoint_score, record_rounds
from tests.run_fixtures import small

SEVERAL = ["accuracy", "loss", {"kind": "f1", "average": "micro"}, "f1", "perplexity", "recall", "auroc",
           {"kind": "calibration_error", "bins": 10}]  # fmt: skip
Key = tuple[str, str, str, str]


def built(metrics: Sequence[Any] | None, registries: Registries | None = None, **changes: Any) -> Experiment:
    evaluation = {"per_device": "always", **({} if metrics is None else {"metrics": list(metrics)})}
    skewed = {"dataset": "digits", "devices": 4, "test_examples": 90,
              "partition": {"kind": "label_shards", "labels_per_device": 5}}  # fmt: skip
    document = small(**{"rounds": 1, "data": skewed, "evaluation": evaluation, **changes})
    registries = registries or Registries()
    workers = 1
    return assemble(load(document, registries), registries, Path("data"), workers=workers)


def evaluated(experiment: Experiment) -> list[Row]:
    (result,) = rounds(experiment)
    return [row for row in result.rows if row.candidate]


def by_metric(rows: Sequence[Row], metric: str) -> dict[Key, float]:
    return {(row.candidate, row.tier, row.device, row.test): row.value for row in rows if row.metric == metric}


METHODS: Mapping[str, dict[str, Any]] = {
    "server": {"method": {"name": "heterofl"}},
    "masked": {"method": {"name": "heterofl", "unseen_logit": -math.inf}},
    "personal": {"method": {"name": "standalone"}},
    "both": {"method": {"name": "ditto"}, "tiers": [{"name": "large", "share": 1.0}]},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices_compute", [False, True])
def test_rows_have_every_metric_by_test_tier_and_device(method: str, devices_compute: bool) -> None:
    """Micro F1 is accuracy, and perplexity the exponential of loss, however the predictions came together."""
    experiment = built(SEVERAL, **METHODS[method])
    evaluator = replace(experiment.evaluator, devices_compute=devices_compute)
    rows = evaluated(replace(experiment, evaluator=evaluator))
    accuracies, losses = by_metric(rows, "accuracy"), by_metric(rows, "loss")
    assert {key[3] for key in accuracies} == {"global", "local"} and any(key[2] for key in accuracies)
    assert by_metric(rows, "f1_micro") == {key: pytest.approx(value) for key, value in accuracies.items()}
    assert by_metric(rows, "f1").keys() == by_metric(rows, "calibration_error").keys() == accuracies.keys()
    assert losses.keys() == accuracies.keys()
    server = {key: value for key, value in losses.items() if key[0] == "server"}
    assert by_metric(rows, "perplexity").items() >= {k: pytest.approx(math.exp(v)) for k, v in server.items()}.items()
    assert any(row.metric.startswith("recall[") and row.device for row in rows)
    assert not any(math.isnan(row.value) for row in rows)


def test_rows_pooled_and_computed_on_devices_agree_for_each_device() -> None:
    experiment = built(SEVERAL, **METHODS["personal"])
    pooled = evaluated(experiment)
    experiment = built(SEVERAL, **METHODS["personal"])
    computed = evaluated(replace(experiment, evaluator=replace(experiment.evaluator, devices_compute=True)))
    one, two = ({replace(row, value=0.0): row.value for row in rows if row.device} for rows in (pooled, computed))
    assert one and one == {row: pytest.approx(value) for row, value in two.items()}


def test_rows_pooled_tier_is_that_of_all_predictions_and_computed_is_the_weighted_mean() -> None:
    experiment = built(["f1"], **METHODS["personal"])
    sizes = {experiment.fleet.name(at): len(own) for at, own in enumerate(experiment.evaluator.local_tests)}
    pooled = by_metric(evaluated(experiment), "f1")
    experiment = built(["f1"], **METHODS["personal"])
    on_devices = replace(experiment, evaluator=replace(experiment.evaluator, devices_compute=True))
    computed = by_metric(evaluated(on_devices), "f1")
    differ = False
    for tier in ("large", "small"):
        each = {key[2]: value for key, value in computed.items() if key[1] == tier and key[2] and key[3] == "local"}
        mean = sum(sizes[device] * value for device, value in each.items()) / sum(sizes[device] for device in each)
        ((key, value),) = [(k, v) for k, v in computed.items() if k[1] == tier and not k[2] and k[3] == "local"]
        assert value == pytest.approx(mean)
        differ |= pooled[key] != pytest.approx(mean)
    assert differ


@pytest.mark.parametrize("method", ["server", "both"])
def test_rows_without_metrics_are_accuracy_and_global_loss(method: str) -> None:
    rows = evaluated(built(None, **METHODS[method]))
    assert {row.metric for row in rows if row.test == "local"} == {"accuracy"}
    on_server = {row.metric for row in rows if row.test == "global" and row.candidate == "server"}
    assert on_server <= {"accuracy", "loss"}
    asked = evaluated(built(["accuracy", "loss", "f1"], **METHODS[method]))
    known = {replace(row, value=0.0): row.value for row in asked}
    assert all(known[replace(row, value=0.0)] == row.value for row in rows)


def test_rows_of_metrics_do_not_depend_on_workers() -> None:
    registries = Registries()
    document = small(rounds=1, method={"name": "standalone"}, evaluation={"metrics": ["f1", "recall"]})
    found = []
    for workers in (1, 2):
        experiment = assemble(load(document, registries), registries, Path("data"), workers=workers)
        found.append(evaluated(experiment))
        experiment.engine.close()
    assert found[0] == found[1] and {row.metric for row in found[0]} >= {"f1", "recall[0]"}


FILE = """
from fedloom.evaluation.metrics import Metric

def share(logits, labels, label: int = 0):
    return float((logits.argmax(-1) == label).double().mean())

def spread() -> Metric:
    return Metric("spread", lambda logits, labels: float(logits.std()), higher_is_better=False, unit="nat")

METRICS = {"share": share, "spread": spread, "constant": Metric("constant", lambda logits, labels: {"a": 1.0, "b": 2})}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Registries:
    path = tmp_path_factory.mktemp("own") / "own_metrics.py"
    path.write_text(FILE)
    return Registries().with_file(path)


def test_run_with_metrics_of_a_file_records_direction_and_unit(own: Registries, tmp_path: Path) -> None:
    experiment = built(["f1", {"kind": "share", "label": 3}, "spread", "constant"], own)
    folder = tmp_path / "run"
    list(record_rounds(experiment, folder))
    manifest = read_manifest(folder)
    assert manifest["metrics"] == {
        "f1": {"higher_is_better": True, "unit": "%"},
        "share": {"higher_is_better": None, "unit": ""},
        "spread": {"higher_is_better": False, "unit": "nat"},
        "constant": {"higher_is_better": None, "unit": ""},
    }
    rows = list(read_rows(folder))
    names = {row.metric for row in rows if row.candidate}
    assert names == {"f1", "share", "spread", "constant[a]", "constant[b]"}
    assert {row.value for row in rows if row.metric == "constant[b]"} == {2.0}
    finals = {final.metric: final for final in summarize(rows, read_metrics(manifest)) if final.tier == "large"}
    assert finals["spread"].best == finals["spread"].value and math.isnan(finals["share"].best)


def test_manifest_without_metrics_declares_accuracy_and_loss(tmp_path: Path) -> None:
    list(record_rounds(built(None), tmp_path / "run"))
    declared = read_metrics(read_manifest(tmp_path / "run"))
    assert declared == {"accuracy": MetricInfo(True, "%"), "loss": MetricInfo(False)}


def words() -> Dataset:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randint(0, 6, (count, 5), generator=draw) for count in (40, 20)]
    return Dataset("words", *(Examples(one, one) for one in parts), 6, Preparation(mask_chance=0.3, mask_token=6), 7)


TEXT: dict[str, Any] = {
    "data": {"dataset": "words", "devices": 4, "partition": {"kind": "iid"}},
    "model": {"family": "transformer", "embedding": 4, "heads": 2, "hidden": 6, "layers": 1, "dropout": 0.0},
}


def test_rows_of_sequences_have_the_metrics_chosen() -> None:
    registries = Registries().with_names(datasets={"words": words})
    rows = evaluated(built(["loss", "perplexity"], registries, **TEXT))
    values = {row.metric: row.value for row in rows if row.tier == "large" and not row.device and row.test == "global"}
    hidden = {"perplexity_hidden"}
    assert values.keys() - hidden == {"loss", "perplexity", "perplexity_of_mean"}
    assert values["perplexity_of_mean"] == pytest.approx(math.exp(values["loss"]))
    default = {row.metric for row in evaluated(built(None, registries, **TEXT)) if row.test == "global"}
    assert default - {"perplexity_hidden", "accuracy_hidden"} == {"perplexity", "perplexity_of_mean", "accuracy"}


@pytest.mark.parametrize(("metrics", "code", "key", "hint"), [
    (["acuracy"], "RECIPE_NAME", "evaluation.metrics[0]", "did you mean 'accuracy'?"),
    ([{"kind": "f11"}], "RECIPE_NAME", "evaluation.metrics[0].kind", "did you mean 'f1'?"),
    (["f1", {"kind": "f1", "avrage": "micro"}], "RECIPE_KEY", "evaluation.metrics[1].avrage", "'average'"),
    ([{"kind": "f1", "average": "mean"}], "RECIPE_VALUE", "evaluation.metrics[0].average", "macro"),
    ([{"kind": "calibration_error", "bins": 0}], "RECIPE_RANGE", "evaluation.metrics[0].bins", ">= 1"),
    ([3], "RECIPE_TYPE", "evaluation.metrics[0]", "a name or a table"),
    ([], "RECIPE_RANGE", "evaluation.metrics", "at least 1"),
    (["f1", "f1"], "RECIPE_VALUE", "evaluation.metrics[1]", "named 'f1'"),
    (["mae"], "METRIC_TASK", "evaluation.metrics[0]", "mae compares numbers"),
    ([{"kind": "torchmetrics", "metric": "Nothing"}], "METRIC_MISSING", "evaluation.metrics[0]", ""),
])  # fmt: skip
def test_metrics_that_cannot_be_used_are_refused(metrics: list[Any], code: str, key: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        built(metrics)
    text = str(caught.value)
    assert code in text and hint in text and f"{key}" in text


def test_metrics_that_need_logits_of_every_position_are_refused() -> None:
    registries = Registries().with_names(datasets={"words": words})
    with pytest.raises(RecipeError, match="auroc is not computed for data with a label at every position") as caught:
        built(["accuracy", "auroc"], registries, **TEXT)
    assert "perplexity" in str(caught.value)


def test_metric_that_fails_is_refused_before_the_run() -> None:
    def wrong(logits: Any, labels: Any) -> float:
        return float(logits.nothing)

    registries = Registries().with_names(metrics={"wrong": wrong})
    with pytest.raises(RecipeError, match=r"wrong fails on 10 classes: AttributeError"):
        built(["wrong"], registries)


@pytest.mark.parametrize(("compared", "code"), [("accuracy", "RECIPE_NAME"), ("share", "METRIC_DIRECTION")])
def test_compared_metric_must_be_evaluated_and_directed(own: Registries, compared: str, code: str) -> None:
    with pytest.raises(RecipeError, match=code):
        built(["f1", "share"], own, compare={"metric": compared})
    built(["f1", "share"], own, compare={"metric": "f1"})
    built(["recall"], own, compare={"metric": "recall[3]"})


def test_build_metrics_without_choice_is_none() -> None:
    assert build_metrics(load(small(), Registries()), Registries()) is None


def test_checkpoint_score_is_higher_for_better_values() -> None:
    def row(metric: str, value: float) -> Row:
        return Row(1, "server", "large", "", "global", metric, value)

    accuracy, ece = {"accuracy": MetricInfo(True, "%")}, {"calibration_error": MetricInfo(False, "%")}
    assert checkpoint_score((row("accuracy", 40.0), row("accuracy", 60.0)), accuracy) == 50.0
    assert checkpoint_score((row("calibration_error", 5.0),), {"odd": MetricInfo(None), **ece}) == -5.0
    assert checkpoint_score((row("odd", 5.0),), {"odd": MetricInfo(None)}) is None
    assert checkpoint_score((), accuracy) is None

"""Reports and verdicts about another metric than accuracy: direction, unit and charts follow the metric."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.evaluation import Row
from fedloom.evaluation.metrics import Metric, MetricInfo, UndeclaredDirection
from fedloom.recipe.errors import RecipeError
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.reporting.charts.devices import worst_tenth
from fedloom.reporting.ledger import ALL, ClaimSide, ClaimTerms, Evidence, baseline_target, evaluate_claim
from fedloom.reporting.page import build_page
from fedloom.reporting.paired_stats import (
    ACCURACY,
    PERPLEXITY,
    Arm,
    ServedModel,
    compare_overall,
    compared_metric,
    metric_of,
)
from fedloom.reporting.report_data import ReportData, ReportError, read_report_data
from fedloom.reporting.summary import write_sentences
from fedloom.reporting.tables import ComparisonTerms, build_tables, conclude
from fedloom.reporting.targets import rounds_to, target_from
from fedloom.runs.build import assemble
from fedloom.runs.recorder import record_rounds
from fedloom.studies.compare import plan_comparison, reopen_comparison
from tests.reporting.conftest import quietly, recipe

METRICS = ["accuracy", {"kind": "calibration_error", "bins": 10}, "recall", "odd"]
ODD = Metric("odd", lambda logits, labels: float(logits.mean()))


def registries() -> Registries:
    return Registries().with_names(metrics={"odd": ODD})


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metrics") / "run"
    document = recipe(rounds=2, evaluation={"metrics": METRICS})
    list(record_rounds(assemble(load(document, registries()), registries(), folder), folder))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compared by calibration error, where lower is better."""
    home = tmp_path_factory.mktemp("metrics") / "home"
    compare = {"arms": {"fjord": ["method={name='fjord'}"]}, "baseline": "fjord", "metric": "calibration_error"}
    document = {**recipe(rounds=2, evaluation={"metrics": METRICS}), "compare": compare}
    planned = plan_comparison(load(document, registries()), registries(), 2, [], home, home)
    list(planned.rounds())
    planned.result()
    return home


def finals(data: ReportData, group: int) -> list[float]:
    return data.groups[group].arm.final_values("large", "global")


def test_comparison_by_a_lower_is_better_metric_prefers_lower_values(pair: Path) -> None:
    data = read_report_data([pair])
    assert data.metric == compared_metric("calibration_error") and data.metric.sign == -1
    assert data.result is not None
    assert {record["metric"] for record in data.result.records} == {"calibration_error"}
    (overall,) = data.result.overall
    first, second = (
        [
            sum(values) / 2
            for values in zip(*(group.arm.final_values(tier, "global") for tier in data.tiers), strict=True)
        ]
        for group in data.groups
    )
    assert overall.better == sum(one < two for one, two in zip(first, second, strict=True))
    caption = build_tables(data.result)[0].caption
    assert caption.startswith("Calibration error in % (lower is better)")


def test_comparison_keeps_its_metric_in_report_and_when_reopened(pair: Path) -> None:
    assert json.loads((pair / "comparison.json").read_text())["terms"]["metric"] == "calibration_error"
    reopened = reopen_comparison(pair, registries(), pair, 1)
    assert reopened.settings.metric == "calibration_error" and reopened.settings.baseline == "fjord"
    assert reopened.result().records[0]["metric"] == "calibration_error"
    assert read_report_data([pair], metric="accuracy").metric == ACCURACY


def test_comparison_by_accuracy_is_the_default(single: Path) -> None:
    assert read_report_data([single]).metric == ACCURACY


def test_comparison_by_an_undirected_metric_is_refused(tmp_path: Path) -> None:
    document = recipe(rounds=2, evaluation={"metrics": ["odd"]})
    with pytest.raises(RecipeError, match="METRIC_DIRECTION") as caught:
        plan_comparison(load(document, registries()), registries(), 1, ["standalone"], tmp_path / "home", tmp_path)
    assert "higher_is_better" in str(caught.value)


def test_report_of_runs_by_an_undirected_metric_has_no_verdict(pair: Path) -> None:
    data = read_report_data([pair], metric="odd")
    assert data.result is None and "odd" in data.missing_result_reason
    page = build_page(data)
    assert "whether higher values of odd are better is not declared" in page.html


def test_page_has_a_chart_for_every_metric_asked_for(single: Path) -> None:
    page = build_page(read_report_data([single]))
    assert {"learning_rounds.csv", "learning_calibration_error.csv", "entries_recall.csv", "learning_odd.csv"} <= set(
        page.csvs
    )
    assert page.csvs["learning_calibration_error.csv"].startswith("arm,tier,round,calibration_error_mean")
    assert page.csvs["entries_recall.csv"].count("\n") > 10
    assert "Lower is better." in page.html and "Direction not declared." in page.html
    assert "calibration_error, % (lower is better)" in page.html


def test_page_about_a_chosen_metric_shows_it_everywhere(single: Path) -> None:
    data = read_report_data([single], metric="calibration_error")
    page = build_page(data)
    assert "Calibration error per device" in page.html
    assert "devices.csv" in page.csvs and "calibration_error" in page.csvs["devices.csv"].splitlines()[0]
    assert write_sentences(data)[0].startswith("heterofl reaches a calibration error of ")
    assert read_report_data([single], metric="recall[3]").metric.unit == " %"


def test_report_verb_takes_the_metric(single: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    quietly("report", single, "--metric", "calibration_error", "--out", page)
    assert "Calibration error per device" in page.read_text(encoding="utf-8")


def test_report_about_an_unknown_metric_is_refused(single: Path) -> None:
    with pytest.raises(ReportError, match="no metric 'acuracy'") as caught:
        read_report_data([single], metric="acuracy")
    assert "accuracy" in caught.value.hint


def row(value: float, metric: str, number: int = 1, tier: str = "large") -> Row:
    return Row(number, "server", tier, "", "global", metric, value)


def arm(name: str, values: list[float], metric: str, info: MetricInfo) -> Arm:
    serving = {"large": ServedModel("large", True)}
    return Arm(
        name, serving, [[row(value, metric)] for value in values], metric=compared_metric(metric, {metric: info})
    )


@pytest.mark.parametrize(("higher", "verdict"), [(True, "does not hold"), (False, "holds")])
def test_verdict_follows_the_declared_direction(higher: bool, verdict: str) -> None:
    this, other = (arm(n, v, "mine", MetricInfo(higher)) for n, v in (("a", [1.0, 2.0, 1.5]), ("b", [3.0, 4.0, 3.5])))
    found = compare_overall(this, other, {"large": 1.0}, "global", 100)
    assert found is not None and found.claim == verdict
    terms = ComparisonTerms(["large"], {"large": 1.0}, "global", 100)
    assert conclude([this, other], terms).winners["large"] == ("b" if higher else "a")


def test_verdict_without_direction_is_refused_by_name() -> None:
    arms = [arm(name, [1.0, 2.0], "mine", MetricInfo(None)) for name in ("a", "b")]
    with pytest.raises(UndeclaredDirection, match="mine"):
        conclude(arms, ComparisonTerms(["large"], {"large": 1.0}, "global", 100))


def test_metric_of_prefers_accuracy_and_perplexity_then_the_first_directed() -> None:
    declared = {"odd": MetricInfo(None), "f1": MetricInfo(True, "%"), "accuracy": MetricInfo(True, "%")}
    assert metric_of([], declared) == ACCURACY
    assert metric_of([], {"odd": MetricInfo(None), "f1": MetricInfo(True, "%")}).name == "f1"
    assert metric_of([], {"odd": MetricInfo(None)}).name == "odd"
    assert metric_of([row(1.0, "accuracy"), row(1.0, "perplexity")], {"accuracy": MetricInfo(True, "%")}) == ACCURACY
    assert metric_of([row(1.0, "perplexity"), row(1.0, "accuracy")]) == PERPLEXITY
    assert metric_of([row(1.0, "recall[0]")], {"recall": MetricInfo(True, "%")}).name == "recall[0]"
    assert metric_of([]) == ACCURACY


@pytest.mark.parametrize(("name", "info", "text", "difference"), [
    ("accuracy", None, "81.2 %", "+81.2 points"), ("perplexity", None, "81.2", "+81.2"),
    ("loss", None, "81.23", "+81.23"), ("delay", MetricInfo(False, "ms"), "81.23 ms", "+81.23 ms"),
])  # fmt: skip
def test_compared_metric_is_written_with_its_unit(name: str, info: Any, text: str, difference: str) -> None:
    metric = compared_metric(name, {name: info} if info else {})
    assert (metric.format(81.234), metric.format_difference(81.234)) == (text, difference)


def test_standard_error_of_the_test_set_is_only_known_for_accuracies() -> None:
    assert ACCURACY.standard_error(50.0, 100) == pytest.approx(5.0)
    assert compared_metric("accuracy_shuffled").standard_error(50.0, 100) == pytest.approx(5.0)
    assert compared_metric("auroc").standard_error(50.0, 100) == compared_metric("f1").standard_error(50.0, 9) == 0.0


def test_targets_follow_the_sign() -> None:
    assert (target_from([3.0], 1, 1.0), target_from([3.0], -1, 1.0)) == (2.0, 4.0)
    curve = {1: 5.0, 2: 3.0, 3: 1.0}
    assert (rounds_to(3.0, curve, -1), rounds_to(3.0, curve, 1)) == (2, 1)


def test_worst_tenth_of_a_lower_is_better_metric_is_its_highest() -> None:
    assert (worst_tenth([1.0, 2.0, 3.0]), worst_tenth([1.0, 2.0, 3.0], -1)) == (1.0, 3.0)


def test_claim_on_a_metric_of_the_runs_uses_their_direction() -> None:
    runs = {name: [[row(value, "mine", 1), row(value - 1, "mine", 2)]] for name, value in (("a", 3.0), ("b", 5.0))}
    shares = {"a": {"large": 1.0}, "b": {"large": 1.0}}
    terms = ClaimTerms("last", "more", metric="mine")
    up, down = (Evidence(runs, shares, {"mine": MetricInfo(higher)}) for higher in (True, False))
    side = ClaimSide("a", minus=("a", "b"))
    assert evaluate_claim(side, ClaimSide("a"), terms, up).this[0].value == 2.0 - 4.0
    assert evaluate_claim(side, ClaimSide("a"), terms, down).this[0].value == 0.0
    assert baseline_target(ClaimSide("a"), terms, 1.0, up) == {ALL: 1.0}
    assert baseline_target(ClaimSide("a"), terms, 1.0, down) == {ALL: 3.0}

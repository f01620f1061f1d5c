"""Every chart: its CSV columns, values that vary, a sentence, and text alternatives."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedloom.reporting.charts import Chart, MissingChart, build_charts, build_hero_charts
from fedloom.reporting.charts.devices import build_partition_chart, worst_tenth
from fedloom.reporting.charts.participation import build_coverage_chart
from fedloom.reporting.report_data import ReportData, RunReader, read_report_data

LEARNED = ["accuracy_mean", "accuracy_std", "seeds"]
TIME = ["training_seconds", "evaluation_seconds", "saving_seconds", "peak_megabytes", "simulated_seconds"]
ONE_RUN = {
    "learning_rounds": ["arm", "tier", "round", *LEARNED],
    "learning_rounds_local": ["arm", "tier", "round", *LEARNED],
    "learning_bytes": ["arm", "tier", "megabytes", *LEARNED],
    "targets": ["arm", "tier", "target", "reached", "rounds", "megabytes", "simulated_seconds"],
    "pareto": ["arm", "model", "parameters", "macs", "accuracy", "on_front"],
    "devices": ["arm", "seed", "device", "tier", "accuracy"],
    "time": ["arm", "seed", "round", *TIME],
    "personalized": ["tier", "device", "initial", "personalized"],
    "participation": ["round", "device", "tier", "outcome"],
    "coverage": ["round", "region", "updates", "age"],
    "partition": ["device", "tier", "class", "examples"],
    "cka": ["tier", "layer", "against_tier", "against_layer", "cka"],
    "refusals": ["round", "code", "replies"],
    "norms": ["round", "tier", "least", "median", "most"],
    "uploads": ["round", "tier", "bundle", "bytes"],
}
SAYS = {  # a column whose values must differ
    "learning_rounds": "accuracy_mean", "learning_rounds_local": "accuracy_mean",
    "learning_bytes": "accuracy_mean", "targets": "rounds", "pareto": "accuracy",
    "devices": "accuracy", "time": "training_seconds", "personalized": "personalized", "participation": "outcome",
    "coverage": "updates", "partition": "examples", "cka": "cka", "refusals": "replies", "norms": "median",
    "uploads": "bytes", "differences": "difference", "arms": "accuracy_mean",
    "alone": "gain",
}  # fmt: skip
SEVERAL = {
    "arms": ["arm", "tier", "test", "accuracy_mean", "accuracy_std", "can_run"],
    "differences": [
        "tier", "arm", "other", "arm_mean", "other_mean", "difference", "noise", "beyond_noise", "seeds",
    ],
    "learning_rounds": ONE_RUN["learning_rounds"],
    "learning_bytes": ONE_RUN["learning_bytes"],
    "targets": [*ONE_RUN["targets"], "gain"],
    "pareto": ONE_RUN["pareto"],
    "devices": ONE_RUN["devices"],
    "alone": ["arm", "seed", "device", "gain", "worse_off"],
    "time": ONE_RUN["time"],
}  # fmt: skip


def build_all(report: ReportData) -> list[Chart | MissingChart]:
    return [
        *build_hero_charts(report),
        *(chart for of_section in build_charts(report).values() for chart in of_section),
    ]


def charts_of(report: ReportData) -> dict[str, Chart]:
    return {one.key: one for one in build_all(report) if isinstance(one, Chart)}


@pytest.fixture(scope="module")
def charts(report: ReportData) -> dict[str, Chart]:
    return charts_of(report)


@pytest.fixture(scope="module")
def of_several(several: ReportData) -> dict[str, Chart]:
    return charts_of(several)


def lines(chart: Chart) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(chart.csv())))


def check(chart: Chart, columns: list[str]) -> None:
    read = lines(chart)
    assert list(read[0]) == columns
    assert len({line[SAYS[chart.key]] for line in read}) > 1, "a constant series shows nothing"
    assert chart.sentence.endswith(".") and any(sign.isdigit() for sign in chart.sentence)
    assert chart.panels and all(len(panel.alt) > 20 for panel in chart.panels)


def test_charts_of_run_are_complete(charts: dict[str, Chart]) -> None:
    assert charts.keys() == ONE_RUN.keys()


@pytest.mark.parametrize("key", ONE_RUN)
def test_chart_of_run_has_columns_and_varying_values(key: str, charts: dict[str, Chart]) -> None:
    check(charts[key], ONE_RUN[key])


@pytest.mark.parametrize("key", SEVERAL)
def test_chart_of_comparison_has_columns_and_varying_values(key: str, of_several: dict[str, Chart]) -> None:
    check(of_several[key], SEVERAL[key])


def test_rounds_chart_of_comparison_merges_seeds_by_arm(of_several: dict[str, Chart]) -> None:
    read = lines(of_several["learning_rounds"])
    assert {line["arm"] for line in read} == {"heterofl", "fjord", "standalone", "drop-the-small"}
    assert {line["seeds"] for line in read} == {"2"}
    assert any(float(line["accuracy_std"]) for line in read)


def test_rounds_chart_omits_arms_that_a_tier_cannot_run(of_several: dict[str, Chart]) -> None:
    tiers = {line["tier"] for line in lines(of_several["learning_rounds"]) if line["arm"] == "drop-the-small"}
    assert tiers == {"large"}


def test_pareto_chart_includes_subnets(charts: dict[str, Chart]) -> None:
    assert sum(line["model"] == "subnet" for line in lines(charts["pareto"])) >= 2


def test_participation_chart_includes_lost_and_refused_replies(charts: dict[str, Chart]) -> None:
    outcomes = {line["outcome"] for line in lines(charts["participation"])}
    assert {"admitted", "SILENT", "NONFINITE"} <= outcomes


def test_coverage_chart_counts_admitted_updates(report: ReportData) -> None:
    reader, chart = report.first, build_coverage_chart(report)
    assert isinstance(chart, Chart)
    admitted = sum(
        len(one["devices"]) for one in reader.participation if one["outcome"] == "admitted" and one["round"] == 1
    )
    assert [one["updates"] for one in lines(chart) if (one["round"], one["region"]) == ("1", "large+small")] == [
        str(admitted)
    ]


def test_charts_of_language_model_use_perplexity(text: Path) -> None:
    charts = charts_of(read_report_data([text]))
    assert list(lines(charts["learning_rounds"])[0])[3] == "perplexity_mean"
    assert {"norms", "coverage", "partition", "uploads", "time"} <= charts.keys()
    assert list(lines(charts["pareto"])[0])[4] == "perplexity"


def test_missing_charts_give_reasons(text: Path) -> None:
    built = build_all(read_report_data([text]))
    reasons = {one.title: one.reason for one in built if isinstance(one, MissingChart)}
    assert reasons["Initial against personalized accuracy"] == "the recipe has no evaluation.fine_tune"
    assert reasons["Lost and refused replies"] == "every reply was admitted"


def test_charts_of_new_run_are_only_the_partition(run: Path, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    for name in ("manifest.json", "recipe.toml", "fleet.json"):
        (begun / name).write_bytes((run / name).read_bytes())
    assert charts_of(read_report_data([begun])).keys() == {"partition"}


def test_partition_chart_of_equal_devices_names_one_number(run: Path) -> None:
    chart = build_partition_chart(read_report_data([run]))
    assert isinstance(chart, Chart)
    assert chart.sentence.startswith("A device holds 30 examples of 3 to 5 classes; its most ")


def test_partition_chart_of_unknown_data_is_missing(run: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", "recipe.toml", "fleet.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    fleet = json.loads((tmp_path / "fleet.json").read_text())
    fleet["holdings"]["counts"] = [[0] * len(line) for line in fleet["holdings"]["counts"]]
    (tmp_path / "fleet.json").write_text(json.dumps(fleet))
    chart = build_partition_chart(read_report_data([tmp_path]))
    assert isinstance(chart, MissingChart) and "known only to them" in chart.reason


def test_run_reader_incomplete_line_is_skipped(run: Path, tmp_path: Path) -> None:
    text_of_rows = (run / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text_of_rows[:-20])
    assert len(RunReader(tmp_path).rows) == len(text_of_rows.splitlines()) - 1


@pytest.mark.parametrize(("values", "worst"), [([5.0], 5.0), (list(range(20)), 0.5), ([3.0, 1.0, 2.0], 1.0)])
def test_worst_tenth_is_never_empty(values: list[float], worst: float) -> None:
    assert worst_tenth(values) == worst


def test_coverage_chart_void_round_has_no_updates(report: ReportData, tmp_path: Path, run: Path) -> None:
    for path in run.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"round": 2, "device": "", "code": "QUORUM", "reason": "too few"}\n')
    reader = RunReader(tmp_path)
    chart = build_coverage_chart(replace(report, groups=[replace(report.groups[0], readers=[reader])]))
    assert isinstance(chart, Chart)
    assert {one["updates"] for one in lines(chart) if one["round"] == "2"} == {"0"}
    assert {one["age"] for one in lines(chart) if one["round"] == "2"} == {"1"}

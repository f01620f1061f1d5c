"""The charts of the report, by the section of the page that shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from ..report_data import ReportData
from .arms import build_arms_chart, build_differences_chart
from .devices import build_alone_chart, build_devices_chart, build_partition_chart, build_personalized_chart
from .drawing import Chart, MissingChart, Panel
from .learning import (
    build_bytes_chart,
    build_metric_charts,
    build_other_test_chart,
    build_rounds_chart,
    build_targets_chart,
)
from .models import build_cka_chart, build_pareto_chart
from .participation import build_coverage_chart, build_norms_chart, build_participation_chart, build_refusals_chart
from .search import build_settings_chart, build_stages_chart
from .spending import build_time_chart, build_uploads_chart

__all__ = ["SECTIONS", "Chart", "MissingChart", "Panel", "ReportSection", "build_charts", "build_hero_charts"]

ChartBuilder = Callable[[ReportData], Chart | MissingChart]


@dataclass(frozen=True)
class ReportSection:
    """A part of the page that opens."""

    key: str
    title: str
    about: str
    builders: tuple[ChartBuilder, ...]


SECTIONS = (
    ReportSection("comparison", "Comparison", "who is better, and may it be claimed", (build_differences_chart,)),
    ReportSection(
        "learning", "Learning", "how fast, and to which targets",
        (build_rounds_chart, build_other_test_chart, build_targets_chart),
    ),
    ReportSection("cost", "Cost", "bytes, time and memory", (build_bytes_chart, build_time_chart)),
    ReportSection(
        "devices", "Devices", "their data, and what fine-tuning changes",
        (build_partition_chart, build_personalized_chart),
    ),
    ReportSection(
        "fairness", "Fairness", "the worst tenth, and devices worse off than alone",
        (build_devices_chart, build_alone_chart),
    ),
    ReportSection(
        "health", "Fleet health", "who took part, and what was lost or refused",
        (build_participation_chart, build_coverage_chart, build_refusals_chart, build_norms_chart),
    ),
    ReportSection("privacy", "Privacy", "what left the devices", (build_uploads_chart,)),
    ReportSection(
        "models", "Models", "the best value within a budget, and how similar they are",
        (build_pareto_chart, build_cka_chart),
    ),
    ReportSection(
        "search", "Search", "which settings were tried, and what was chosen",
        (build_stages_chart, build_settings_chart),
    ),
)  # fmt: skip

OF_ONE_RUN = frozenset(
    {"personalized", "participation", "coverage", "partition", "cka", "refusals", "norms", "uploads"}
)
"""Charts of one run; in a comparison, of the first arm's first seed."""


def build_hero_charts(report: ReportData) -> list[Chart | MissingChart]:
    """The first screen: of a comparison all arms; of a run its learning curves, on the test that it is for and
    on the other one, or against bytes if that has nothing else to show."""
    if report.result is not None:
        return [build_arms_chart(report)]
    if report.has_several_arms:
        return [build_rounds_chart(report)]
    second = build_other_test_chart(report)
    return [build_rounds_chart(report), second if isinstance(second, Chart) else build_bytes_chart(report)]


def build_charts(report: ReportData) -> dict[str, list[Chart | MissingChart]]:
    """All charts below the first screen, by the key of their section."""
    heroes = [chart.key for chart in build_hero_charts(report) if isinstance(chart, Chart)]
    charts = {section.key: [build(report) for build in section.builders] for section in SECTIONS}
    charts["learning"] += build_metric_charts(report)
    if report.result is None and report.has_several_arms:
        charts["comparison"].append(build_arms_chart(report))  # says why it is missing
    return {
        key: [chart for chart in of_section if isinstance(chart, MissingChart) or chart.key not in heroes]
        for key, of_section in charts.items()
    }

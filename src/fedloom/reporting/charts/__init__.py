"""The charts of the report, in the order in which they are shown."""

from collections.abc import Callable

from ..report_data import ReportData
from .arms import build_arms_chart, build_differences_chart
from .devices import build_devices_chart, build_partition_chart, build_personalized_chart
from .drawing import Chart, Mark, MissingChart, Panel
from .learning import (
    build_bytes_chart,
    build_metric_charts,
    build_other_test_chart,
    build_rounds_chart,
    build_targets_chart,
)
from .models import build_cka_chart, build_pareto_chart
from .participation import build_coverage_chart, build_norms_chart, build_participation_chart, build_refusals_chart
from .spending import build_time_chart, build_uploads_chart

__all__ = ["COMPARED", "SINGLE", "Chart", "Mark", "MissingChart", "Panel", "build_metric_charts"]

ChartBuilder = Callable[[ReportData], Chart | MissingChart]
COMPARED: tuple[ChartBuilder, ...] = (
    build_arms_chart, build_differences_chart, build_rounds_chart, build_other_test_chart, build_bytes_chart,
    build_targets_chart, build_pareto_chart, build_devices_chart, build_time_chart,
)  # fmt: skip
"""Charts over all arms and seeds."""

SINGLE: tuple[ChartBuilder, ...] = (
    build_personalized_chart, build_participation_chart, build_coverage_chart, build_partition_chart, build_cka_chart,
    build_refusals_chart, build_norms_chart, build_uploads_chart,
)  # fmt: skip
"""Charts of one run; in a comparison, of the first arm's first seed."""

"""The report's figures, in the order in which they are shown."""

from collections.abc import Callable

from ..report_data import ReportData
from .arms import build_differences_chart, build_arms_chart
from .cka import build_cka_chart
from .devices import build_devices_chart, build_partition_chart, build_personalized_chart
from .drawing import MissingChart, Chart, Mark, Panel
from .learning import build_bytes_chart, build_rounds_chart
from .participation import build_norms_chart, participation, build_refusals_chart, build_coverage_chart
from .spending import build_uploads_chart, build_time_chart
from .targets import build_targets_chart
from .tradeoff import build_pareto_chart

__all__ = ["COMPARED", "SINGLE", "Absent", "Chart", "Mark", "Panel"]

Maker = Callable[[ReportData], Chart | MissingChart]
COMPARED: tuple[Maker, ...] = (
    build_arms_chart, build_differences_chart, build_rounds_chart, build_bytes_chart, build_targets_chart, build_pareto_chart, build_devices_chart, build_time_chart,
)  # fmt: skip
"""Of all arms and seeds together."""

SINGLE: tuple[Maker, ...] = (
    build_personalized_chart, participation, build_coverage_chart, build_partition_chart, build_cka_chart, build_refusals_chart, build_norms_chart, build_uploads_chart,
)  # fmt: skip
"""Of one run; where there are several, of the first."""

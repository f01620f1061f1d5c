"""The report's figures, in the order in which they are shown."""

from collections.abc import Callable

from ..report_data import ReportData
from .arms import paired, served
from .cka import likeness
from .devices import accuracy_per_device, data_partition, personalized
from .drawing import Absent, Chart, Mark, Panel
from .learning import against_bytes, against_rounds
from .participation import norms, participation, refusals, votes
from .spending import left_the_devices, time_and_memory
from .targets import rounds_to_target
from .tradeoff import pareto

__all__ = ["COMPARED", "SINGLE", "Absent", "Chart", "Mark", "Panel"]

Maker = Callable[[ReportData], Chart | Absent]
COMPARED: tuple[Maker, ...] = (
    served, paired, against_rounds, against_bytes, rounds_to_target, pareto, accuracy_per_device, time_and_memory,
)  # fmt: skip
"""Of all arms and seeds together."""

SINGLE: tuple[Maker, ...] = (
    personalized, participation, votes, data_partition, likeness, refusals, norms, left_the_devices,
)  # fmt: skip
"""Of one run; where there are several, of the first."""

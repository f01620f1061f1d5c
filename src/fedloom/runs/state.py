"""What a run knows of its earlier rounds besides server state and client states. Small, and all JSON."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from typing import Any
from uuid import uuid4

from ..engines import Refusal
from ..engines.gate import CODES
from ..fleet import Device, RoundContext
from ..wording import pluralize


@dataclass
class RunState:
    region_ages: dict[str, int] = field(default_factory=dict)  # rounds since a coverage region was last updated
    failed_in_a_row: int = 0  # rounds
    refused_in_a_row: dict[str, int] = field(default_factory=dict)  # rounds, by device
    norm_history: dict[str, list[float]] = field(default_factory=dict)  # of admitted updates, by tier and task
    proxy_log_offset: int = 0  # bytes of the log of rejected connections that are reported
    run_id: str = field(default_factory=lambda: uuid4().hex)  # by which real devices know the run

    def is_quarantined(self, device: Device, limit: int | None) -> bool:
        """Whether a device was refused so many rounds in a row that it is not asked any more."""
        return limit is not None and self.refused_in_a_row.get(device.name, 0) >= limit

    def note_refusals(self, context: RoundContext, refusals: Sequence[Refusal], limit: int) -> list[Refusal]:
        """Count refused rounds per device and return those that are quarantined from now on.

        An admitted reply resets the count; a reply that never came changes nothing.
        """
        refused = {refusal.device for refusal in refusals if refusal.code in CODES}
        named = {refusal.device for refusal in refusals}
        quarantined = []
        for name in sorted(device.name for device in context.cohort if device.name in context.traffic.devices):
            if name not in named:
                self.refused_in_a_row.pop(name, None)
            elif name in refused:
                self.refused_in_a_row[name] = self.refused_in_a_row.get(name, 0) + 1
                if self.refused_in_a_row[name] == limit:
                    reason = f"refused {pluralize(limit, 'round')} in a row: not asked any more"
                    quarantined.append(Refusal(name, "QUARANTINE", reason))
        return quarantined

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def restore(self, document: Mapping[str, Any]) -> None:
        """Set all fields to what was saved; those that were not saved are as at the start."""
        fresh = RunState()
        for item in fields(self):
            setattr(self, item.name, deepcopy(document.get(item.name, getattr(fresh, item.name))))

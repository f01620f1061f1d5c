"""What a run must know of its past beside the server's state and the devices' memories. Small, and all JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RunState:
    ages: dict[str, int] = field(default_factory=dict)  # for how many rounds nobody was heard on a ring of tiers
    failed_in_a_row: int = 0  # rounds
    others: dict[str, Any] = field(default_factory=dict)  # whatever else has to be known, each under its own name

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> "RunState":
        made = cls()
        made.restore(said)
        return made

    def restore(self, said: Mapping[str, Any]) -> None:
        """As it was when this was written; what was not written is as at the start."""
        self.ages = dict(said.get("ages", {}))
        self.failed_in_a_row = int(said.get("failed_in_a_row", 0))
        self.others = dict(said.get("others", {}))

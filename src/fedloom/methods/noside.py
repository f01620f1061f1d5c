"""NoSide: FedHeN without its side objective, so complex devices never train the exit. Acar & Saligrama, 2022."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..client import Client, Outcome, fit, label_loss, like, on_device
from ..fleet import Candidate, Device, Fleet, Reply, Tier, Turn, slices
from ..footprints import Contribution, Footprint
from ..tensors import Parcel, Tensors
from ._last_uploads import KEPT, received, report_problem, reports, with_latest
from .method import Method


@dataclass(frozen=True)
class NoSide(Method):
    """`exit_head`: average it over all devices, as the paper's line 18 has it, although complex ones return it as they
    got it; or over those that train it. `report` as in fedhen."""

    paper = "Acar & Saligrama, 2022"
    leaves, keeps, gives = "weights up to the device's own depth", "nothing", "global"

    exit_head: Literal["all", "trained_only"] = "all"
    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        first = super().start(fleet, seed, warm)
        return with_latest(first, fleet) if self.report else first

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in turn.cohort}
        replies = turn.ask(self.train, inboxes)
        merged = turn.merge(server["weights"], map(self._contribution, replies))
        return {**server, "weights": merged, **received(server, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        trained = client.model.behind_last_exit()
        return Outcome(send={"weights": fit(client, inbox["weights"], label_loss(client), only=trained)})

    def _contribution(self, reply: Reply) -> Contribution:
        return Contribution(self._spoken_for(reply.device), reply.sent["weights"], 1.0)

    def _spoken_for(self, by: Device | Tier) -> Footprint:
        return by.footprint.only(*by.model.behind_last_exit()) if self.exit_head == "trained_only" else by.footprint

    def votes_on(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return self._spoken_for(tier)

    @property
    def unmerged(self) -> str:
        return KEPT if self.report else ""

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        return {"server": slices(server["weights"]), **reports(server)}

    def objection(self, fleet: Fleet) -> str | None:
        return report_problem("noside", fleet) if self.report else None

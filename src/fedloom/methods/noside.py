"""NoSide: FedHeN without its side objective, so complex devices never train the exit. Acar & Saligrama, 2022."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..client import Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import Device, EvalTarget, Fleet, Reply, RoundContext, Tier, slices
from ..footprints import ClientUpdate, Footprint
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

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        merged = context.aggregate(server["weights"], map(self._contribution, replies))
        return {**server, "weights": merged, **received(server, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        trained = client.model.last_exit_weights()
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client), only=trained)})

    def _contribution(self, reply: Reply) -> ClientUpdate:
        return ClientUpdate(self._spoken_for(reply.device), reply.sent["weights"], 1.0)

    def _spoken_for(self, by: Device | Tier) -> Footprint:
        return by.footprint.only(*by.model.last_exit_weights()) if self.exit_head == "trained_only" else by.footprint

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return self._spoken_for(tier)

    @property
    def dp_uncovered(self) -> str:
        return KEPT if self.report else ""

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": slices(server["weights"]), **reports(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return report_problem("noside", fleet) if self.report else None

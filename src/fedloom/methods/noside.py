"""NoSide: FedHeN without its side objective, so complex devices never train the exit. Acar & Saligrama, 2022."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..client import Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import Device, EvalTarget, Fleet, Reply, RoundContext, Tier, tier_slices
from ..footprints import ClientUpdate, Footprint
from ..tensors import Parcel, Tensors
from ._last_uploads import KEPT_UPLOADS, initial_uploads, report_problem, report_targets, updated_uploads
from .method import Method, MethodInfo, early_exit_problem


@dataclass(frozen=True)
class NoSide(Method):
    """NoSide: FedHeN without its side objective, so that complex devices never train the exit.

    Parameters
    ----------
    exit_head : which devices the exit's head is averaged over: "all", as in line 18 of the paper, although complex
        devices return it untrained; or only those that train it.
    report : whether to evaluate also the mean of each device's last upload, as the paper's figures do; the server then
        keeps a model for every device.
    """

    info = MethodInfo(paper="Acar & Saligrama, 2022", uploads="weights up to the device's own depth")

    exit_head: Literal["all", "trained_only"] = "all"
    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, **initial_uploads(fleet, server["weights"])} if self.report else server

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        weights = context.aggregate(server["weights"], map(self._client_update, replies))
        return {**server, "weights": weights, **updated_uploads(server, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        trained = client.model.last_exit_weights()
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client), only=trained)})

    def _client_update(self, reply: Reply) -> ClientUpdate:
        return ClientUpdate(self._update_footprint(reply.device), reply.upload["weights"], 1.0)

    def _update_footprint(self, target: Device | Tier) -> Footprint:
        if self.exit_head == "trained_only":
            return target.footprint.only(*target.model.last_exit_weights())
        return target.footprint

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return self._update_footprint(tier)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": tier_slices(server["weights"]), **report_targets(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = early_exit_problem("noside", fleet)
        return problem or (report_problem("noside", fleet) if self.report else None)

    @property
    def dp_uncovered(self) -> str:
        return KEPT_UPLOADS if self.report else ""

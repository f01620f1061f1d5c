"""FedHeN. Acar & Saligrama, Federated Learning in Heterogeneous Networks, 2022, Algorithm 1.

Simple devices train the model up to an early exit. Complex devices train the whole model and, as a side objective on
the same batch, that exit too, so that the shared layers serve both kinds when the server averages them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, like, on_device, supervised_loss
from ..fleet import EvalTarget, Fleet, RoundContext, tier_slices
from ..footprints import ClientUpdate
from ..tensors import Parcel, Tensors
from ._last_uploads import KEPT_UPLOADS, initial_uploads, report_problem, report_targets, updated_uploads
from .method import Method, MethodInfo, early_exit_problem


@dataclass(frozen=True)
class FedHeN(Method):
    """FedHeN: simple devices train up to an early exit, and complex ones the whole model and that exit too.

    Parameters
    ----------
    report : whether to evaluate also the mean of each device's last upload, as the paper's figures do; the server then
        keeps a model for every device.
    """

    info = MethodInfo(paper="Acar & Saligrama, 2022", uploads="weights up to the device's own depth")

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, **initial_uploads(fleet, server["weights"])} if self.report else server

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], 1.0) for reply in replies)
        weights = context.aggregate(server["weights"], updates)
        return {**server, "weights": weights, **updated_uploads(server, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            exits = client.model(weights, batch.x, batch.step_seeds).exits  # one if simple, two if complex
            return torch.stack([supervised_loss(logits, batch) for logits in exits.values()]).sum(0)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": tier_slices(server["weights"]), **report_targets(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = early_exit_problem("fedhen", fleet)
        return problem or (report_problem("fedhen", fleet) if self.report else None)

    @property
    def dp_uncovered(self) -> str:
        return KEPT_UPLOADS if self.report else ""

"""FedHeN. Acar & Saligrama, Federated Learning in Heterogeneous Networks, 2022, Algorithm 1.

Simple devices train the net up to an early exit, complex ones the whole net and, as a side objective on the same batch,
that exit too. So what the two kinds share means the same to both when the server averages it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, cross_entropy, fit, like, on_device
from ..fleet import EvalTarget, Fleet, RoundContext, slices
from ..footprints import ClientUpdate
from ..tensors import Parcel, Tensors
from ._last_uploads import KEPT, received, report_problem, reports, with_latest
from .method import Method


@dataclass(frozen=True)
class FedHeN(Method):
    """`report` also judges the mean of what each device sent last, as the paper's figures do: the server then keeps a
    model for every device."""

    paper = "Acar & Saligrama, 2022"
    leaves, keeps, gives = "weights up to the device's own depth", "nothing", "global"

    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        first = super().start(fleet, seed, warm)
        return with_latest(first, fleet) if self.report else first

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        said = (ClientUpdate(reply.device.footprint, reply.sent["weights"], 1.0) for reply in replies)
        return {**server, "weights": context.aggregate(server["weights"], said), **received(server, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            exits = client.model(weights, batch.x, batch.step_seeds).exits  # a simple device has one, a complex one two
            return torch.stack([cross_entropy(logits, batch) for logits in exits.values()]).sum(0)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    @property
    def dp_uncovered(self) -> str:
        return KEPT if self.report else ""

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": slices(server["weights"]), **reports(server)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return report_problem("fedhen", fleet) if self.report else None

"""FedDyn. Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021, Algorithm 1.

Every device keeps an estimate of its gradient, by which its loss is changed, so that what is stationary for all devices
is stationary for the global model. The server keeps h, the mean of these over all devices. With nested models h is a
mean entry by entry, over the devices whose slice has the entry; entries that no reply covers keep weights and h.

The authors' code differs from the paper: it divides alpha by a device's number of examples, relative to the mean of all
devices, clips gradients, and reports the mean of the uploads, without h. Here all is as in the paper, and the server's
model is evaluated.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import Device, Fleet, RoundContext
from ..footprints import ClientUpdate
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine
from ._dynamic_regularization import average_and_correct, dynamic_regularizer, next_gradient
from .method import Method, MethodInfo, fixed_tiers_problem


@dataclass(frozen=True)
class FedDyn(Method):
    """FedDyn: a dynamic regularizer on every device makes local optima agree with the global one.

    Parameters
    ----------
    alpha : the strength of the regularizer; 0: none, which is FedAvg with equal weights. That is not the limit of small
        values: the server's correction h / alpha does not depend on alpha.
    """

    info = MethodInfo(
        paper="Acar et al., ICLR 2021",
        uploads="weights of the device's slice",
        client_state="an estimate of its gradient",
        server_step="corrects the average by a state of its own",
    )

    alpha: Annotated[NonNegative, SearchRange(0.001, 0.1, log=True)] = 0.01

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, "h": combine(torch.zeros_like, server["weights"])}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"gradient": {name: torch.zeros(shape) for name, shape in device.model.shapes().items()}}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        before = server["weights"]
        replies = context.ask(
            self.train, {device: {"weights": device.footprint.read(before)} for device in context.cohort}
        )
        updates = [ClientUpdate(reply.device.footprint, reply.upload["weights"], 1.0) for reply in replies]
        if not self.alpha:
            return {"weights": context.aggregate(before, updates), "h": server["h"]}
        weights, h = average_and_correct(context, before, server["h"], replies, updates, self.alpha)
        return {"weights": weights, "h": h}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        received, local_gradient, labels = inbox["weights"], client.state["gradient"], label_loss(client)

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            regularizer = dynamic_regularizer(weights, received, local_gradient, self.alpha)
            return labels(weights, batch) + regularizer

        trained = fit(client, received, loss)
        after = next_gradient(local_gradient, trained, received, self.alpha)
        return ClientResult(upload={"weights": trained}, state={"gradient": after})

    def check_fleet(self, fleet: Fleet) -> str | None:
        return fixed_tiers_problem(fleet)

    @property
    def dp_uncovered(self) -> str:
        return "whether it replied, which the server's state h is scaled by"

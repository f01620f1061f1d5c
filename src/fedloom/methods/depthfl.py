"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients. Kim, Yu, Kim & Moon, ICLR 2023.

A device trains the first stages of the global model, as many as it can run, with a classifier after every stage. The
classifiers of a device teach each other, so that deep ones, which few devices train, learn from shallow ones too.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, distillation_loss, fit, like, on_device, supervised_loss
from ..fleet import Device, Fleet, RoundContext
from ..footprints import ClientUpdate
from ..settings import FrozenDict, Natural, NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine
from ._dynamic_regularization import average_and_correct, dynamic_regularizer, next_gradient
from .method import Method, MethodInfo, early_exit_problem, fixed_tiers_problem


@dataclass(frozen=True)
class DepthFL(Method):
    """DepthFL: devices train as many stages as they can run, and the classifiers after these stages teach each other.

    A device's loss is the sum over its classifiers of the loss with the labels and the mean divergence from its other
    classifiers, KL(other || this), whose outputs get no gradient. A weight is averaged over the devices that hold it,
    equally. All of it is as in the Flower baseline of the first author, which also adds 1e-7 to the teachers'
    probabilities. The accuracy of the global model is that of all classifiers together there; here a tier is evaluated
    by its last one, as in Table 3.

    Parameters
    ----------
    distillation : the weight of the divergence between classifiers, once it has grown; 0: none.
    ramp_up : the rounds over which that weight grows as exp(-5 (1 - t / ramp_up)^2), as in that baseline; 0: it is
        constant.
    feddyn : the strength of FedDyn's dynamic regularization, its alpha: 0.1 in the rows "DepthFL" of Table 2; 0, as in
        its rows "DepthFL (FedAvg)": none. With it devices keep a correction, and train with plain SGD. As in that
        baseline the server's h is a mean over all devices, also for weights that only some of them hold.
    """

    info = MethodInfo(
        paper="Kim et al., ICLR 2023",
        uploads="weights up to the device's own depth",
        client_state="FedDyn's correction if method.feddyn is set, else nothing",
        example_settings=FrozenDict(ramp_up=5),
        example_nets="exits",
    )

    distillation: Annotated[NonNegative, SearchRange(0.1, 10.0, log=True)] = 1.0
    ramp_up: Natural = 300
    feddyn: NonNegative = 0.0

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, "correction": combine(torch.zeros_like, server["weights"])} if self.feddyn else server

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        shapes = device.model.shapes()
        return {"correction": {name: torch.zeros(shape) for name, shape in shapes.items()}} if self.feddyn else {}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        strength = self.strength_at(context.number)
        extra = {"distillation": {"strength": torch.tensor(strength)}} if strength else {}
        inboxes = {d: {"weights": d.footprint.read(server["weights"]), **extra} for d in context.cohort}
        replies = context.ask(self.train, inboxes)
        updates = [ClientUpdate(reply.device.footprint, reply.upload["weights"], 1.0) for reply in replies]
        if not self.feddyn:
            return {"weights": context.aggregate(server["weights"], updates)}
        weights, h = average_and_correct(
            context, server["weights"], server["correction"], replies, updates, self.feddyn, of="everyone"
        )
        return {"weights": weights, "correction": h}

    def strength_at(self, round_number: int) -> float:
        """The weight of the divergence in a round.

        Parameters
        ----------
        round_number : the round, from 1.
        """
        missing = max(0.0, 1 - (round_number - 1) / self.ramp_up) if self.ramp_up else 0.0
        return self.distillation * math.exp(-5 * missing**2)

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        received = inbox["weights"]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            exits = list(client.model(weights, batch.x, batch.step_seeds).exits.values())
            total = torch.stack([supervised_loss(logits, batch) for logits in exits]).sum(0)
            if "distillation" in inbox and len(exits) > 1:
                pairs = [(this, other) for this in exits for other in exits if other is not this]
                divergence = torch.stack([distillation_loss(*pair, client.task) for pair in pairs]).sum(0)
                total = total + inbox["distillation"]["strength"] / (len(exits) - 1) * divergence
            if self.feddyn:
                total = total + dynamic_regularizer(weights, received, client.state["correction"], self.feddyn)
            return total

        trained = fit(client, received, loss)
        if not self.feddyn:
            return ClientResult(upload={"weights": trained})
        after = next_gradient(client.state["correction"], trained, received, self.feddyn)
        return ClientResult(upload={"weights": trained}, state={"correction": after})

    def check_fleet(self, fleet: Fleet) -> str | None:
        return early_exit_problem("depthfl", fleet) or (fixed_tiers_problem(fleet) if self.feddyn else None)

    @property
    def server_step(self) -> str:
        return "corrects the average by FedDyn's state, method.feddyn" if self.feddyn else ""

    @property
    def dp_uncovered(self) -> str:
        return "which weights it trained, by which FedDyn is scaled (set method.feddyn = 0)" if self.feddyn else ""

"""DepthFL: Depthwise Federated Learning for Heterogeneous Clients. Kim, Yu, Kim & Moon, ICLR 2023.

A device trains the first stages of the global model, as many as it can run, with a classifier after every stage. The
classifiers of a device teach each other, so that deep ones, which few devices train, learn from shallow ones too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, distance, distillation_loss, fit, like, on_device, supervised_loss
from ..fleet import Device, Fleet, Reply, RoundContext
from ..footprints import ClientUpdate
from ..settings import FrozenDict, Natural, NonNegative
from ..tensors import Parcel, Tensors, combine, inner
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
        its rows "DepthFL (FedAvg)": none. Devices then keep a correction, and train with plain SGD.
    """

    info = MethodInfo(
        paper="Kim et al., ICLR 2023",
        uploads="weights up to the device's own depth",
        client_state="FedDyn's correction if method.feddyn is set, else nothing",
        example_settings=FrozenDict(ramp_up=5),
    )

    distillation: NonNegative = 1.0
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
        weights = context.aggregate(server["weights"], updates)
        return self._corrected(server, weights, replies, context) if self.feddyn else {"weights": weights}

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
                total = total - inner(client.state["correction"], weights) + self.feddyn * distance(weights, received)
            return total

        trained = fit(client, received, loss)
        if not self.feddyn:
            return ClientResult(upload={"weights": trained})
        moved = combine(
            lambda c, new, old: c - self.feddyn * (new - old), client.state["correction"], trained, received
        )
        return ClientResult(upload={"weights": trained}, state={"correction": moved})

    def _corrected(self, server: Parcel, mean: Tensors, replies: Sequence[Reply], context: RoundContext) -> Parcel:
        """FedDyn's server step, entry by entry: h moves by the share of all devices that trained the entry."""
        old, devices = server["weights"], len(context.fleet.eligible_indices(context.number))
        zeros, ones = combine(torch.zeros_like, old), combine(torch.ones_like, old)
        trained_by = zeros
        for reply in replies:
            footprint = reply.device.footprint
            trained_by = combine(torch.add, trained_by, footprint.write(zeros, footprint.read(ones)))
        correction = combine(
            lambda h, count, new, before: h - self.feddyn * count / devices * (new - before),
            server["correction"],
            trained_by,
            mean,
            old,
        )
        weights = combine(
            lambda new, h, count: torch.where(count > 0, new - h / self.feddyn, new), mean, correction, trained_by
        )
        return {"weights": weights, "correction": correction}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return early_exit_problem("depthfl", fleet) or (fixed_tiers_problem(fleet) if self.feddyn else None)

    @property
    def dp_uncovered(self) -> str:
        return "which weights it trained, by which FedDyn is scaled (set method.feddyn = 0)" if self.feddyn else ""

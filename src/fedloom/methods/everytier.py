"""EveryTier: nested models whose sizes all learn on every device that can run them, calibrated for unequal labels.

A method of fedloom's own, made of known parts: larger devices also train the exits of smaller ones on the same batch
(FedHeN, Acar & Saligrama, 2022; DepthFL, Kim et al., ICLR 2023), a device's loss takes account of how often it has
each label (logit adjustment, Menon et al., ICLR 2021; in federated learning Zhang et al., FedLC, ICML 2022), and, if
wanted, the drift of local training is corrected (FedDyn, Acar et al., ICLR 2021). Ours are their combination and the
net that it is made for, `columnnet`, whose larger sizes correct the answer of smaller ones.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, like, on_device, supervised_loss
from ..data import LearningTask
from ..fleet import Device, Fleet, RoundContext
from ..footprints import ClientUpdate
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine
from ._dynamic_regularization import average_and_correct, dynamic_regularizer, next_gradient
from .method import EXAMPLE_COUNT, Method, MethodInfo, early_exit_problem, fixed_tiers_problem


@dataclass(frozen=True)
class EveryTier(Method):
    """EveryTier: every size of a nested model learns on every device that can run it, and all labels count alike.

    A device trains all exits that it has: the loss is the sum of theirs. A weight is averaged over the devices that
    hold it. Before the loss, a device adds the logarithms of its own labels' shares to the logits, so that the model
    learns to tell labels apart as if all were equally frequent; the shares stay on the device. With a net of one exit
    and `calibration = 0` this is FedAvg, or with `feddyn` FedDyn.

    Parameters
    ----------
    calibration : what these logarithms are multiplied by; 0: none. Tasks without class labels have none.
    feddyn : the strength of FedDyn's dynamic regularization, its alpha; 0: none. With it devices keep an estimate of
        their gradient, of their own size, and stay in one tier.
    weighting : the weight of a device in the average: the number of its examples, or the same for all.
    exits : which exits a device trains: "all" that it has, or only its "own", the last, as if it knew no smaller model.
    """

    info = MethodInfo(
        paper="fedloom; after Acar & Saligrama, 2022, and Menon et al., ICLR 2021",
        uploads="weights up to the device's own size, example count",
        client_state="FedDyn's estimate of its gradient if method.feddyn is set, else nothing",
        example_nets="columns",
    )

    calibration: Annotated[NonNegative, SearchRange(0.25, 2.0, log=True)] = 1.0
    feddyn: Annotated[NonNegative, SearchRange(0.0, 0.2)] = 0.0
    weighting: Literal["examples", "uniform"] = "examples"
    exits: Literal["all", "own"] = "all"

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, "h": combine(torch.zeros_like, server["weights"])} if self.feddyn else server

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        shapes = device.model.shapes()
        return {"gradient": {name: torch.zeros(shape) for name, shape in shapes.items()}} if self.feddyn else {}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        by_examples = self.weighting == "examples"
        updates = [
            ClientUpdate(r.device.footprint, r.upload["weights"], r.examples if by_examples else 1.0) for r in replies
        ]
        if not self.feddyn:
            return {"weights": context.aggregate(server["weights"], updates)}
        weights, h = average_and_correct(context, server["weights"], server["h"], replies, updates, self.feddyn)
        return {"weights": weights, "h": h}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        received = inbox["weights"]
        calibrates = self.calibration > 0 and client.task.has_label_sets
        counts = client.label_counts() if calibrates else None

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            outputs = client.model(weights, batch.x, batch.step_seeds)
            exits = list(outputs.exits.values()) if self.exits == "all" else [outputs.logits]
            if counts is not None:
                exits = [add_label_prior(logits, counts, self.calibration) for logits in exits]
            total = torch.stack([supervised_loss(logits, batch) for logits in exits]).sum(0)
            if self.feddyn:
                total = total + dynamic_regularizer(weights, received, client.state["gradient"], self.feddyn)
            return total

        trained = fit(client, received, loss)
        if not self.feddyn:
            return ClientResult(upload={"weights": trained})
        after = next_gradient(client.state["gradient"], trained, received, self.feddyn)
        return ClientResult(upload={"weights": trained}, state={"gradient": after})

    def check_fleet(self, fleet: Fleet) -> str | None:
        sizes = {tuple(tier.model.shapes().items()) for tier in fleet.active_tiers}
        problem = early_exit_problem("everytier", fleet) if len(sizes) > 1 else None
        return problem or (fixed_tiers_problem(fleet) if self.feddyn else None)

    def check_task(self, task: LearningTask, given: Collection[str] = ()) -> str | None:
        if task.has_label_sets or "calibration" not in given or not self.calibration:
            return None
        return f"method.calibration is about the labels that a device has, and {task.kind} has none; leave it out"

    @property
    def server_step(self) -> str:
        return "corrects the average by FedDyn's state, method.feddyn" if self.feddyn else ""

    @property
    def dp_uncovered(self) -> str:
        if self.feddyn:
            return "whether it replied, by which FedDyn's state is scaled (set method.feddyn = 0)"
        return EXAMPLE_COUNT if self.weighting == "examples" else ""


def add_label_prior(logits: Tensor, label_counts: Tensor, strength: float = 1.0) -> Tensor:
    """Logits as a device's own labels shift them, to train a model that does not know how often a device has a label.

    The logarithm of a label's share among the device's examples is added, counting one example more of each label. What
    is learned by the cross entropy of that sum are the logits for labels that are equally frequent: logit adjustment
    (Menon et al., ICLR 2021), or balanced softmax (Ren et al., NeurIPS 2020).

    Parameters
    ----------
    logits : [K, batch, ..., classes].
    label_counts : how often each device has each label, [K, classes].
    strength : what the logarithm is multiplied by.
    """
    smoothed = label_counts + 1
    prior = strength * (smoothed / smoothed.sum(1, keepdim=True)).log()
    inner_axes = [1] * (logits.dim() - 2)
    return logits + prior.to(logits.dtype).view(len(prior), *inner_axes, logits.shape[-1])

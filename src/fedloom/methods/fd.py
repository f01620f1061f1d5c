"""Federated distillation (FD). Jeong et al., Communication-Efficient On-Device Machine Learning, 2018, Algorithm 1.

Devices with any models share their mean outputs on the examples of each class. A device's outputs on an example are
also drawn to what the other devices predict, on average, for its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, Layout, fit, on_device, supervised_loss
from ..fleet import Fleet, Reply, RoundContext
from ..models import Model
from ..settings import NonNegative, SearchRange
from ..tensors import Parcel, Tensors
from ._personal import PersonalModels
from ._prototypes import class_sums
from .method import MethodInfo, one_prediction_problem


@dataclass(frozen=True)
class FD(PersonalModels):
    """FD: devices with any models share their mean outputs for each class, and learn from those of the others.

    Outputs are probabilities, averaged while a device trains, and a device's target leaves its own out, as in the
    paper. A class that only some devices have is averaged over these. HtFLlib's program differs: it shares raw logits,
    and its targets include the device's own.

    Parameters
    ----------
    strength : the paper's gamma, the weight of the cross entropy with the others' outputs. It has no published value.
    """

    info = MethodInfo(
        paper="Jeong et al., 2018",
        uploads="mean outputs on the examples of each class, the set of its labels",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
        example_nets="unrelated",
        needs="class_labels",
    )

    strength: Annotated[NonNegative, SearchRange(0.1, 10.0, log=True)] = 1.0

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        classes, names = fleet.global_model.classes, [device.name for device in fleet.eligible_devices(1)]
        return {
            "mean": {name: torch.zeros(classes, classes) for name in names},
            "known": {name: torch.zeros(classes, dtype=torch.bool) for name in names},
        }

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        targets = {device: {name: server[name][device.name] for name in ("mean", "known")} for device in context.cohort}
        replies = context.ask(self.train, {device: {"target": target} for device, target in targets.items()})
        return ensemble(server, replies)

    @on_device(sends={"outputs": "upload_layout"}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        target, seen = inbox["target"], client.seen_labels
        row = torch.arange(len(seen), device=seen.device).unsqueeze(1)
        sums: list[tuple[Tensor, Tensor]] = []

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = client.model(weights, batch.x, batch.step_seeds).logits
            sums.append(
                class_sums(logits.detach().softmax(-1), batch.y, batch.takes_step.unsqueeze(1), client.model.classes)
            )
            cross_entropy = -(target["mean"][row, batch.y] * logits.log_softmax(-1)).sum(-1)
            distillation = (cross_entropy * target["known"][row, batch.y]).mean(-1)
            return supervised_loss(logits, batch) + self.strength * distillation

        weights = fit(client, client.state["weights"], loss)
        total, count = (torch.stack(each).sum(0) for each in zip(*sums, strict=True))
        outputs = {"mean": total / count.clamp_min(1).unsqueeze(-1), "seen": count > 0}
        return ClientResult(upload={"outputs": outputs}, state={"weights": weights})

    def upload_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        classes = model.classes
        return {"mean": ((classes, classes), torch.get_default_dtype()), "seen": ((classes,), torch.bool)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return one_prediction_problem("fd", fleet) or super().check_fleet(fleet)


def ensemble(server: Parcel, replies: Sequence[Reply]) -> Parcel:
    """Each device's target: the mean over the other devices that have a class. Without any, the earlier one stays."""
    if not replies:
        return server
    uploads = {reply.device.name: reply.upload["outputs"] for reply in replies}
    sums = {
        name: (one["mean"].double() * one["seen"].unsqueeze(-1), one["seen"].long()) for name, one in uploads.items()
    }
    total, count = (torch.stack(each).sum(0) for each in zip(*sums.values(), strict=True))
    mean, known = dict(server["mean"]), dict(server["known"])
    for name, old in server["mean"].items():
        own, has = sums.get(name, (torch.zeros_like(total), torch.zeros_like(count)))
        others = (count - has).unsqueeze(-1)
        mean[name] = torch.where(others > 0, (total - own) / others.clamp_min(1), old.double()).to(old)
        known[name] = known[name] | (count > has)
    return {"mean": mean, "known": known}

"""HeteroFL. Diao, Ding & Tarokh, ICLR 2021, Algorithm 1.

Each device trains the leading channels of the global model, as many as it can run. The server averages each weight
over the devices that hold it. The width scaler and static batch norm belong to the model, not to the method.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Interval
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, like, mask_logits, on_device, shaped, supervised_loss
from ..data import LearningTask
from ..fleet import EvalTarget, Fleet, Reply, RoundContext, tier_slices
from ..footprints import ClientUpdate
from ..tensors import Parcel, Tensors
from .method import EXAMPLE_COUNT, Method, MethodInfo


@dataclass(frozen=True)
class HeteroFL(Method):
    """HeteroFL: each device trains the leading channels of the global model that it can run.

    Parameters
    ----------
    mask_unseen_labels : whether the logits of labels that a device does not have are replaced by `unseen_logit`, in
        training and in evaluation on the device.
    unseen_logit : what they are replaced by: 0 as published; -inf excludes these labels.
    only_seen_rows : whether a device updates only the classifier rows of its own labels, whatever is masked. Tasks in
        which a device has no set of labels, such as regression, have neither: all rows count.
    weighting : the weight of a device in the average: the same for all, as published, or the number of its examples.
    """

    info = MethodInfo(
        paper="Diao, Ding & Tarokh, ICLR 2021", uploads="weights of the device's slice, the set of its labels"
    )

    mask_unseen_labels: bool = True
    unseen_logit: Annotated[float, Interval(ge=-math.inf, lt=math.inf)] = 0.0
    only_seen_rows: bool = True
    weighting: Literal["uniform", "examples"] = "uniform"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        return {"weights": context.aggregate(server["weights"], map(self._client_update, replies))}

    @on_device(sends={"weights": like("weights"), "labels": shaped(seen=(("classes",), torch.bool))})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            logits = client.model(weights, batch.x, batch.step_seeds).logits
            return supervised_loss(mask_logits(logits, client.seen_labels, self._masked_logit), batch)

        weights = fit(client, inbox["weights"], loss)
        return ClientResult(upload={"weights": weights, "labels": {"seen": client.seen_labels}})

    def _client_update(self, reply: Reply) -> ClientUpdate:
        """The device's slice, without the classifier rows of labels it has not seen."""
        footprint, weights = reply.device.footprint, dict(reply.upload["weights"])
        if self.only_seen_rows:
            seen = reply.upload["labels"]["seen"]
            for name in reply.device.model.label_rows():
                keep = torch.zeros(len(weights[name]), dtype=torch.bool)  # rows beyond the labels stay False
                keep[: len(seen)] = seen
                footprint = footprint.restrict(name, axis=0, keep=keep)
                weights[name] = weights[name][keep]
        return ClientUpdate(footprint, weights, reply.examples if self.weighting == "examples" else 1.0)

    @property
    def _masked_logit(self) -> float | None:
        return self.unseen_logit if self.mask_unseen_labels else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"server": tier_slices(server["weights"], self._masked_logit)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        family = fleet.global_model.family
        if self.only_seen_rows and not fleet.global_model.label_rows():
            return (
                f"heterofl averages classifier rows by label, and {family} ends in no layer with one row per class; "
                "name the rows in the module's attribute `label_rows`, or set method.only_seen_rows = false"
            )
        return None

    def check_task(self, task: LearningTask, given: Collection[str] = ()) -> str | None:
        asked = [name for name in ("mask_unseen_labels", "only_seen_rows") if name in given and getattr(self, name)]
        if task.has_label_sets or not asked:
            return None
        return f"method.{asked[0]} is about the labels that a device has, and {task.kind} has none; leave it out"

    @property
    def dp_uncovered(self) -> str:
        if self.only_seen_rows:
            return "the set of its labels (set method.only_seen_rows = false to avoid it)"
        return EXAMPLE_COUNT if self.weighting == "examples" else ""

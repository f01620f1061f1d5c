"""FedSup. Kim & Yun, Supernet Training for Federated Image Classification, 2022, Algorithm 1.

Every device has the whole supernet and trains, on each batch, the largest net on the labels and a few sub-nets on the
largest one's answers. The server averages. Any sub-net can then be cut out, for whatever device.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    Stream,
    cross_entropy,
    distance,
    draw_subnets,
    fit,
    like,
    on_device,
    soft_cross_entropy,
    subnet_logits,
)
from ..fleet import Fleet, RoundContext
from ..footprints import ClientUpdate
from ..models import Model
from ..settings import Count, NotNegative
from ..tensors import Parcel, Tensors
from ._supernet import Choice, chosen, space_problem
from .method import Method


@dataclass(frozen=True)
class FedSup(Method):
    """`subnets` are trained on each batch (the paper's M): with `sandwich` the largest, random ones and, from three on,
    the smallest; else random ones, of which the first learns the labels. `space` says what may be drawn: what the
    tiers differ in, a space by name, or lists of choices. `proximal` holds devices to where they started."""

    paper = "Kim & Yun, 2022"
    leaves, keeps, gives = "weights of the supernet, example count", "nothing", "global"

    space: Choice = "tiers"
    subnets: Count = 3
    sandwich: bool = True
    distillation: bool = True
    proximal: NotNegative = 0.0
    subnet_stream: Stream = "device"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        cohort = [
            device.with_model(context.fleet.global_model, context.fleet.global_model) for device in context.cohort
        ]
        inboxes = {device: {"weights": server["weights"]} for device in cohort}
        replies = context.ask(self.train, inboxes)
        said = (ClientUpdate(reply.device.footprint, reply.sent["weights"], reply.examples) for reply in replies)
        return {"weights": context.aggregate(server["weights"], said)}

    @on_device(sends={"weights": like("weights")}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            whole, (first, *others) = client.model, self._nets(client, batch)
            logits = subnet_logits(first, whole, weights, batch)
            teacher = logits if self.sandwich or not others else whole(weights, batch.x, batch.step_seeds).logits
            total = cross_entropy(logits, batch)
            for nets in others:
                made = subnet_logits(nets, whole, weights, batch)
                total = total + (soft_cross_entropy(made, teacher) if self.distillation else cross_entropy(made, batch))
            return total + self.proximal * distance(weights, inbox["weights"]) if self.proximal else total

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    def _nets(self, client: Client, batch: Batch) -> list[list[Model]]:
        """What is trained on this batch, the first on its labels."""
        whole, choices = client.model, chosen(self.space, tuple(client.sizes.values()))
        draw = partial(draw_subnets, partial(choices.sample, whole), batch.step_seeds, self.subnet_stream)
        if not self.sandwich:
            return [draw(number) for number in range(self.subnets)]
        drawn = [draw(number) for number in range(1, self.subnets)]
        return [[whole], *drawn] if self.subnets < 3 else [[whole], *drawn[:-1], [choices.smallest(whole)]]

    def check_fleet(self, fleet: Fleet) -> str | None:
        return space_problem("fedsup", self.space, fleet)

"""FedSup. Kim & Yun, Supernet Training for Federated Image Classification, 2022, Algorithm 1.

Every device holds the whole supernet. On each batch it trains the largest net on the labels and a few subnets on the
largest one's logits. The server averages. Afterwards any subnet can be cut out for any device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    SubnetStream,
    distance,
    distillation_loss,
    draw_subnets,
    fit,
    like,
    on_device,
    subnet_logits,
    supervised_loss,
)
from ..fleet import Fleet, RoundContext
from ..footprints import ClientUpdate, subnet_footprint
from ..models import Model
from ..settings import Count, NonNegative, SearchRange
from ..tensors import Parcel, Tensors, combine
from ._supernet import SpaceChoice, build_space, space_problem
from .method import Method, MethodInfo

IdleWeights = Literal["decay", "keep"]


@dataclass(frozen=True)
class FedSup(Method):
    """FedSup: every device trains the whole supernet and some of its subnets, of which any can be deployed later.

    Parameters
    ----------
    space : the sizes that subnets are sampled from: "tiers", all combinations of what the tiers differ in; the name of
        a search space; or a list of choices for each setting of the model.
    subnets : the number of nets trained on each batch, the paper's M.
    sandwich : whether these are the largest net, random ones and, with three or more, the smallest; else all are
        random, and the first of them learns the labels.
    distillation : whether all but the first learn the largest net's outputs; else the labels. By cross entropy with its
        probabilities where classes or labels are learned, and by the squared difference where numbers are.
    proximal : the strength of FedProx's proximal term, its mu; 0: none.
    subnet_stream : "device": every device draws its own subnets, as published; "shared": all devices train the same
        ones in a step, so that they run as one network.
    idle_weights : what becomes of weights that are in none of a step's nets, of which there are none with the sandwich
        rule. "decay": their gradient is zero, and momentum and weight decay go on, as in a torch optimizer whose
        gradients are zeroed; "keep": they and their momentum stay. The paper does not say.
    """

    info = MethodInfo(paper="Kim & Yun, 2022", uploads="weights of the supernet, example count")

    space: SpaceChoice = "tiers"
    subnets: Count = 3
    sandwich: bool = True
    distillation: bool = True
    proximal: Annotated[NonNegative, SearchRange(0.0, 0.1)] = 0.0
    subnet_stream: SubnetStream = "device"
    idle_weights: IdleWeights = "decay"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        supernet = context.fleet.global_model
        cohort = [device.with_model(supernet, supernet) for device in context.cohort]
        replies = context.ask(self.train, {device: {"weights": server["weights"]} for device in cohort})
        updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples) for reply in replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            supernet, drawn = client.model, self._draw_subnets(client, batch)
            logits, *students = subnet_logits(drawn, supernet, weights, batch)
            teacher = logits if self.sandwich or not students else supernet(weights, batch.x, batch.step_seeds).logits
            total = supervised_loss(logits, batch)
            for student in students:
                if self.distillation:
                    total = total + distillation_loss(student, teacher, client.task)
                else:
                    total = total + supervised_loss(student, batch)
            return total + self.proximal * distance(weights, inbox["weights"]) if self.proximal else total

        def entries(batch: Batch) -> Tensors:
            return _entries_inside(self._draw_subnets(client, batch), client.model, inbox["weights"])

        keeps = self.idle_weights == "keep" and not self.sandwich
        trained = fit(client, inbox["weights"], loss, entries=entries if keeps else None)
        return ClientResult(upload={"weights": trained})

    def _draw_subnets(self, client: Client, batch: Batch) -> list[list[Model]]:
        """The nets to train on this batch; the first learns its labels."""
        supernet, subnets = client.model, build_space(self.space, tuple(client.tier_models.values()))
        draw = partial(draw_subnets, partial(subnets.sample, supernet), batch.step_seeds, self.subnet_stream)
        if not self.sandwich:
            return [draw(number) for number in range(self.subnets)]
        drawn = [draw(number) for number in range(1, self.subnets)]
        return [[supernet], *drawn] if self.subnets < 3 else [[supernet], *drawn[:-1], [subnets.smallest(supernet)]]

    def check_fleet(self, fleet: Fleet) -> str | None:
        return space_problem("fedsup", self.space, fleet)


def _entries_inside(drawn: Sequence[Sequence[Model]], supernet: Model, weights: Tensors) -> Tensors:
    """Which of the supernet's entries are in at least one of a step's subnets, booleans [K, ...] by name."""
    found = combine(lambda weight: torch.zeros_like(weight, dtype=torch.bool), weights)
    none = {name: torch.zeros_like(entries[0]) for name, entries in found.items()}
    for subnets in drawn:
        for k, subnet in enumerate(subnets):
            footprint = subnet_footprint(subnet, supernet)
            for name, entries in footprint.write(none, combine(torch.ones_like, footprint.read(none))).items():
                found[name][slice(None) if len(subnets) == 1 else k] |= entries
    return found

"""FjORD: ordered dropout. Horvath et al., NeurIPS 2021, Algorithm 1.

For every batch a device samples one of the widths it can run and trains that leading slice, so that every narrower
model inside its own is trained too. With self-distillation the full model learns the labels and teaches it.
"""

import inspect
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    SubnetStream,
    distillation_loss,
    draw_subnets,
    fit,
    like,
    on_device,
    subnet_logits,
    supervised_loss,
)
from ..fleet import Fleet, RoundContext
from ..footprints import ClientUpdate, find_foreign_frozen, find_slicing_problem, is_submodel
from ..models import Model
from ..settings import Share
from ..tensors import Parcel, Tensors
from .method import Method, MethodInfo


@dataclass(frozen=True)
class FjORD(Method):
    """FjORD: ordered dropout, where each step trains a leading slice of one of the widths that the device can run.

    Parameters
    ----------
    widths : the width multipliers to sample from; empty: the tiers' models.
    distillation : whether the device's full model learns the labels and teaches the slice (self-distillation); else the
        slice learns the labels.
    subnet_stream : "device": every device draws its own slice, as published; "shared": all devices train the same slice
        in a step, so that they run as one network.
    """

    info = MethodInfo(paper="Horvath et al., NeurIPS 2021", uploads="weights of the device's slice, example count")

    widths: tuple[Share, ...] = ()
    distillation: bool = True
    subnet_stream: SubnetStream = "device"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples) for reply in replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights")}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        full, subnets = client.model, self._subnets(client)

        def choose(rng: np.random.Generator) -> Model:
            return subnets[int(rng.integers(len(subnets)))]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            sampled = draw_subnets(choose, batch.step_seeds, self.subnet_stream)
            [logits] = subnet_logits([sampled], full, weights, batch)
            if not self.distillation:
                return supervised_loss(logits, batch)
            teacher = full(weights, batch.x, batch.step_seeds).logits
            return supervised_loss(teacher, batch) + distillation_loss(logits, teacher, client.task)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    def _subnets(self, client: Client) -> list[Model]:
        """The distinct sub-models of the device's model, itself included."""
        full = client.model.shapes()
        models = [client.model.with_settings(width=width) for width in self.widths] or [*client.tier_models.values()]
        nets = [net for net in (*models, client.model) if is_submodel(net.shapes(), full)]
        return list({tuple(net.shapes().items()): net for net in nets}.values())

    def check_fleet(self, fleet: Fleet) -> str | None:
        if not self.widths:
            return None
        if "width" in inspect.signature(fleet.global_model.build).parameters:
            return self._frozen_problem(fleet.global_model) or self._slicing_problem(fleet.global_model)
        return f"{fleet.global_model.family} has no setting `width` for method.widths; leave method.widths out"

    def _slicing_problem(self, model: Model) -> str | None:
        """Widths that are not those of tiers have to be proved too."""
        for width in self.widths:
            subnet = model.with_settings(width=width)
            problem = find_slicing_problem(subnet, model) if is_submodel(subnet.shapes(), model.shapes()) else None
            if problem:
                return f"fjord: at width {width:g}, {problem}"
        return None

    def _frozen_problem(self, model: Model) -> str | None:
        for width in self.widths if model.frozen_shapes() else ():
            name = find_foreign_frozen(model.with_settings(width=width), model)
            if name:
                return f"fjord cannot cut the width {width} out of {model.family}: its frozen {name} has other values"
        return None

"""FjORD: ordered dropout. Horvath et al., NeurIPS 2021, Algorithm 1.

For every batch a device draws one of the widths it can carry and trains that leading slice, so that every narrower net
inside its own is trained too. With self-distillation its own width is trained on the labels and teaches the narrower.
"""

import inspect
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    Stream,
    cross_entropy,
    draw_subnets,
    fit,
    like,
    on_device,
    soft_cross_entropy,
    subnet_logits,
)
from ..fleet import Fleet, RoundContext
from ..footprints import ClientUpdate, is_part
from ..models import Model
from ..settings import Share
from ..tensors import Parcel, Tensors
from .method import Method


@dataclass(frozen=True)
class FjORD(Method):
    """A device draws from `widths`, by default from the tiers' own models. `subnet_stream` "shared" draws once for all
    devices of a step, so that they run at once."""

    paper = "Horvath et al., NeurIPS 2021"
    leaves, keeps, gives = "weights of the device's slice, example count", "nothing", "global"

    widths: tuple[Share, ...] = ()
    distillation: bool = True
    subnet_stream: Stream = "device"

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        said = (ClientUpdate(reply.device.footprint, reply.sent["weights"], reply.examples) for reply in replies)
        return {"weights": context.aggregate(server["weights"], said)}

    @on_device(sends={"weights": like("weights")}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        whole, narrower = client.model, self._narrower(client)

        def choose(draw: np.random.Generator) -> Model:
            return narrower[int(draw.integers(len(narrower)))]

        def loss(weights: Tensors, batch: Batch) -> Tensor:
            nets = draw_subnets(choose, batch.step_seeds, self.subnet_stream)
            logits = subnet_logits(nets, whole, weights, batch)
            if not self.distillation:
                return cross_entropy(logits, batch)
            widest = whole(weights, batch.x, batch.step_seeds).logits
            return cross_entropy(widest, batch) + soft_cross_entropy(logits, widest)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    def _narrower(self, client: Client) -> list[Model]:
        """The sizes a device can carry, its own among them."""
        own = client.model.shapes()
        sizes = [client.model.resized(width=width) for width in self.widths] or tuple(client.sizes.values())
        carried = {tuple(net.shapes().items()): net for net in (*sizes, client.model) if is_part(net.shapes(), own)}
        return list(carried.values())

    def check_fleet(self, fleet: Fleet) -> str | None:
        if not self.widths or "width" in inspect.signature(fleet.global_model.build).parameters:
            return None
        return f"fjord draws widths, and {fleet.global_model.family} has no setting `width`; leave method.widths out"

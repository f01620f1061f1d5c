"""FedRep. Collins et al., Exploiting Shared Representations, ICML 2021, Algorithm 1.

Devices share all but the last layer. Each first trains its own head on the body it received, then the body.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ..client import Client, ClientResult, Step, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..seeds import FIT_HEAD
from ..settings import Count, SearchChoices
from ..tensors import Parcel, Tensors
from ._personal import PartialSharing, split_shared
from .method import MethodInfo


@dataclass(frozen=True)
class FedRep(PartialSharing):
    """FedRep: devices share all but the last layer, and each trains its own head before the shared body.

    Parameters
    ----------
    body_epochs : epochs of the body in a round; the head is trained for the recipe's epochs.
    last_heads : whether every device trains a head for the final body at the end, also those that never took part.
    """

    info = MethodInfo(
        paper="Collins et al., ICML 2021",
        uploads="weights of all but the last layer, example count",
        client_state="the last layer",
        produces="personalized",
    )
    shared = "body"

    body_epochs: Annotated[Count, SearchChoices((1, 2, 5))] = 1
    last_heads: bool = True

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: self.inbox(server, device) for device in context.cohort})
        return {"weights": self.aggregate_shared(server, context, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        for_body = replace(client, plan=take_epochs(client.plan, self.body_epochs))
        with_head = self._train_head(client, inbox)
        trained = fit(for_body, with_head, label_loss(client), only=inbox["weights"].keys())
        body, head = split_shared(trained, inbox)
        return ClientResult(upload={"weights": body}, state={"weights": head})

    @on_device(sends={}, stream=FIT_HEAD)
    def fit_head(self, client: Client, inbox: Parcel) -> ClientResult:
        _, head = split_shared(self._train_head(client, inbox), inbox)
        return ClientResult(upload={}, state={"weights": head})

    def _train_head(self, client: Client, inbox: Parcel) -> Tensors:
        return fit(client, self.full_weights(client, inbox), label_loss(client), only=client.state["weights"].keys())

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        if not self.last_heads:
            return None
        active = {tier.name for tier in context.fleet.active_tiers}
        devices = [device for device in context.fleet.devices(context.number) if device.tier in active]
        context.ask(self.fit_head, {device: self.inbox(server, device) for device in devices})
        return server


def take_epochs(plan: Sequence[Step], count: int) -> tuple[Step, ...]:
    """The first `count` epochs of a plan, which starts over if it has fewer."""
    taken: list[Step] = []
    epochs = 1 + max(
        epoch for step in plan for epoch, is_active in zip(step.epochs, step.is_active, strict=True) if is_active
    )
    for number in range(count):
        steps = [_only_epoch(step, number % epochs) for step in plan]
        taken += [step for step in steps if any(step.is_active)]
    return tuple(taken)


def _only_epoch(step: Step, epoch: int) -> Step:
    """The step, active only on devices that are in this epoch."""
    is_active = tuple(on and own == epoch for on, own in zip(step.is_active, step.epochs, strict=True))
    return replace(step, active=step.active * (step.epoch == epoch), is_active=is_active)

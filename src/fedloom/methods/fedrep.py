"""FedRep. Collins et al., Exploiting Shared Representations, ICML 2021, Algorithm 1.

Devices share all but the last layer. Each first learns its own head on the body it was given, then the body under it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..client import Client, ClientResult, Step, fit, label_loss, like, on_device
from ..fleet import RoundContext
from ..seeds import FIT_HEAD
from ..settings import Count
from ..tensors import Parcel, Tensors
from ._partial_sharing import Sharing, parted


@dataclass(frozen=True)
class FedRep(Sharing):
    """The recipe's epochs are the head's; then the body has `body_epochs` of them. `last_heads`: at the end everybody,
    also who never took part, learns a head for the final body."""

    paper = "Collins et al., ICML 2021"
    leaves, keeps, gives = "weights of all but the last layer, example count", "the last layer", "personalized"
    shared = "body"

    body_epochs: Count = 1
    last_heads: bool = True

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        replies = context.ask(self.train, {device: self.inbox(server, device) for device in context.cohort})
        return {"weights": self.averaged(server, context, replies)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        later = replace(client, plan=epochs_of(client.plan, self.body_epochs))
        with_head = self._with_new_head(client, inbox)
        trained = fit(later, with_head, label_loss(client), only=inbox["weights"].keys())
        body, head = parted(trained, inbox)
        return ClientResult(upload={"weights": body}, state={"weights": head})

    @on_device(sends={}, stream=FIT_HEAD)
    def fit_head(self, client: Client, inbox: Parcel) -> ClientResult:
        _, head = parted(self._with_new_head(client, inbox), inbox)
        return ClientResult(upload={}, state={"weights": head})

    def _with_new_head(self, client: Client, inbox: Parcel) -> Tensors:
        return fit(client, self.whole(client, inbox), label_loss(client), only=client.state["weights"].keys())

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        if not self.last_heads:
            return None
        served = {tier.name for tier in context.fleet.active_tiers}
        everybody = [device for device in context.fleet.devices(context.number) if device.tier in served]
        context.ask(self.fit_head, {device: self.inbox(server, device) for device in everybody})
        return server


def epochs_of(plan: Sequence[Step], count: int) -> tuple[Step, ...]:
    """So many epochs of a plan from its first on, which is gone through again if it has fewer."""
    passes: list[Step] = []
    epochs = 1 + max(int(step.epoch[step.working > 0].max()) for step in plan if step.working.any())
    for number in range(count):
        here = [replace(step, working=step.working * (step.epoch == number % epochs)) for step in plan]
        passes += [step for step in here if bool(step.working.any())]
    return tuple(passes)

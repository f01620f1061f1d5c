"""LG-FedAvg. Liang et al., Think Locally, Act Globally, 2020, Algorithm 1.

Every device trains a whole model, but only some of its layers are averaged; the others never leave the device.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..client import Client, ClientResult, Layout, fit, label_loss, like, on_device
from ..fleet import EvalTarget, Fleet, RoundContext
from ..models import Model
from ..tensors import Parcel, Tensors
from ._last_uploads import full_model_layout, initial_models, mean_of_models, updated_uploads
from ._personal import PartialSharing, Shared, split_shared
from .method import MethodInfo


@dataclass(frozen=True)
class LGFedAvg(PartialSharing):
    """LG-FedAvg: every device trains a whole model, but only some of its layers are averaged.

    Parameters
    ----------
    shared : the layers that are averaged: "head", the last layer, as in FedBABU's and FedSup's comparisons; "body", all
        others; "all"; "none"; or the names of layers.
    report : whether to evaluate also the model with the shared layers and the mean of all devices' other layers, which
        the paper reports as Global. Devices then upload those layers too, and the server keeps them.
    """

    info = MethodInfo(
        paper="Liang et al., 2020",
        uploads="weights of the shared layers, example count; with report, the other layers",
        client_state="the other layers",
        produces="personalized",
    )

    shared: Shared = "head"
    report: bool = False

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        if not self.report:
            return server
        models = initial_models(fleet, seed, warm_start)
        return {**server, **{name: split_shared(model, server)[1] for name, model in models.items()}}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: self.inbox(server, device) for device in context.cohort}
        replies = context.ask(self.train_and_send if self.report else self.train, inboxes)
        kept = updated_uploads(server, replies, "private")
        return {**server, "weights": self.aggregate_shared(server, context, replies), **kept}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        shared, private = self._fit(client, inbox)
        return ClientResult(upload={"weights": shared}, state={"weights": private})

    @on_device(sends={"weights": like("weights"), "private": "private_layout"})
    def train_and_send(self, client: Client, inbox: Parcel) -> ClientResult:
        shared, private = self._fit(client, inbox)
        return ClientResult(upload={"weights": shared, "private": private}, state={"weights": private})

    def _fit(self, client: Client, inbox: Parcel) -> tuple[Tensors, Tensors]:
        return split_shared(fit(client, self.full_weights(client, inbox), label_loss(client)), inbox)

    def private_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        layout = full_model_layout(model, inbox, examples)
        return {name: entry for name, entry in layout.items() if name not in inbox["weights"]}

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {**super().eval_targets(server), **mean_of_models(server, server["weights"])}

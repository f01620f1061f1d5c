"""FedHeNN. Makhija, Han, Ho & Ghosh, Architecture Agnostic Federated Learning, ICML 2022, Algorithms 1 and 2.

Devices may have any models. Each round all look at the same few unlabelled examples, and each is drawn towards finding
alike what the others, on average, find alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..client import Client, ClientResult, Task, fit, label_loss, on_device
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, RoundContext, slices
from ..models import Model
from ..seeds import DESCRIBE
from ..tensors import Parcel, Tensors
from ._alignment import Agreement
from ._last_uploads import bundle, received, whole_model
from ._personal import OwnModels
from .method import averaged_by_examples, first_weights, one_model


@dataclass(frozen=True)
class FedHeNN(Agreement, OwnModels):
    """`share`: "kernels" of devices with their own models (the paper's heterogeneous form), or "weights" too. `target`:
    the mean over all devices, or participants. `kernels_on`: by the server from uploaded weights, as published; or by
    the participants, whose weights then stay: the default for real ones. `last_round`: one more, with everybody."""

    paper = "Makhija et al., ICML 2022"
    leaves, keeps = "its weights, or only how alike it finds examples that all know", "its model"
    gives, admits = "personalized", "any models"

    share: Literal["kernels", "weights"] = "kernels"
    kernels_on: Literal["auto", "server", "devices"] = "auto"
    target: Literal["all", "participants"] = "all"
    last_round: bool = True

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        if self.share == "weights":
            return super().start(fleet, seed, warm)
        uploaded = fleet.members(1) if self.kernels_on != "devices" else []
        return {bundle(one.tier, one.name): first_weights(one, seed, warm) for one in uploaded}

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        return {} if self.share == "weights" else super().prepare(device, seed, warm)

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        shown = self.shown(context)
        if self.share == "weights":  # the target is how the global model finds the examples: devices see for themselves
            return averaged_by_examples(self.train, server, context, shown)
        if self.kernels_on == "devices" or (self.kernels_on == "auto" and context.deployed):
            told = context.ask(self.describe, dict.fromkeys(context.cohort, shown)) if shown else []
            context.ask(self.train_at_home, dict.fromkeys(context.cohort, self.aimed(shown, told)))
            return server
        held = context.fleet.members(context.number) if self.target == "all" else context.cohort
        models = {d: {**shown, "weights": server[bundle(d.tier, d.name)]} for d in held}
        told = context.compute(self.describe, models) if shown else []
        replies = context.ask(self.train, dict.fromkeys(context.cohort, self.aimed(shown, told)))
        return {**server, **received(server, replies)}

    @on_device(sends={"told": "telling"}, stream=DESCRIBE, mixes=False)
    def describe(self, client: Client, inbox: Parcel) -> ClientResult:
        return ClientResult(upload={"told": self.tell(client, self.own(client, inbox)[1], inbox)})

    @on_device(sends={"weights": whole_model}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        first = inbox["weights"] if "weights" in inbox else client.state["weights"]
        weights = fit(self.drawn(client, inbox, first), first, label_loss(client))
        return ClientResult(upload={"weights": weights}, state={"weights": weights})

    @property
    def train_at_home(self) -> Task:
        return self.train.silent("train_at_home")

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        probed = steps * (self.probe_batch or self.probe_size) if self.needs_public_data else 0
        return super().device_macs(model, examples + probed, steps)

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        return self.round(server, context) if self.last_round else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        shared = {"server": slices(server["weights"])} if self.share == "weights" else {}
        return {"personal": DeviceModel(self.own, lambda device: server if shared else {}), **shared}

    def own(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, client.state.get("weights") or inbox["weights"]

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = one_model('fedhenn with share = "weights"', fleet) if self.share == "weights" else None
        return problem or super().check_fleet(fleet)

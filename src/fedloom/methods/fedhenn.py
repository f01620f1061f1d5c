"""FedHeNN. Makhija, Han, Ho & Ghosh, Architecture Agnostic Federated Learning, ICML 2022, Algorithms 1 and 2.

Devices may have any models. Each round all look at the same few unlabelled examples, and each is drawn towards finding
alike what the others, on average, find alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..fleet import Candidate, Carried, Device, DeviceModel, Fleet, Turn, slices
from ..footprints import Contribution
from ..models import Model
from ..tensors import Parcel, Tensors
from ..training import Client, Outcome, Task, fit, label_loss, on_device
from .agreement import Agreement
from .latest import bundle, received, whole_model
from .method import first_weights, one_model
from .own import OwnModels


@dataclass(frozen=True)
class FedHeNN(Agreement, OwnModels):
    """`share`: "kernels" of devices with models of their own (the paper's heterogeneous form), or also the "weights" of
    one model (homogeneous). `kernels_on`: the server computes them from uploaded weights, as published; or the devices
    do, whose weights then stay at home: the default where they are real. `target`: the mean over all devices or over
    the participants, as it always is where they compute it. `last_round`: one more at the end, with everybody."""

    paper = "Makhija et al., ICML 2022"
    leaves, keeps = "its weights, or only how alike it finds examples that all know", "its model"
    gives, admits = "personalised", "any models"

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

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        shown = self.shown(turn)
        if self.share == "weights":  # the target is how the global model finds the examples: devices see for themselves
            replies = turn.ask(self.train, {device: {**server, **shown} for device in turn.cohort})
            said = (Contribution(reply.device.footprint, reply.sent["weights"], reply.examples) for reply in replies)
            return {"weights": turn.merge(server["weights"], said)}
        if self.kernels_on == "devices" or (self.kernels_on == "auto" and turn.deployed):
            told = turn.ask(self.describe, dict.fromkeys(turn.cohort, shown)) if shown else []
            turn.ask(self.train_at_home, dict.fromkeys(turn.cohort, self.aimed(shown, told)))
            return server
        held = turn.fleet.members(turn.number) if self.target == "all" else turn.cohort
        models = {d: {**shown, "weights": server[bundle(d.tier, d.name)]} for d in held}
        told = turn.compute(self.describe, models) if shown else []
        replies = turn.ask(self.train, dict.fromkeys(turn.cohort, self.aimed(shown, told)))
        return {**server, **received(server, replies)}

    @on_device(sends={"told": "telling"})
    def describe(self, client: Client, inbox: Parcel) -> Outcome:
        return Outcome(send={"told": self.tell(client, self.own(client, inbox)[1], inbox)})

    @on_device(sends={"weights": whole_model})
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        first = inbox["weights"] if "weights" in inbox else client.memory["weights"]
        weights = fit(self.drawn(client, inbox, first), first, label_loss(client))
        return Outcome(send={"weights": weights}, remember={"weights": weights})

    @property
    def train_at_home(self) -> Task:
        """The same on the same batches, which a task's name decides; but nothing is sent."""
        same = self.train.same and ("at home", self.train.same)
        return replace(self.train, run=self._trained_at_home, sends={}, address=("train_at_home",), same=same)

    def _trained_at_home(self, client: Client, inbox: Parcel) -> Outcome:
        return replace(self.train.run(client, inbox), send={})

    def device_work(self, model: Model, examples: int, steps: int) -> float:
        probed = steps * (self.probe_batch or self.probe_size) if self.probes else 0
        return super().device_work(model, examples + probed, steps)

    def finish(self, server: Parcel, turn: Turn) -> Parcel | None:
        return self.round(server, turn) if self.last_round else None

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        if self.share == "weights":
            return {"personal": DeviceModel(self.own, lambda device: server), "server": slices(server["weights"])}
        return {"personal": DeviceModel(self.own)}

    def own(self, client: Client, inbox: Parcel) -> Carried:
        return client.model, client.memory.get("weights") or inbox["weights"]

    def objection(self, fleet: Fleet) -> str | None:
        problem = one_model('fedhenn with share = "weights"', fleet) if self.share == "weights" else None
        return problem or super().objection(fleet)

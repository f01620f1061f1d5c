"""FedHeNN. Makhija, Han, Ho & Ghosh, Architecture Agnostic Federated Learning, ICML 2022, Algorithms 1 and 2.

Devices may have any models. Each round all compute a kernel, the pairwise similarities of the same few public examples,
and each device's loss pulls its kernel towards the mean of all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..client import Client, ClientResult, Task, fit, label_loss, on_device
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, RoundContext, tier_slices
from ..models import Model
from ..seeds import DESCRIBE
from ..tensors import Parcel, Tensors
from ._alignment import RepresentationAlignment
from ._last_uploads import full_model_layout, updated_uploads, upload_key
from ._personal import PersonalModels
from .method import MethodInfo, fedavg_round, init_weights, one_model_problem


@dataclass(frozen=True)
class FedHeNN(RepresentationAlignment, PersonalModels):
    """FedHeNN: devices with any models are pulled towards the same similarities between public examples.

    Parameters
    ----------
    share : what devices share: only "kernels", so that each has its own model (the paper's heterogeneous form), or also
        "weights" of one model.
    kernels_on : where kernels are computed: by the "server" from uploaded weights, as published; by the participating
        "devices", whose weights then stay on them; "auto": by devices only if they are real ones.
    target : whose mean kernel is the target: that of "all" devices, or of the round's "participants".
    last_round : whether there is one more round at the end, with all devices.
    """

    info = MethodInfo(
        paper="Makhija et al., ICML 2022",
        uploads="its weights, or only the kernel of public examples",
        client_state="its model",
        produces="personalized",
        heterogeneity="any",
    )

    share: Literal["kernels", "weights"] = "kernels"
    kernels_on: Literal["auto", "server", "devices"] = "auto"
    target: Literal["all", "participants"] = "all"
    last_round: bool = True

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        if self.share == "weights":
            return super().start(fleet, seed, warm_start)
        devices = fleet.eligible_devices(1) if self.kernels_on != "devices" else []
        return {upload_key(device.tier, device.name): init_weights(device, seed, warm_start) for device in devices}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {} if self.share == "weights" else super().init_client(device, seed, warm_start)

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        public = self.public_inbox(context)
        if self.share == "weights":  # the target is the global model's kernel, which devices compute themselves
            return fedavg_round(self.train, server, context, public)
        if self.kernels_on == "devices" or (self.kernels_on == "auto" and context.deployed):
            kernels = context.ask(self.describe, dict.fromkeys(context.cohort, public)) if public else []
            context.ask(self.train_without_upload, dict.fromkeys(context.cohort, self.with_target(public, kernels)))
            return server
        devices = context.fleet.eligible_devices(context.number) if self.target == "all" else context.cohort
        models = {device: {**public, "weights": server[upload_key(device.tier, device.name)]} for device in devices}
        kernels = context.compute(self.describe, models) if public else []
        replies = context.ask(self.train, dict.fromkeys(context.cohort, self.with_target(public, kernels)))
        return {**server, **updated_uploads(server, replies)}

    @on_device(sends={"kernel": "kernel_layout"}, stream=DESCRIBE, batch_across_runs=False)
    def describe(self, client: Client, inbox: Parcel) -> ClientResult:
        _, weights = self.personal_model(client, inbox)
        return ClientResult(upload={"kernel": self.compute_kernel(client, weights, inbox)})

    @on_device(sends={"weights": full_model_layout}, batch_across_runs=False)
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        initial = inbox["weights"] if "weights" in inbox else client.state["weights"]
        weights = fit(self.with_alignment(client, inbox, initial), initial, label_loss(client))
        return ClientResult(upload={"weights": weights}, state={"weights": weights})

    @property
    def train_without_upload(self) -> Task:
        return self.train.without_upload("train_without_upload")

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        return self.round(server, context) if self.last_round else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        shared = {"server": tier_slices(server["weights"])} if self.share == "weights" else {}
        return {"personal": DeviceModel(self.personal_model, lambda device: server if shared else {}), **shared}

    def personal_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, client.state.get("weights") or inbox["weights"]

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = one_model_problem('fedhenn with share = "weights"', fleet) if self.share == "weights" else None
        return problem or self.counts_problem(fleet) or super().check_fleet(fleet)

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        public = steps * (self.probe_batch or self.probe_size) if self.needs_public_data else 0
        return super().device_macs(model, examples + public, steps)

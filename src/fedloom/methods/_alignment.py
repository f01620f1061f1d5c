"""Representation alignment of FedHeNN: settings, messages and the auxiliary loss.

Each round, all devices compute a kernel of the same public examples. While training, a device adds to its loss
strength · (1 - similarity to the mean kernel), so models that share no weights learn similar representations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    Kernel,
    Layout,
    Task,
    alignment_loss,
    average_kernels,
    represent,
    representation_kind,
    select_examples,
)
from ..fleet import SERVER_PREFIX, Device, Fleet, ModelWeights, Reply, RoundContext
from ..models import Model
from ..seeds import DESCRIBE
from ..settings import Count, FrozenDict, NonNegative, Positive, SearchRange
from ..tensors import Parcel, Tensors


@dataclass(frozen=True)
class RepresentationAlignment:
    """The settings of representation alignment, which FedHeNN and mixed fleets share.

    Parameters
    ----------
    strength : the weight of the alignment loss, the paper's eta_0; 0: no alignment.
    growth : how the strength grows with the number p of past rounds: with its square root, as in the paper's code,
        linearly, or not at all.
    probe_size : the number of public examples of a round, the paper's L.
    probe_batch : how many of them each training step uses; None: all.
    kernel : how representations are compared: CKA with a "linear" or an "rbf" kernel, or "procrustes", which compares
        the features themselves up to rotation and scale.
    bandwidth : the width of the rbf kernel, in median distances between examples.
    equally_loud : whether every kernel is scaled to the same norm before averaging.
    counts : the weight of a kernel in the average, by device or tier; 1 by default.
    """

    strength: Annotated[NonNegative, SearchRange(0.0001, 1.0, log=True)] = 0.001
    growth: Literal["root", "linear", "none"] = "root"
    probe_size: Count = 256
    probe_batch: Count | None = None
    kernel: Kernel = "linear"
    bandwidth: Positive = 1.0
    equally_loud: bool = False
    counts: Mapping[str, NonNegative] = FrozenDict()

    @property
    def needs_public_data(self) -> bool:
        return self.strength > 0

    def strength_at(self, round_number: int) -> float:
        past = round_number - 1
        return self.strength * {"root": math.sqrt(past), "linear": past, "none": 1.0}[self.growth]

    def public_inbox(self, context: RoundContext) -> Parcel:
        """This round's public examples and strength; empty while the strength is zero."""
        strength = self.strength_at(context.number)
        if not strength:
            return {}
        return {"public": {"x": context.public_batch(self.probe_size), "strength": torch.tensor(strength)}}

    def compute_kernel(self, client: Client, weights: Tensors, inbox: Parcel) -> dict[str, Tensor]:
        """The kernel of the public examples, or the features it follows from if they are smaller."""
        with torch.no_grad():
            return represent(client.model.features(weights, _prepare(client, inbox)), self.kernel, self.bandwidth)

    def kernel_layout(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        """Names, shapes and types that `compute_kernel` returns."""
        size, width = len(inbox["public"]["x"]), model.feature_width()
        name = representation_kind(self.kernel, size, width)
        return {name: ((size, width if name == "features" else size), torch.get_default_dtype())}

    def kernel_task(self, load: Callable[[Client, Parcel], ModelWeights], *ref: str) -> Task:
        """A task that uploads the kernel of the model that `load` returns."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            model, weights = load(client, inbox)
            return ClientResult(upload={"kernel": self.compute_kernel(replace(client, model=model), weights, inbox)})

        return Task("describe", run, {"kernel": self.kernel_layout}, DESCRIBE, ref=ref)

    def with_target(self, public: Parcel, replies: Sequence[Reply], shares: Sequence[float] | None = None) -> Parcel:
        """The public examples and, as the target, the weighted mean of the uploaded kernels; empty without any."""
        kernels = [reply.upload["kernel"] for reply in replies]
        shares = shares or [1.0] * len(kernels)
        weights = [share * self._kernel_weight(reply.device) for reply, share in zip(replies, shares, strict=True)]
        if not sum(weights):
            return {}
        return {**public, "target": average_kernels(kernels, weights, self.kernel, self.equally_loud)}

    def counts_problem(self, fleet: Fleet) -> str | None:
        """Why the weights of kernels do not fit a fleet; None if they do.

        Parameters
        ----------
        fleet : the fleet.
        """
        known = [*(tier.name for tier in fleet.tiers), *(fleet.name(index) for index in range(fleet.size))]
        unknown = next((name for name in self.counts if name not in known), None)
        return None if unknown is None else f"method.counts names {unknown!r}, which is neither a tier nor a device"

    def _kernel_weight(self, device: Device) -> float:
        return self.counts.get(device.name.removeprefix(SERVER_PREFIX), self.counts.get(device.tier, 1.0))

    def with_alignment(self, client: Client, inbox: Parcel, initial: Tensors) -> Client:
        """The client with the alignment term as an auxiliary loss; unchanged if the inbox has no public examples.

        Without a target in the inbox, the kernel of the `initial` weights is the target.
        """
        if "public" not in inbox:
            return client
        target = inbox["target"] if "target" in inbox else self.compute_kernel(client, initial, inbox)
        x, strength, model = _prepare(client, inbox), inbox["public"]["strength"], client.model
        size, count = x.shape[1], self.probe_batch or x.shape[1]
        loss_on_all = alignment_loss(target, self.kernel, self.bandwidth)

        def auxiliary_loss(weights: Tensors, batch: Batch) -> Tensor:
            if count >= size:
                return strength * loss_on_all(model.features(weights, x, batch.step_seeds))
            rows = batch.cyclic_rows(count, size)
            loss_on_rows = alignment_loss(select_examples(target, rows), self.kernel, self.bandwidth)
            return strength * loss_on_rows(model.features(weights, x[:, rows], batch.step_seeds))

        other = client.auxiliary_loss
        if other is None:
            return replace(client, auxiliary_loss=auxiliary_loss)

        def both(weights: Tensors, batch: Batch) -> Tensor:
            return other(weights, batch) + auxiliary_loss(weights, batch)

        return replace(client, auxiliary_loss=both)


def _prepare(client: Client, inbox: Parcel) -> Tensor:
    x = inbox["public"]["x"]
    if len(x) > 1 and x.stride(0) == 0:  # all devices share the same examples: prepare them once
        prepared = client.preparation(x[:1])
        return prepared.expand(len(x), *prepared.shape[1:])
    return client.preparation(x)

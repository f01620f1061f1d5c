"""How devices of any models come to see the same examples alike: settings and steps of FedHeNN's alignment term.

A round shows everybody the same unlabelled examples. Who is drawn trains with strength · misalignment beside its loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..client import (
    Batch,
    Client,
    ClientResult,
    Kernel,
    Layout,
    Task,
    about,
    blended,
    described,
    description,
    misalignment,
)
from ..fleet import SERVER_PREFIX, Device, ModelWeights, Reply, RoundContext
from ..models import Model
from ..seeds import DESCRIBE
from ..settings import Count, FixedTable, NotNegative, Positive
from ..tensors import Parcel, Tensors


@dataclass(frozen=True)
class Agreement:
    """`strength` is the paper's eta_0, which grows with the root of the rounds gone by, as in its code; `probe_size` is
    its L, of which every step looks at all or at `probe_batch`. `bandwidth` is that of the rbf kernel, in medians.
    `equally_loud`: every kernel is scaled to one norm before the mean, else large ones count for more. `counts`: how
    much a device's kernel counts, by its name or its tier; 1 where nothing is said."""

    strength: NotNegative = 0.001
    growth: Literal["root", "linear", "none"] = "root"
    probe_size: Count = 256
    probe_batch: Count | None = None
    kernel: Kernel = "linear"
    bandwidth: Positive = 1.0
    equally_loud: bool = False
    counts: Mapping[str, NotNegative] = FixedTable()

    @property
    def needs_public_data(self) -> bool:
        return self.strength > 0

    def pull_at(self, round_number: int) -> float:
        past = round_number - 1
        return self.strength * {"root": math.sqrt(past), "linear": past, "none": 1.0}[self.growth]

    def shown(self, context: RoundContext) -> Parcel:
        """What a round's devices look at; nothing, as long as there is no pull."""
        pull = self.pull_at(context.number)
        return {"probe": {"x": context.probe(self.probe_size), "pull": torch.tensor(pull)}} if pull else {}

    def tell(self, client: Client, weights: Tensors, inbox: Parcel) -> dict[str, Tensor]:
        """How a device's model finds the examples."""
        with torch.no_grad():
            return described(client.model.features(weights, _prepared(client, inbox)), self.kernel, self.bandwidth)

    def telling_task(self, carried: Callable[[Client, Parcel], ModelWeights], *address: str) -> Task:
        """Have devices tell how a model that they carry finds the examples."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            model, weights = carried(client, inbox)
            return ClientResult(upload={"told": self.tell(replace(client, model=model), weights, inbox)})

        return Task("describe", run, {"told": self.telling}, DESCRIBE, address=address)

    def telling(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        """What `tell` gives."""
        size, width = len(inbox["probe"]["x"]), model.feature_width()
        name = description(self.kernel, size, width)
        return {name: ((size, width if name == "features" else size), torch.get_default_dtype())}

    def aimed(self, shown: Parcel, replies: Sequence[Reply], shares: Sequence[float] | None = None) -> Parcel:
        """What was shown, and the mean of how it was found; nothing, if nobody has told."""
        told = [reply.sent["told"] for reply in replies]
        counted = [
            share * self._counts(one.device) for one, share in zip(replies, shares or [1.0] * len(told), strict=True)
        ]
        if not sum(counted):
            return {}
        return {**shown, "target": blended(told, counted, self.kernel, self.equally_loud)}

    def _counts(self, device: Device) -> float:
        return self.counts.get(device.name.removeprefix(SERVER_PREFIX), self.counts.get(device.tier, 1.0))

    def drawn(self, client: Client, inbox: Parcel, first: Tensors) -> Client:
        """The device, drawn to the target while it trains: what it is told, else the model it starts from. As it was,
        where it is shown nothing."""
        if "probe" not in inbox:
            return client
        target = inbox["target"] if "target" in inbox else self.tell(client, first, inbox)
        x, pull, model = _prepared(client, inbox), inbox["probe"]["pull"], client.model
        size, some = x.shape[1], self.probe_batch or x.shape[1]
        towards_all = misalignment(target, self.kernel, self.bandwidth)

        def term(weights: Tensors, batch: Batch) -> Tensor:
            if some >= size:
                return pull * towards_all(model.features(weights, x))
            rows = batch.cyclic_rows(some, size)
            towards_some = misalignment(about(target, rows), self.kernel, self.bandwidth)
            return pull * towards_some(model.features(weights, x[:, rows]))

        before = client.auxiliary_loss
        both = term if before is None else lambda weights, batch: before(weights, batch) + term(weights, batch)
        return replace(client, auxiliary_loss=both)


def _prepared(client: Client, inbox: Parcel) -> Tensor:
    x = inbox["probe"]["x"]
    if len(x) > 1 and x.stride(0) == 0:  # all devices look at the same: prepared once
        once = client.preparation(x[:1])
        return once.expand(len(x), *once.shape[1:])
    return client.preparation(x)

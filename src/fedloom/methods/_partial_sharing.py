"""Some layers shared and averaged, the others private: what LG-FedAvg, FedRep and FedIN have in common.

The shared part is a footprint, as every part is, so tiers of different sizes share what they have in common.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ..client import Client
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, Reply, RoundContext
from ..footprints import ClientUpdate, Footprint
from ..models import Model
from ..tensors import Parcel, Tensors
from .method import Method, first_weights, fixed_tiers

Shared = Literal["head", "body", "all", "none"] | tuple[str, ...]
"""The head is the last layer, the body all else; or the names of layers."""


class Sharing(Method, Protocol):
    """A method whose devices keep all that they do not share."""

    @property
    def shared(self) -> Shared: ...

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        first = warm or fleet.global_model.initial_weights(seed)
        return {"weights": {name: first[name] for name in shared_names(self.shared, fleet.global_model)}}

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        first, names = first_weights(device, seed, warm), shared_names(self.shared, device.model)
        return {"weights": {name: weight for name, weight in first.items() if name not in names}}

    def inbox(self, server: Parcel, device: Device) -> Parcel:
        return {"weights": self._footprint(device).read(server["weights"])}

    def averaged(
        self, server: Parcel, context: RoundContext, replies: Sequence[Reply], by_examples: bool = True
    ) -> dict[str, Tensor]:
        share = {reply.device: reply.examples if by_examples else 1.0 for reply in replies}
        said = (ClientUpdate(self._footprint(r.device), r.sent["weights"], share[r.device]) for r in replies)
        return context.aggregate(server["weights"], said)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.own, lambda device: self.inbox(server, device))}

    def own(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, self.whole(client, inbox)

    def whole(self, client: Client, inbox: Parcel) -> dict[str, Tensor]:
        return {**client.state["weights"], **inbox["weights"]}

    def check_fleet(self, fleet: Fleet) -> str | None:
        named = self.shared if isinstance(self.shared, tuple) else ()
        unknown = [name for name in named if not shared_names((name,), fleet.global_model)]
        if unknown:
            return f"no layer of {fleet.global_model.family} is named {' or '.join(map(repr, unknown))}"
        if self.shared in ("head", "body") and not fleet.global_model.label_rows():
            return f"{fleet.global_model.family} ends in no layer with one row per class, so its head cannot be told"
        return fixed_tiers(fleet)

    def _footprint(self, device: Device) -> Footprint:
        return device.footprint.only(*shared_names(self.shared, device.model))


def shared_names(shared: Shared, model: Model) -> tuple[str, ...]:
    head, names = set(model.head()), model.shapes()
    match shared:
        case "head" | "body":
            return tuple(name for name in names if (name in head) == (shared == "head"))
        case "all" | "none":
            return tuple(names) if shared == "all" else ()
    return tuple(name for name in names if any(f"{name}.".startswith(f"{one}.") for one in shared))


def parted(weights: Tensors, inbox: Parcel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What came with the inbox and goes back, and what stays."""
    shared = {name: weights[name] for name in inbox["weights"]}
    return shared, {name: weight for name, weight in weights.items() if name not in shared}

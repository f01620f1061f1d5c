"""Devices that keep a model (Standalone, Ditto, FedGKT, FedHeNN) or some layers of it (LG-FedAvg, FedRep, FedIN).

Shared layers are a footprint, so tiers of different sizes share what they have in common.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from ..client import Client
from ..fleet import Device, DeviceModel, EvalTarget, Fleet, ModelWeights, Reply, RoundContext
from ..footprints import ClientUpdate, Footprint
from ..models import Model
from ..tensors import Parcel, Tensors
from .method import Method, fixed_tiers_problem, init_weights

Shared = Literal["head", "body", "all", "none"] | tuple[str, ...]
"""The head is the last layer, the body all others; or the names of layers."""


class PersonalModels(Method, Protocol):
    """A method whose devices keep their models: in their states, as "weights"; evaluated as "personal".

    Its tasks train `client.state["weights"]` and return the result in `ClientResult(state=...)`. A method that starts
    from given weights gives each device its part of them. Fleets in which devices change their tier are refused.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Alone(PersonalModels):
    ...     info = MethodInfo(uploads="nothing", client_state="its model", produces="personalized", heterogeneity="any")
    ...
    ...     def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
    ...         return {}
    ...
    ...     def round(self, server: Parcel, context: RoundContext) -> Parcel:
    ...         context.ask(self.train, {device: {} for device in context.cohort})
    ...         return server
    ...
    ...     @on_device(sends={})
    ...     def train(self, client: Client, inbox: Parcel) -> ClientResult:
    ...         return ClientResult({}, state={"weights": fit(client, client.state["weights"], label_loss(client))})
    """

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"weights": init_weights(device, seed, warm_start)}

    def personal_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        """The model and the weights that a device is evaluated with.

        Parameters
        ----------
        client : the devices.
        inbox : what the server sends for it: by default nothing.
        """
        return client.model, client.state["weights"]

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.personal_model)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        return fixed_tiers_problem(fleet)


class PartialSharing(Method, Protocol):
    """A method whose devices keep every layer that they do not share."""

    @property
    def shared(self) -> Shared: ...

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        weights = warm_start or fleet.global_model.initial_weights(seed)
        return {"weights": {name: weights[name] for name in shared_names(self.shared, fleet.global_model)}}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        weights, shared = init_weights(device, seed, warm_start), shared_names(self.shared, device.model)
        return {"weights": {name: weight for name, weight in weights.items() if name not in shared}}

    def inbox(self, server: Parcel, device: Device) -> Parcel:
        return {"weights": self._footprint(device).read(server["weights"])}

    def aggregate_shared(
        self, server: Parcel, context: RoundContext, replies: Sequence[Reply], by_examples: bool = True
    ) -> dict[str, Tensor]:
        share = {reply.device: reply.examples if by_examples else 1.0 for reply in replies}
        updates = (ClientUpdate(self._footprint(r.device), r.upload["weights"], share[r.device]) for r in replies)
        return context.aggregate(server["weights"], updates)

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        return {"personal": DeviceModel(self.personal_model, lambda device: self.inbox(server, device))}

    def personal_model(self, client: Client, inbox: Parcel) -> ModelWeights:
        return client.model, self.full_weights(client, inbox)

    def full_weights(self, client: Client, inbox: Parcel) -> dict[str, Tensor]:
        """The device's own layers and the shared ones."""
        return {**client.state["weights"], **inbox["weights"]}

    def check_fleet(self, fleet: Fleet) -> str | None:
        model, layers = fleet.global_model, self.shared if isinstance(self.shared, tuple) else ()
        unknown = [name for name in layers if not shared_names((name,), model)]
        if unknown and all(any(f"{name}.".startswith(f"{u}.") for name in model.frozen_shapes()) for u in unknown):
            return f"{' and '.join(unknown)} of {model.family} is frozen, so there is nothing of it to share"
        if unknown:
            return f"no layer of {model.family} is named {' or '.join(map(repr, unknown))}"
        if self.shared in ("head", "body") and not model.label_rows():
            return f"{model.family} ends in no layer with one row per class, so its head is unknown"
        return fixed_tiers_problem(fleet)

    def _footprint(self, device: Device) -> Footprint:
        return device.footprint.only(*shared_names(self.shared, device.model))


def shared_names(shared: Shared, model: Model) -> tuple[str, ...]:
    head, names = set(model.head()), model.shapes()
    match shared:
        case "head" | "body":
            return tuple(name for name in names if (name in head) == (shared == "head"))
        case "all" | "none":
            return tuple(names) if shared == "all" else ()
    return tuple(name for name in names if any(f"{name}.".startswith(f"{layer}.") for layer in shared))


def split_shared(weights: Tensors, inbox: Parcel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split weights into those that came with the inbox, to be uploaded, and those that stay."""
    shared = {name: weights[name] for name in inbox["weights"]}
    return shared, {name: weight for name, weight in weights.items() if name not in shared}

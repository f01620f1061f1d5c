"""The interface of a federated learning method.

A method is a frozen dataclass of hyperparameters that holds both halves of an algorithm, the server's and the device's.
`Method` is the algorithm; `MethodInfo` and `Declarations` describe it to reports, checks and cost estimates.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ..client import Client, ClientResult, Task, fit, label_loss, like, on_any_device
from ..fleet import Device, EvalTarget, Fleet, RoundContext, Tier, find_nesting_problem, tier_slices
from ..footprints import ClientUpdate, Footprint, find_footprint, is_submodel
from ..models import Model, compute_cost
from ..settings import FrozenDict
from ..tensors import Parcel, Tensors

EXAMPLE_COUNT = 'the number of its examples, by which it is weighted (set method.weighting = "uniform" to avoid it)'


@dataclass(frozen=True)
class MethodInfo:
    """What is true of a method whatever its settings. Everything is optional and changes no result."""

    paper: str = ""
    uploads: str = ""  # what leaves a device
    client_state: str = "nothing"  # what a device keeps from round to round
    produces: Literal["global", "personalized"] = "global"
    heterogeneity: Literal["one model", "nested", "any"] = "nested"  # how the tiers' models may differ
    shares_features: str = ""  # the submodule whose features devices upload; "": none
    simulation_only: bool = False
    example_settings: Mapping[str, Any] = FrozenDict()  # for a small first run, where the defaults are not enough


class Declarations(Protocol):
    """What depends on a method's settings. The defaults fit a method that averages weights once per round."""

    info: ClassVar[MethodInfo] = MethodInfo()

    @property
    def shares_features(self) -> str:
        return self.info.shares_features

    @property
    def needs_public_data(self) -> bool:
        """True if the server needs unlabeled examples of its own."""
        return False

    @property
    def dp_uncovered(self) -> str:
        """What reaches the server's state other than by one update of weight 1 in the round's one aggregate.

        Noise on the aggregate does not hide it. "": nothing. By default everything a device uploads.
        """
        return self.info.uploads or "uploads that it does not declare"

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        """The entries of the global model that a tier's devices update in that aggregate."""
        return tier.footprint

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        """Multiply-adds of training: a forward pass, and a backward pass of twice its cost, for each example."""
        return 3.0 * compute_cost(model).macs * examples

    def server_macs(self, model: Model, examples: int) -> float:
        """Multiply-adds of the server in a round whose devices hold `examples` in all. Averaging is not counted."""
        return 0.0


class Method(Declarations, Protocol):
    """An algorithm. Only `round` is required; its tasks are methods `(client, inbox) -> ClientResult`, `@on_device`."""

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], methods: Mapping[str, type["Method"]]) -> "Method":
        """Build the method from a recipe's settings; `methods` is the registry, for a method composed of others."""
        return cls(**settings)

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        """The initial server state: by default one global model, or the weights of `warm_start`."""
        return {"weights": warm_start or fleet.global_model.initial_weights(seed)}

    @abstractmethod
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        """Run one round and return the next server state."""

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        """The models to evaluate, by name: by default every tier's slice of the global model."""
        return {"server": tier_slices(server["weights"])}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        """A device's initial state."""
        return {}

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        """An exchange after the last round; None if there is none."""
        return None

    def check_fleet(self, fleet: Fleet) -> str | None:
        """Why the method cannot train this fleet, beyond what `info.heterogeneity` says; None if it can."""
        return None

    def find(self, *ref: str) -> Any:
        """Look up a task or an evaluation function by name, so that no code has to be sent."""
        return getattr(self, *ref)


def fleet_problem(method: Method, fleet: Fleet) -> str | None:
    """Why a method cannot train a fleet; None if it can."""
    problem = None
    if method.info.heterogeneity == "one model":
        problem = one_model_problem(type(method).__name__.lower(), fleet)
    elif method.info.heterogeneity == "nested":
        problem = find_nesting_problem(fleet)
    return problem or method.check_fleet(fleet)


def one_model_problem(method: str, fleet: Fleet) -> str | None:
    """For methods that train the same model on every device."""
    if all(tier.model.is_equivalent(fleet.global_model) for tier in fleet.active_tiers):
        return None
    return f"{method} gives every device the same model, but the tiers differ; use one tier, or a method with tiers"


def fixed_tiers_problem(fleet: Fleet) -> str | None:
    """For methods whose devices keep a model, or a part of one."""
    if fleet.assignment == "fixed":
        return None
    return 'a device that keeps its model cannot be of another tier every round; set fleet.assignment = "fixed"'


@on_any_device(sends={"weights": like("weights")})
def train_on_labels(client: Client, inbox: Parcel) -> ClientResult:
    """Plain local training: minimize the loss on the labels and upload the weights."""
    return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})


def fedavg_round(task: Task, server: Parcel, context: RoundContext, extra: Parcel | None = None) -> Parcel:
    """Send the global model, and `extra` with it, to the cohort; average the replies weighted by examples."""
    inbox = {"weights": server["weights"], **(extra or {})}
    replies = context.ask(task, dict.fromkeys(context.cohort, inbox))
    updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples) for reply in replies)
    return {"weights": context.aggregate(server["weights"], updates)}


def init_weights(device: Device, seed: int, warm_start: Tensors | None) -> Tensors:
    """Initial weights of a device's own model: its part of `warm_start` if that contains it."""
    available = {name: weight.shape for name, weight in (warm_start or {}).items()}
    shapes = device.model.shapes()
    if warm_start and is_submodel(shapes, available):
        return find_footprint(shapes, available).read(warm_start)
    return device.model.initial_weights(seed)

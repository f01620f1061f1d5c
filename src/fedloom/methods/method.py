"""What a method is: a frozen dataclass of hyper-parameters with both halves of an algorithm, server's and device's."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Protocol

from ..client import Client, ClientResult, Task, fit, label_loss, like, on_any_device
from ..fleet import Device, EvalTarget, Fleet, RoundContext, Tier, nesting_problem, slices
from ..footprints import ClientUpdate, Footprint, between, is_part
from ..models import Model, cost
from ..tensors import Parcel, Tensors

Models = Literal["one model", "sizes of one model", "any models"]
BY_EXAMPLES = 'the number of its examples, by which it counts (method.weighting = "uniform" does without)'


class Method(Protocol):
    """Tasks, marked `@on_device`, are the method's own functions (client, inbox) -> Outcome."""

    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = ""  # what leaves a device
    keeps: ClassVar[str] = ""  # what stays on it from round to round
    gives: ClassVar[str] = ""  # "global" or "personalized" models
    admits: ClassVar[Models] = "sizes of one model"  # what the devices' models may be to each other
    ships: ClassVar[str] = ""  # the part of a net whose features leave the device; "": none do
    simulated: ClassVar[bool] = False  # whether only a simulation can do it
    sample: ClassVar[Mapping[str, Any]] = {}  # settings for a first, small run, where the defaults are none

    @classmethod
    def made(cls, settings: Mapping[str, Any], methods: Mapping[str, type["Method"]]) -> "Method":
        """The method with a recipe's settings; `methods` are all there are, for one that is made of others."""
        return cls(**settings)

    @property
    def needs_public_data(self) -> bool:
        """Whether the server needs examples of its own."""
        return False

    @property
    def dp_uncovered(self) -> str:
        """What of a device reaches the server's state in another way than by one vote of weight 1 in the one aggregate of a
        round: noise on the aggregate does not hide it. "": nothing. Who does not say is taken to send all of it so."""
        return self.leaves or "what it does not tell"

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        """Where the devices of a tier vote in that aggregate: known before anybody is asked."""
        return tier.footprint

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        """The server's first state; `warm` is an earlier model to go on from. By default one global model."""
        return {"weights": warm or fleet.global_model.initial_weights(seed)}

    @abstractmethod
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        """One round: the server's state before it -> after it."""

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        """What is judged. By default the global model, at every tier through its footprint."""
        return {"server": slices(server["weights"])}

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        """A device's first memory."""
        return {}

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        """A last exchange after the last round; None: there is none."""
        return None

    def fleet_problem(self, fleet: Fleet) -> str | None:
        """Why this fleet cannot be trained by this method; None when it can."""
        problem = None
        if self.admits == "one model":
            problem = one_model(type(self).__name__.lower(), fleet)
        elif self.admits == "sizes of one model":
            problem = nesting_problem(fleet)
        return problem or self.check_fleet(fleet)

    def check_fleet(self, fleet: Fleet) -> str | None:
        """What else the method has against a fleet whose models it admits."""
        return None

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        """Multiply-adds of a device that trains on so many examples in so many steps: three passes' worth of each."""
        return 3.0 * cost(model).macs * examples

    def server_macs(self, model: Model, examples: int) -> float:
        """Multiply-adds of the server in a round in which devices hold so many examples; averaging does not count."""
        return 0.0

    def find(self, *address: str) -> Any:
        """A task, or what a device is judged with, by its name: so that no code has to travel."""
        return getattr(self, *address)


@on_any_device(sends={"weights": like("weights")})
def train_on_labels(client: Client, inbox: Parcel) -> ClientResult:
    """A device's half where nothing is special about it: learn the labels, send the weights."""
    return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})


def averaged_by_examples(task: Task, server: Parcel, context: RoundContext, per_device: Parcel | None = None) -> Parcel:
    """A server's half where nothing is special about it: everybody gets the global model, perhaps with something
    beside it, and FedAvg's mean is next."""
    box = {"weights": server["weights"], **(per_device or {})}
    replies = context.ask(task, dict.fromkeys(context.cohort, box))
    said = (ClientUpdate(reply.device.footprint, reply.sent["weights"], reply.examples) for reply in replies)
    return {"weights": context.aggregate(server["weights"], said)}


def first_weights(device: Device, seed: int, warm: Tensors | None) -> Tensors:
    """What a device with a model of its own begins with: its part of an earlier model, if that has it."""
    held = {name: weight.shape for name, weight in (warm or {}).items()}
    own = device.model.shapes()
    return between(own, held).read(warm) if warm and is_part(own, held) else device.model.initial_weights(seed)


def fixed_tiers(fleet: Fleet) -> str | None:
    """The reason of a method whose devices keep a model, or a part of one."""
    if fleet.assignment == "fixed":
        return None
    return 'a device that keeps its model cannot be of another tier every round; set fleet.assignment = "fixed"'


def one_model(method: str, fleet: Fleet) -> str | None:
    """The reason of a method that trains one model on every device alike."""
    if all(tier.model.is_equivalent(fleet.global_model) for tier in fleet.active_tiers):
        return None
    return f"{method} gives every device the same model, but the tiers differ; use one tier, or a method with tiers"

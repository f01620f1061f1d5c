"""The interface of a federated learning method.

A method is a frozen dataclass of hyperparameters that holds both halves of an algorithm, the server's and the device's.
`Method` is the algorithm; `MethodInfo` and `Declarations` describe it to reports, checks and cost estimates.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from ..client import Client, ClientResult, Task, fit, label_loss, like, on_any_device
from ..data import LearningTask
from ..fleet import Device, EvalTarget, Fleet, RoundContext, Tier, find_nesting_problem, tier_slices
from ..footprints import ClientUpdate, Footprint, read_submodel
from ..models import Model, compute_cost, exit_names
from ..registry import dataclass_settings
from ..settings import FrozenDict
from ..tensors import Parcel, Tensors

EXAMPLE_COUNT = 'the number of its examples, by which it is weighted (set method.weighting = "uniform" to avoid it)'


@dataclass(frozen=True)
class MethodInfo:
    """What is true of a method whatever its settings. Everything is optional and changes no result.

    Parameters
    ----------
    paper : authors, venue and year.
    uploads : what leaves a device, in words.
    client_state : what a device keeps from round to round.
    produces : one "global" model, or "personalized" ones.
    heterogeneity : how the tiers' models may differ: not at all ("one model"), "nested" in the largest, or "any".
    shares_features : the submodule whose features devices upload; "": none.
    simulation_only : whether the method cannot run on real devices.
    example_settings : settings for a small first run, where the defaults are not enough.
    example_nets : the tiers' nets of that run: of several "widths"; with "one exit", with "exits" after every stage, or
        with "exits and widths"; of more or fewer "layers" or "columns"; "unrelated" ones; "": the first that the method
        supports.
    example_compression : the section `compression` of that run, for a method that is about the size of messages.
    needs : what the method needs of the task: "class_labels", one for every example; "": nothing but a loss.
    server_step : what the server does instead of taking the average, in words such as "has a step of its own", if a
        server optimizer cannot take its place; "": the average is the new model.
    """

    paper: str = ""
    uploads: str = ""
    client_state: str = "nothing"
    produces: Literal["global", "personalized"] = "global"
    heterogeneity: Literal["one model", "nested", "any"] = "nested"
    shares_features: str = ""
    simulation_only: bool = False
    example_settings: Mapping[str, Any] = FrozenDict()
    example_nets: Literal["", "widths", "one exit", "exits", "exits and widths", "layers", "columns", "unrelated"] = ""
    example_compression: Mapping[str, Any] = FrozenDict()
    needs: Literal["", "class_labels"] = ""
    server_step: str = ""


class Declarations(Protocol):
    """What depends on a method's settings. The defaults fit a method that averages weights once per round.

    Attributes
    ----------
    info : what is true whatever the settings.
    """

    info: ClassVar[MethodInfo] = MethodInfo()

    @property
    def shares_features(self) -> str:
        """The submodule whose features devices upload; "": none."""
        return self.info.shares_features

    def check_task(self, task: LearningTask, given: Collection[str] = ()) -> str | None:
        """Why the method cannot learn a task; None if it can. By default what `info.needs` says.

        Parameters
        ----------
        task : the task.
        given : the settings that the recipe names, as opposed to those left to their defaults.
        """
        if self.info.needs != "class_labels" or task.has_class_labels:
            return None
        return (
            f"{type(self).__name__.lower()} needs one class label for every example, and {task.kind} has none; "
            "use a method that needs only a loss, such as heterofl or fedavg"
        )

    @property
    def produces(self) -> Literal["global", "personalized"]:
        """One "global" model, or "personalized" ones: decides which test counts first, see `headline_test`."""
        return self.info.produces

    @property
    def server_step(self) -> str:
        """What the server does instead of taking the average, if a server optimizer cannot; "": nothing."""
        return self.info.server_step

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
        """The entries of the global model that a tier's devices update in that aggregate.

        Parameters
        ----------
        tier : the tier.
        fleet : the fleet that is trained.
        round_number : the round, for methods whose slices move.
        """
        return tier.footprint

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        """Multiply-adds of training: a forward pass, and a backward pass of twice its cost, for each example.

        Parameters
        ----------
        model : the device's model.
        examples : the number of examples that it trains on in a round, counted once per epoch.
        steps : the number of its training steps.
        """
        return 3.0 * compute_cost(model).macs * examples

    def trained_beside(self, model: Model, tier_models: Mapping[str, Model]) -> tuple[Model, ...]:
        """Models that a device trains besides its own, whose cost adds to it: by default none.

        Parameters
        ----------
        model : the device's own.
        tier_models : the model of every tier that takes part, by name.
        """
        return ()

    def server_macs(self, model: Model, examples: Sequence[int]) -> float:
        """Multiply-adds of the server in a round, the most there can be. Averaging is not counted.

        Parameters
        ----------
        model : the global model.
        examples : the number of examples of each of the round's devices.
        """
        return 0.0


class Method(Declarations, Protocol):
    """The interface of a method: a frozen dataclass whose fields are its settings.

    Only `round` is required. Its tasks are methods `(self, client, inbox) -> ClientResult` with the decorator
    `@on_device`.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class MyFedAvg(Method):
    ...     info = MethodInfo(uploads="weights, example count", heterogeneity="one model")
    ...
    ...     def round(self, server: Parcel, context: RoundContext) -> Parcel:
    ...         replies = context.ask(self.train, {device: server for device in context.cohort})
    ...         updates = [ClientUpdate(r.device.footprint, r.upload["weights"], r.examples) for r in replies]
    ...         return {"weights": context.aggregate(server["weights"], updates)}
    ...
    ...     @on_device(sends={"weights": like("weights")})
    ...     def train(self, client: Client, inbox: Parcel) -> ClientResult:
    ...         return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})
    """

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], methods: Mapping[str, type["Method"]]) -> "Method":
        """Build the method from a recipe's settings.

        Parameters
        ----------
        settings : the settings, by name.
        methods : the registry of methods, for a method composed of others.
        """
        return cls(**settings)

    def to_settings(self, methods: Mapping[str, type["Method"]]) -> dict[str, Any]:
        """The settings that differ from their defaults, as a recipe writes them: the inverse of `from_settings`.

        Parameters
        ----------
        methods : the registry of methods, for a method composed of others.
        """
        return dataclass_settings(self)

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        """The initial server state: by default one global model.

        Parameters
        ----------
        fleet : the fleet that is trained.
        seed : the seed of the run.
        warm_start : weights of the global model to start from, instead of random ones.
        """
        return {"weights": warm_start or fleet.global_model.initial_weights(seed)}

    @abstractmethod
    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        """Run one round and return the next server state.

        Parameters
        ----------
        server : the server state after the round before.
        context : the cohort, and what a method can use in a round: `ask`, `aggregate`, public data and randomness.
        """

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        """The models to evaluate, by name: by default every tier's slice of the global model.

        Parameters
        ----------
        server : the server state.
        """
        return {"server": tier_slices(server["weights"])}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        """A device's initial state: by default empty.

        Parameters
        ----------
        device : the device.
        seed : the seed of the run.
        warm_start : weights of the global model to start from, as in `start`: not the device's part of them.
        """
        return {}

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        """An exchange after the last round; None if there is none.

        Parameters
        ----------
        server : the server state after the last round.
        context : a round context, as for `round`.
        """
        return None

    def check_fleet(self, fleet: Fleet) -> str | None:
        """Why the method cannot train this fleet, beyond what `info.heterogeneity` says; None if it can.

        Parameters
        ----------
        fleet : the fleet.
        """
        return None

    def find(self, *ref: str) -> Any:
        """Look up a task or an evaluation function by name, so that no code has to be sent.

        Parameters
        ----------
        ref : the path of names; the default takes one, an attribute of the method.
        """
        return getattr(self, *ref)


def headline_test(produces: str, tests: Collection[str] = ("global", "local")) -> str:
    """The test that a method is for, which progress, tables, verdicts and charts show first.

    Personal models are for the devices' own test examples ("local"), a global model for the whole test set ("global").
    If that test is not evaluated, the other one counts.

    Parameters
    ----------
    produces : what the method produces, "global" or "personalized".
    tests : the tests that are evaluated.
    """
    wanted = "local" if produces == "personalized" else "global"
    return wanted if wanted in tests or not tests else sorted(tests)[0]


def training_macs(method: Method, model: Model, tier_models: Mapping[str, Model], examples: int, steps: int) -> float:
    """Multiply-adds of a device's training in a round: of its own model, and of those that it trains beside it.

    Parameters
    ----------
    method : the method.
    model : the device's model.
    tier_models : the model of every tier that takes part, by name.
    examples : the number of examples that it trains on, counted once per epoch.
    steps : the number of its training steps.
    """
    return sum(method.device_macs(one, examples, steps) for one in (model, *method.trained_beside(model, tier_models)))


def fleet_problem(method: Method, fleet: Fleet) -> str | None:
    """Why a method cannot train a fleet; None if it can.

    Parameters
    ----------
    method : the method.
    fleet : the fleet.
    """
    problem = None
    if method.info.heterogeneity == "one model":
        problem = one_model_problem(type(method).__name__.lower(), fleet)
    elif method.info.heterogeneity == "nested":
        problem = find_nesting_problem(fleet)
    return problem or method.check_fleet(fleet)


def one_model_problem(method: str, fleet: Fleet) -> str | None:
    """Why a method that trains the same model on every device cannot train a fleet; None if it can.

    Parameters
    ----------
    method : what the method is called in the message.
    fleet : the fleet.
    """
    if all(tier.model.is_equivalent(fleet.global_model) for tier in fleet.active_tiers):
        return None
    return f"{method} gives every device the same model, but the tiers differ; use one tier, or a method with tiers"


def early_exit_problem(method: str, fleet: Fleet) -> str | None:
    """For methods about early exits: without one they would only average slices, under another name.

    Parameters
    ----------
    method : its name.
    fleet : the fleet.
    """
    if any(len(exit_names(tier.model)) > 1 for tier in fleet.tiers):
        return None
    family = fleet.global_model.family
    return (
        f"{method} is about early exits, and {family} has none: it would only average slices, as heterofl does; "
        "use a net with exits: columnnet, or preactresnet, convnet and transformer with `exit_after`, or heterofl"
    )


def one_prediction_problem(method: str, fleet: Fleet) -> str | None:
    """For methods that compare what nets make of whole examples: why they cannot train a fleet; None if they can.

    Parameters
    ----------
    method : its name.
    fleet : the fleet.
    """
    for tier in fleet.active_tiers:
        if not tier.model.predicts_whole_examples():
            return (
                f"{method} needs one prediction for every example, and {tier.model.family} predicts each of its tokens "
                "or pixels; use a method that needs only a loss, such as heterofl or fedavg"
            )
    return None


def fixed_tiers_problem(fleet: Fleet) -> str | None:
    """Why a method whose devices keep a model, or a part of one, cannot train a fleet; None if it can.

    Parameters
    ----------
    fleet : the fleet.
    """
    if fleet.assignment == "fixed":
        return None
    return 'a device that keeps its model cannot be of another tier every round; set fleet.assignment = "fixed"'


@on_any_device(sends={"weights": like("weights")})
def train_on_labels(client: Client, inbox: Parcel) -> ClientResult:
    """Plain local training, as a task: minimize the loss on the labels and upload the weights.

    Parameters
    ----------
    client : the devices that train.
    inbox : the received parcel, with the bundle "weights".
    """
    return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client))})


def fedavg_round(task: Task, server: Parcel, context: RoundContext, extra: Parcel | None = None) -> Parcel:
    """Send the global model to the cohort and average the replies, weighted by the number of examples.

    Parameters
    ----------
    task : what devices do; it uploads the bundle "weights".
    server : the server state, with the bundle "weights".
    context : the round.
    extra : further bundles to send.

    Returns
    -------
    The next server state.
    """
    inbox = {"weights": server["weights"], **(extra or {})}
    replies = context.ask(task, dict.fromkeys(context.cohort, inbox))
    updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], reply.examples) for reply in replies)
    return {"weights": context.aggregate(server["weights"], updates)}


def init_weights(device: Device, seed: int, warm_start: Tensors | None) -> Tensors:
    """Initial weights of a device's own model.

    Parameters
    ----------
    device : the device.
    seed : the seed of the run.
    warm_start : weights to start from; used if they contain the device's model.
    """
    shapes = device.model.shapes()
    found = read_submodel(shapes, device.footprint, warm_start) if warm_start else {}
    return found if found.keys() == shapes.keys() else device.model.initial_weights(seed)

"""What a method is: a frozen dataclass of hyper-parameters with both halves of an algorithm, server's and device's."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

from ..fleet import Candidate, Device, Fleet, Turn, slices
from ..tensors import Parcel, Tensors
from ..training import Client, Outcome, fit, label_loss, like, on_any_device


class Method(Protocol):
    """Tasks, marked `@on_device`, are the method's own functions (client, inbox) -> Outcome."""

    paper: ClassVar[str] = ""
    leaves: ClassVar[str] = ""  # what leaves a device
    keeps: ClassVar[str] = ""  # what stays on it from round to round
    gives: ClassVar[str] = ""  # "global" or "personalised" models

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        """The server's first state; `warm` is an earlier model to go on from. By default one global model."""
        return {"weights": warm or fleet.whole.initial(seed)}

    @abstractmethod
    def round(self, server: Parcel, turn: Turn) -> Parcel:
        """One round: the server's state before it -> after it."""

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        """What is judged. By default the global model, at every tier through its footprint."""
        return {"server": slices(server["weights"])}

    def prepare(self, device: Device, seed: int) -> Parcel:
        """A device's first memory."""
        return {}

    def finish(self, server: Parcel, turn: Turn) -> Parcel:
        """A last exchange after the last round."""
        return server

    def refuses(self, fleet: Fleet) -> str | None:
        """Why this fleet cannot be trained by this method; None when it can."""
        return None


@on_any_device(sends={"weights": like("weights")})
def train_on_labels(client: Client, inbox: Parcel) -> Outcome:
    """A device's half where nothing is special about it: learn the labels, send the weights."""
    return Outcome(send={"weights": fit(client, inbox["weights"], label_loss(client))})


def one_model(method: str, fleet: Fleet) -> str | None:
    """The reason of a method that trains one model on every device alike."""
    if all(tier.model == fleet.whole for tier in fleet.tiers):
        return None
    return f"{method} gives every device the same model, but the tiers differ; use one tier, or a method with tiers"

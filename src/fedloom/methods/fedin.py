"""FedIN. Chan, Jiang, Deng & Ngai, Federated Intermediate Layers Learning, 2023, Algorithm 1.

All devices share an extractor and a classifier; what lies between is each one's own. Devices send what enters and what
leaves their middle, and each also learns to make the same of others' features, as far as its own labels allow.
"""

from dataclasses import dataclass
from typing import Literal

from ..fleet import Fleet, Turn
from ..models import Model, cost
from ..seeds import FEATURE_PAIRS
from ..settings import Count, NotNegative
from ..tensors import Parcel, Tensors, combine
from ..training import Batch, Client, Layout, Outcome, fit, gradient, label_loss, like, on_device
from .pairs import PARTS, collected, dealt, features_loss, no_pairs, pair_layout, parts_problem, projected, refilled
from .sharing import Sharing, parted


@dataclass(frozen=True)
class FedIN(Sharing):
    """`middle` learns by the sum of the labels' gradient, `local` (the paper's lambda) halves of it, and the features'
    (Eq. 16); by the features' projected onto what does not harm the labels (Eq. 15), tensor by tensor or in all; by one
    update after the other; or from labels alone. A device sends `pairs` of its examples, or "all". The server keeps
    `buffer` of them, none older than `max_age` rounds, and deals out `batch`. `aggregation`: of the ends."""

    paper = "Chan et al., 2023"
    leaves = "weights of both ends, features of its examples (near-raw: see fedloom audit)"
    keeps, gives, admits, ships = "its middle layers", "personalised", "any models", "extractor"

    middle: Literal["sum", "project", "project_all", "sequential", "none"] = "sum"
    local: NotNegative = 2.0
    aggregation: bool = True
    pairs: Count | Literal["all"] = 128
    buffer: Count = 5000
    max_age: Count = 1
    batch: Count = 512

    @property
    def shared(self) -> tuple[str, ...]:
        return ("extractor", "classifier") if self.aggregation else ()

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {**super().start(fleet, seed, warm), "pairs": no_pairs(fleet.whole)}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        others = dealt(server["pairs"], self.batch, turn.number - self.max_age, turn.draw(FEATURE_PAIRS))
        replies = turn.ask(self.train, {device: {**self.inbox(server, device), **others} for device in turn.cohort})
        kept = refilled(server["pairs"], replies, turn.number, self.buffer, self.max_age)
        return {"weights": self.averaged(server, turn, replies, by_examples=False), "pairs": kept}

    @on_device(sends={"weights": like("weights"), "pairs": "sent_pairs"}, mixes=False)
    def train(self, client: Client, inbox: Parcel) -> Outcome:
        labels = label_loss(client)

        def from_features(weights: Tensors, batch: Batch) -> Tensors:
            middle = {name: weight for name, weight in weights.items() if name.startswith("intermediate.")}
            return gradient(features_loss(client, inbox["pairs"]), middle, batch, all_weights=weights)

        def from_both(weights: Tensors, batch: Batch) -> Tensors:
            own, other = gradient(labels, weights, batch), from_features(weights, batch)
            return {**own, **self.agreed({name: own[name] for name in other}, other)}

        updates = (labels, from_features) if self.middle == "sequential" else (from_both,)
        weights = fit(client, self.whole(client, inbox), *(updates if "pairs" in inbox else (labels,)))
        shared, private = parted(weights, inbox)
        sent = {"weights": shared, "pairs": collected(client, weights, self._count(client.held))}
        return Outcome(send=sent, remember={"weights": private})

    def agreed(self, own: Tensors, other: Tensors) -> Tensors:
        """The step that learns from features as far as the labels agree."""
        if self.middle == "sum":
            return combine(lambda mine, theirs: theirs + self.local / 2 * mine, own, other)
        if self.middle == "project":
            return {name: projected({name: own[name]}, {name: other[name]})[name] for name in own}
        return projected(own, other)

    def device_work(self, model: Model, examples: int, steps: int) -> float:
        both = 3.0 * cost(model.part("intermediate")).macs * examples if self.middle != "none" else 0.0
        return super().device_work(model, examples, steps) + both

    def sent_pairs(self, model: Model, inbox: Parcel, examples: int) -> Layout:
        return pair_layout(model, self._count(examples))

    def _count(self, examples: int) -> int:
        return 0 if self.middle == "none" else examples if self.pairs == "all" else min(self.pairs, examples)

    def objection(self, fleet: Fleet) -> str | None:
        return parts_problem("fedin", fleet, PARTS, ends=self.shared) or super().objection(fleet)

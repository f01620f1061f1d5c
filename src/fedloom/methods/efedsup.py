"""E-FedSup: FedSup where each device gets only a sub-net it can carry. Kim & Yun, 2022, section 3.3.

Every round a device draws an architecture within its tier's budget and trains it plainly. The server fills what a
device did not have with what it broadcast, and averages: a weight few devices hold moves little, unlike in HeteroFL.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..fleet import Candidate, Device, Fleet, Reply, Turn, slices
from ..footprints import Contribution, part_of
from ..models import cost
from ..settings import FixedTable, Share
from ..tensors import Parcel, Tensors
from .method import Method, train_on_labels
from .supernet import Choice, chosen, space_problem


@dataclass(frozen=True)
class EFedSup(Method):
    """`space` as in fedsup. `budgets` are shares of the supernet's multiply-adds, by tier; a tier without one may spend
    what its own model costs."""

    paper = "Kim & Yun, 2022"
    leaves, keeps, gives = "weights of the device's sub-net, example count", "nothing", "global"
    train = train_on_labels

    space: Choice = "tiers"
    budgets: Mapping[str, Share] = FixedTable()

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return {"weights": warm or fleet.whole.initial(seed)}

    def round(self, server: Parcel, turn: Turn) -> Parcel:
        cohort = [self._with_subnet(device, turn) for device in turn.cohort]
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in cohort}
        replies = turn.ask(self.train, inboxes)
        all_of_it = part_of(turn.fleet.whole, turn.fleet.whole)

        def padded(reply: Reply) -> Contribution:
            weights = reply.device.footprint.write(server["weights"], reply.sent["weights"])
            return Contribution(all_of_it, weights, reply.examples)

        return {"weights": turn.merge(server["weights"], map(padded, replies))}

    def _with_subnet(self, device: Device, turn: Turn) -> Device:
        whole = turn.fleet.whole
        share = self.budgets.get(device.tier)
        budget = cost(device.model).macs if share is None else share * cost(whole).macs
        nets = chosen(self.space, [tier.model for tier in turn.fleet.tiers])
        net = nets.draw_within(whole, turn.draw(f"architecture of {device.name}"), budget)
        return device.carrying(net, whole)

    def candidates(self, server: Parcel) -> Mapping[str, Candidate]:
        return {"server": slices(server["weights"])}

    def refuses(self, fleet: Fleet) -> str | None:
        return space_problem("efedsup", self.space, fleet)

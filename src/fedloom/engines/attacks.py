"""Attacks by devices that work together, to see whether a defence holds.

Attackers see what the server sends and what all others answer; what they upload passes the same gate. Attacks change
the bundle "weights" of updates, whatever the method. Evaluation stays honest.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data import IGNORED, Dataset, Examples
from ..fleet import Exchange, Fleet, Inboxes, Reply, Request, count_parameters
from ..footprints import Footprint, take_block
from ..registry import Registry
from ..seeds import ATTACK, MALICIOUS, generator
from ..tensors import Tensors, combine
from .client_data import ClientData

WEIGHTS = "weights"


@dataclass(frozen=True)
class AttackContext:
    """What attackers know in one request.

    Parameters
    ----------
    malicious : their own replies, before the attack.
    honest : the replies of the others.
    inboxes : what the server sent to every device.
    fleet : the fleet.
    draw : the source of randomness.
    """

    malicious: list[Reply]
    honest: list[Reply]
    inboxes: Inboxes
    fleet: Fleet
    draw: np.random.Generator

    def received(self, reply: Reply) -> Tensors:
        """The weights that the server sent to a device.

        Parameters
        ----------
        reply : the reply of the device.
        """
        return self.inboxes[reply.device][WEIGHTS]

    def update(self, reply: Reply) -> dict[str, Tensor]:
        """What a device changed in the weights that it received.

        Parameters
        ----------
        reply : the reply of the device.
        """
        return combine(torch.sub, reply.upload[WEIGHTS], self.received(reply))

    def honest_updates(self, like: Reply) -> list[dict[str, Tensor]]:
        """Updates of honest devices with the same layout; without any, the attacker's own.

        Parameters
        ----------
        like : the attacker's reply.
        """
        alike = [one for one in self.honest if _shapes(one.upload[WEIGHTS]) == _shapes(like.upload[WEIGHTS])]
        return [self.update(reply) for reply in alike or [like]]


Craft = Callable[[AttackContext], list[Tensors]]
"""The weights that attackers upload instead, in their order."""

Poison = Callable[[ClientData, Collection[str]], ClientData]
"""The data of all devices after these have poisoned their own."""


@dataclass(frozen=True)
class Attack:
    """What malicious devices do: craft their uploads, or poison their training data.

    Parameters
    ----------
    craft : a function from the `AttackContext` to the weights that attackers upload instead, in their order; None: they
        upload honestly.
    poison : a function from the data of all devices and the names of the attackers to the poisoned data; None: they
        train on their own data.
    """

    craft: Craft | None = None
    poison: Poison | None = None


def _scaled(factor: float) -> Craft:
    """The attacker's own update times a factor; a negative one points away from the optimum."""
    return lambda context: [
        combine(lambda old, step: old + factor * step, context.received(one), context.update(one))
        for one in context.malicious
    ]


def _gaussian(strength: float) -> Craft:
    """Noise in place of an update, `strength` times as long."""

    def craft(context: AttackContext) -> list[Tensors]:
        return [
            combine(lambda old, noise: old + noise, context.received(one), _noise(context, one, strength))
            for one in context.malicious
        ]

    return craft


def _inner_product(strength: float) -> Craft:
    """IPM, Xie, Koyejo & Gupta, UAI 2019: the negated mean of honest updates, no longer than honest ones, so that norms
    do not reveal it."""

    def craft(context: AttackContext) -> list[Tensors]:
        return [_moved(context, one, lambda steps: -strength * steps.mean(0)) for one in context.malicious]

    return craft


def _little_is_enough(deviations: float) -> Craft:
    """ALIE, Baruch, Baruch & Goldberg, NeurIPS 2019: the honest mean minus some standard deviations, entry by entry, so
    that each value could be an honest one."""

    def craft(context: AttackContext) -> list[Tensors]:
        def shifted(steps: Tensor) -> Tensor:
            return steps.mean(0) - deviations * steps.std(0, correction=0)

        return [_moved(context, one, shifted) for one in context.malicious]

    return craft


def _low_coverage(factor: float) -> Craft:
    """Attackers of the largest tier scale their update where the fewest devices contribute, and are honest elsewhere;
    all other attackers are honest."""

    def craft(context: AttackContext) -> list[Tensors]:
        everyone = (*context.malicious, *context.honest)
        largest = max((count_parameters(one.device.model.shapes()) for one in everyone), default=0)
        contributors = _count_contributors(context)

        def attacked(one: Reply) -> Tensors:
            if count_parameters(one.device.model.shapes()) < largest:
                return one.upload[WEIGHTS]
            counts = {name: take_block(contributors[name], b) for name, b in _covered(one).blocks.items()}
            fewest = min((int(count.min()) for count in counts.values()), default=0)
            steps = context.update(one)
            factors = {
                name: torch.where(counts[name] == fewest, factor, 1.0) if name in counts else torch.ones(())
                for name in steps
            }
            received = context.received(one)
            return combine(lambda old, step, by: old + by.to(step.dtype) * step, received, steps, factors)

        return [attacked(one) for one in context.malicious]

    return craft


def _wrong_tier(context: AttackContext) -> list[Tensors]:
    """The weights of a device of another tier, where there is one: the gate refuses them."""
    everyone = [*context.honest, *context.malicious]

    def borrowed(one: Reply) -> Tensors:
        shapes = _shapes(one.upload[WEIGHTS])
        others = (other.upload[WEIGHTS] for other in everyone if _shapes(other.upload[WEIGHTS]) != shapes)
        return next(others, one.upload[WEIGHTS])

    return [borrowed(one) for one in context.malicious]


def _label_flip(data: ClientData, names: Collection[str]) -> ClientData:
    """The attackers' examples get the opposite target. They are copies, because a partition may give one example to
    several devices."""
    rows = torch.cat([data.train[name] for name in sorted(names)]) if names else torch.zeros(0, dtype=torch.int64)
    dataset, first = data.dataset, len(data.dataset.train)
    train = dataset.train
    flipped = Examples(torch.cat([train.x, train.x[rows]]), torch.cat([train.y, _opposite(dataset, train.y[rows])]))
    indices = dict(data.train)
    for name in sorted(names):
        indices[name] = torch.arange(first, first + len(indices[name]))
        first += len(indices[name])
    return replace(data, dataset=replace(dataset, train=flipped, groups=None), train=indices)


def _opposite(dataset: Dataset, y: Tensor) -> Tensor:
    """Classes in the opposite order, the labels that an example lacks, or numbers mirrored in the middle of theirs."""
    if dataset.task.target == "number":
        lowest, highest = (function(dataset.train.y, 0) for function in (torch.amin, torch.amax))
        return lowest + highest - y
    if dataset.task.target == "labels":
        return 1 - y
    return torch.where(y == IGNORED, y, dataset.classes - 1 - y)


def label_flip() -> Attack:
    """Label flipping: attackers train on the opposite labels, y -> classes - 1 - y, or on mirrored numbers."""
    return Attack(poison=_label_flip)


def sign_flip(factor: float = -5.0) -> Attack:
    """Sign flipping: the attacker's own update times a negative factor, so that it points away from the optimum.

    Parameters
    ----------
    factor : the factor.
    """
    return Attack(_scaled(factor))


def gaussian(strength: float = 100.0) -> Attack:
    """Gaussian noise in place of an update.

    Parameters
    ----------
    strength : how many times as long as the update the noise is.
    """
    return Attack(_gaussian(strength))


def scaling(factor: float = 20.0) -> Attack:
    """Scaling: the attacker's own update times a large factor.

    Parameters
    ----------
    factor : the factor.
    """
    return Attack(_scaled(factor))


def ipm(strength: float = 1.0) -> Attack:
    """Inner-product manipulation: the negated mean of honest updates (Xie, Koyejo & Gupta, UAI 2019).

    Parameters
    ----------
    strength : the factor of the negated mean; with 1 the upload is no longer than honest ones, so norms do not reveal
        it.
    """
    return Attack(_inner_product(strength))


def alie(deviations: float = 1.5) -> Attack:
    """A little is enough: the honest mean minus some standard deviations (Baruch et al., NeurIPS 2019).

    Parameters
    ----------
    deviations : how many standard deviations, entry by entry; with few, each value could be an honest one.
    """
    return Attack(_little_is_enough(deviations))


def low_coverage(factor: float = -20.0) -> Attack:
    """Low coverage: attackers of the largest tier scale their update where the fewest devices contribute.

    They are honest elsewhere, and attackers of other tiers are honest.

    Parameters
    ----------
    factor : the factor.
    """
    return Attack(_low_coverage(factor))


def wrong_tier() -> Attack:
    """Wrong tier: attackers upload the weights of another tier, which the gate refuses."""
    return Attack(_wrong_tier)


ATTACKS: Registry[Callable[..., Attack]] = Registry(
    "attacks",
    {
        "label_flip": label_flip,
        "sign_flip": sign_flip,
        "gaussian": gaussian,
        "scaling": scaling,
        "ipm": ipm,
        "alie": alie,
        "low_coverage": low_coverage,
        "wrong_tier": wrong_tier,
    },
)


def malicious(fleet: Fleet, share: float) -> frozenset[str]:
    """The devices that attack, the same for every attack and defence of a seed.

    Parameters
    ----------
    fleet : the fleet.
    share : the share of all devices.
    """
    drawn = generator(fleet.seed, MALICIOUS).permutation(fleet.size)[: round(share * fleet.size)]
    return frozenset(fleet.name(int(index)) for index in drawn)


def poisoned(attack: Attack, data: ClientData, names: Collection[str]) -> ClientData:
    """The data of all devices under an attack.

    Parameters
    ----------
    attack : the attack.
    data : the data of all devices.
    names : the devices that attack.
    """
    return attack.poison(data, names) if attack.poison else data


@dataclass(frozen=True)
class AttackTransport:
    """Some devices carry out an attack: together, and knowing what all others send.

    Parameters
    ----------
    attack : the attack.
    names : the devices that attack.
    fleet : the fleet.
    side : where the transport runs.
    """

    attack: Attack
    names: frozenset[str]
    fleet: Fleet
    side: Literal["network"] = "network"

    def open(self, request: Request) -> Exchange:
        return _AttackedExchange(self, request)


@dataclass
class _AttackedExchange(Exchange):
    transport: AttackTransport
    request: Request

    def gather(self, replies: Iterable[Reply]) -> Iterable[Reply]:
        craft, request = self.transport.attack.craft, self.request
        if craft is None or WEIGHTS not in request.task.sends:
            return replies
        names, fleet = self.transport.names, self.transport.fleet
        ordered = sorted(replies, key=lambda reply: reply.device.name)  # the order of arrival must not matter
        updates = [reply for reply in ordered if self._is_update(reply)]
        malicious = [reply for reply in updates if reply.device.name in names]
        honest = [reply for reply in updates if reply.device.name not in names]
        draw = generator(fleet.seed, ATTACK, request.round_number, request.task.stream, request.repeat)
        crafted = craft(AttackContext(malicious, honest, request.inboxes, fleet, draw))
        forged = {
            reply.device: replace(reply, upload={**reply.upload, WEIGHTS: weights})
            for reply, weights in zip(malicious, crafted, strict=True)
        }
        return [forged.get(reply.device, reply) for reply in ordered]

    def _is_update(self, reply: Reply) -> bool:
        """Whether a reply's weights are those of its inbox, changed."""
        received = self.request.inboxes[reply.device].get(WEIGHTS)
        return (
            received is not None and not reply.device.is_server and _shapes(received) == _shapes(reply.upload[WEIGHTS])
        )


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _moved(context: AttackContext, one: Reply, step: Callable[[Tensor], Tensor]) -> Tensors:
    honest, received = context.honest_updates(one), context.received(one)
    return {name: old + step(torch.stack([update[name] for update in honest])) for name, old in received.items()}


def _noise(context: AttackContext, one: Reply, strength: float) -> Tensors:
    """Drawn in order of names, because the order of tensors depends on how a reply came."""
    steps = dict(sorted(context.update(one).items()))
    entries = sum(step.numel() for step in steps.values())
    size = math.sqrt(sum(float(step.double().square().sum()) for step in steps.values()) / max(1, entries))
    return combine(
        lambda step: torch.from_numpy(context.draw.standard_normal(step.shape)).to(step.dtype) * (strength * size),
        steps,
    )


def _covered(one: Reply) -> Footprint:
    """The footprint of a device's weights, as far as their shapes are those of its model."""
    shapes = one.device.model.shapes()
    fitting = [name for name, tensor in one.upload[WEIGHTS].items() if shapes.get(name) == tensor.shape]
    return Footprint({name: block for name, block in one.device.footprint.blocks.items() if name in fitting})


def _count_contributors(context: AttackContext) -> dict[str, Tensor]:
    """For every entry of the global model, the number of devices that contribute to it."""
    shapes = context.fleet.global_model.shapes()
    counts = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for one in (*context.malicious, *context.honest):
        covered = _covered(one)
        counts = covered.write(counts, {name: count + 1 for name, count in covered.read(counts).items()})
    return counts

"""A test bench: an engine some of whose devices misbehave, so that a defence can be seen to hold.

Attackers see all that the server sends and what everybody answers, and work together. What they send goes through the
same gate as any reply. Attacks change the bundle "weights" of replies to a bundle "weights", whatever the method;
replies to other questions, such as those of a evaluation, stay honest.
"""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..data import Examples
from ..fleet import Exchange, Fleet, Inboxes, Reply, Request, count_parameters
from ..footprints import Footprint, take_block
from ..seeds import ATTACK, MALICIOUS, generator
from ..tensors import Tensors, combine
from .client_data import ClientData

WEIGHTS = "weights"


@dataclass(frozen=True)
class AttackContext:
    """What the attackers know in one ask: their own honest replies, the others', and what all were given."""

    bad: list[Reply]
    good: list[Reply]
    inboxes: Inboxes
    fleet: Fleet
    draw: np.random.Generator

    def given(self, reply: Reply) -> Tensors:
        return self.inboxes[reply.device][WEIGHTS]

    def update(self, reply: Reply) -> dict[str, Tensor]:
        return combine(torch.sub, reply.upload[WEIGHTS], self.given(reply))

    def honest_updates(self, like: Reply) -> list[dict[str, Tensor]]:
        """Those of honest devices with the same layout; an attacker whom nobody is like has only its own."""
        alike = [reply for reply in self.good if _shapes(reply.upload[WEIGHTS]) == _shapes(like.upload[WEIGHTS])]
        return [self.update(reply) for reply in alike or [like]]


Craft = Callable[[AttackContext], list[Tensors]]
"""What the attackers send instead, in their order."""

Poison = Callable[[ClientData, Collection[str]], ClientData]
"""What devices hold, once these have spoiled their own examples."""


@dataclass(frozen=True)
class Attack:
    craft: Craft | None = None
    poison: Poison | None = None


def scaled(factor: float) -> Craft:
    """Everybody's own update, so many times as long; negative: away from where it leads."""
    return lambda scene: [
        combine(lambda old, step: old + factor * step, scene.given(one), scene.update(one)) for one in scene.bad
    ]


def gaussian(strength: float) -> Craft:
    """Noise in place of an update, so many times as long as that."""

    def craft(scene: AttackContext) -> list[Tensors]:
        return [
            combine(lambda old, noise: old + noise, scene.given(one), _noise(scene, one, strength)) for one in scene.bad
        ]

    return craft


def inner_product(strength: float) -> Craft:
    """IPM, Xie, Koyejo & Gupta, UAI 2019: the honest mean, turned round; not longer than honest ones, so that no norm
    gives it away."""

    def craft(scene: AttackContext) -> list[Tensors]:
        return [_moved(scene, one, lambda steps: -strength * steps.mean(0)) for one in scene.bad]

    return craft


def little_is_enough(deviations: float) -> Craft:
    """ALIE, Baruch, Baruch & Goldberg, NeurIPS 2019: the honest mean less so many standard deviations, entry by entry:
    each a value that an honest device might have."""

    def craft(scene: AttackContext) -> list[Tensors]:
        def shifted(steps: Tensor) -> Tensor:
            return steps.mean(0) - deviations * steps.std(0, correction=0)

        return [_moved(scene, one, shifted) for one in scene.bad]

    return craft


def thinnest_ring(factor: float) -> Craft:
    """Devices of the widest tier scale their update where hardly anybody else has a vote; the rest of it, and all
    other attackers, are honest."""

    def craft(scene: AttackContext) -> list[Tensors]:
        widest = max((count_parameters(one.device.model.shapes()) for one in (*scene.bad, *scene.good)), default=0)
        votes = _votes(scene)

        def attacked(one: Reply) -> Tensors:
            if count_parameters(one.device.model.shapes()) < widest:
                return one.upload[WEIGHTS]
            counts = {name: take_block(votes[name], block) for name, block in _lying(one).blocks.items()}
            fewest = min((int(count.min()) for count in counts.values()), default=0)
            steps = scene.update(one)
            thin = {
                name: torch.where(counts[name] == fewest, factor, 1.0) if name in counts else torch.ones(())
                for name in steps
            }
            return combine(lambda old, step, by: old + by.to(step.dtype) * step, scene.given(one), steps, thin)

        return [attacked(one) for one in scene.bad]

    return craft


def wrong_tier(scene: AttackContext) -> list[Tensors]:
    """The weights of somebody of another tier: refused at the gate, where there is such a one."""
    everybody = [*scene.good, *scene.bad]

    def borrowed(one: Reply) -> Tensors:
        own = _shapes(one.upload[WEIGHTS])
        others = (other.upload[WEIGHTS] for other in everybody if _shapes(other.upload[WEIGHTS]) != own)
        return next(others, one.upload[WEIGHTS])

    return [borrowed(one) for one in scene.bad]


def label_flip(client_data: ClientData, names: Collection[str]) -> ClientData:
    """The attackers' examples get the label opposite, y -> classes - 1 - y. They are copies: a partition may give one
    example to several devices, and the honest keep theirs."""
    held = (
        torch.cat([client_data.train[name] for name in sorted(names)]) if names else torch.zeros(0, dtype=torch.int64)
    )
    data, first = client_data.dataset, len(client_data.dataset.train)
    flipped = Examples(
        torch.cat([data.train.x, data.train.x[held]]), torch.cat([data.train.y, data.classes - 1 - data.train.y[held]])
    )
    rows = dict(client_data.train)
    for name in sorted(names):
        rows[name] = torch.arange(first, first + len(rows[name]))
        first += len(rows[name])
    return replace(client_data, dataset=replace(data, train=flipped, groups=None), train=rows)


ATTACKS: dict[str, Attack] = {
    "label_flip": Attack(poison=label_flip),
    "sign_flip": Attack(scaled(-5.0)),
    "gaussian": Attack(gaussian(100.0)),
    "scaling": Attack(scaled(20.0)),
    "ipm": Attack(inner_product(1.0)),
    "alie": Attack(little_is_enough(1.5)),
    "thin_ring": Attack(thinnest_ring(-20.0)),
    "tier_lie": Attack(wrong_tier),
}


def malicious(fleet: Fleet, share: float) -> frozenset[str]:
    """Who misbehaves: a share of the devices, the same for every attack and every defence of a seed."""
    drawn = generator(fleet.seed, MALICIOUS).permutation(fleet.size)[: round(share * fleet.size)]
    return frozenset(fleet.name(int(index)) for index in drawn)


def poisoned(attack: Attack, client_data: ClientData, names: Collection[str]) -> ClientData:
    """What devices hold under an attack; the engine that is attacked must be given it."""
    return attack.poison(client_data, names) if attack.poison else client_data


@dataclass(frozen=True)
class AttackTransport:
    """Some devices, by name, carry out an attack: together, and knowing what all others send."""

    attack: Attack
    names: frozenset[str]
    fleet: Fleet
    end: Literal["network"] = "network"

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


def _moved(scene: AttackContext, one: Reply, step: Callable[[Tensor], Tensor]) -> Tensors:
    honest = scene.honest_updates(one)
    return {name: old + step(torch.stack([own[name] for own in honest])) for name, old in scene.given(one).items()}


def _noise(scene: AttackContext, one: Reply, strength: float) -> Tensors:
    """Drawn by name: in which order tensors stand in a reply depends on how it came."""
    steps = dict(sorted(scene.update(one).items()))
    entries = sum(step.numel() for step in steps.values())
    size = math.sqrt(sum(float(step.double().square().sum()) for step in steps.values()) / max(1, entries))
    return combine(
        lambda step: torch.from_numpy(scene.draw.standard_normal(step.shape)).to(step.dtype) * (strength * size), steps
    )


def _lying(one: Reply) -> Footprint:
    """Where a device's weights lie in the global model, as far as they are of the shape that this says."""
    shapes = one.device.model.shapes()
    fitting = [name for name, tensor in one.upload[WEIGHTS].items() if shapes.get(name) == tensor.shape]
    return Footprint({name: block for name, block in one.device.footprint.blocks.items() if name in fitting})


def _votes(scene: AttackContext) -> dict[str, Tensor]:
    """For every entry of the global model, how many speak for it."""
    votes = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in scene.fleet.global_model.shapes().items()}
    for one in (*scene.bad, *scene.good):
        part = _lying(one)
        votes = part.write(votes, {name: count + 1 for name, count in part.read(votes).items()})
    return votes

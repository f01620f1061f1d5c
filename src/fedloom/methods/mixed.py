"""Mixed fleets: several methods in one round, each for its own tiers, and one agreement among all of them.

A part is trained as if it were alone. Every part contributes to the mean kernel of unlabelled examples (FedHeNN's), and
devices of parts that `align` are drawn to it: so nets that share no weight may still learn from each other.

A method made of others, each for its own tiers: what a part knows of the whole, and how it is found again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from ..client import Client, ClientResult, Task
from ..fleet import Device, DeviceModel, Engine, EvalTarget, Fleet, ModelWeights, Reply, RoundContext
from ..settings import FixedTable
from ..tensors import Parcel, Tensors
from ._alignment import Agreement
from .method import Method

COMMON = "fleet."  # before the names of what comes from the whole fleet


@dataclass(frozen=True)
class Part:
    """`align`: whether its devices are drawn to how the whole fleet sees things."""

    tiers: tuple[str, ...]
    method: Method
    align: bool = False

    def fleet(self, whole: Fleet) -> Fleet:
        return whole.restricted(self.tiers)

    def context(self, context: RoundContext, engine: Engine) -> RoundContext:
        """The part's own turn, as if there were no other; what it moves is counted with the whole."""
        fleet = self.fleet(context.fleet)
        footprint = {tier.name: tier.footprint for tier in fleet.active_tiers}
        cohort = [replace(one, footprint=footprint[one.tier]) for one in context.cohort if one.tier in footprint]
        return replace(context, cohort=cohort, fleet=fleet, engine=engine, _asked=Counter())


@dataclass(frozen=True)
class PartEngine:
    """The engine of the whole fleet's turn as a part sees it. Its tasks are found under the part's number, and
    `guided`: with every inbox comes what is common to the fleet."""

    whole: RoundContext
    number: int
    guided: Callable[[Task], Task]
    common: Parcel  # beside every inbox

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterable[Reply]:
        extra = {COMMON + name: tensors for name, tensors in self.common.items()}
        boxes = {device: inbox if device.is_server else {**inbox, **extra} for device, inbox in inboxes.items()}
        for device in boxes:
            if not device.is_server:
                self.whole.note_down(device, extra)
        found_at = (str(self.number), *(task.address or (task.name,)))
        own = replace(self.guided(task), address=found_at, same=None if extra else task.same)
        return self.whole.engine.ask(own, boxes, round_number, repeat)

    def commit(self, round_number: int) -> None:
        self.whole.engine.commit(round_number)

    def close(self) -> None:
        self.whole.engine.close()


class MadeOfParts(Method, Protocol):
    """All that the parts do each for itself. Server state has every part's bundles, under its number."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def guided(self, part: Part, task: Task) -> Task:
        """A part's task, by devices that know of no other part's models."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            sizes = {tier: model for tier, model in client.sizes.items() if tier in part.tiers}
            return task.run(replace(client, sizes=sizes), inbox)

        return replace(task, run=run)

    @property
    def ships(self) -> str:  # type: ignore[override]
        return next((part.method.ships for part in self.parts if part.method.ships), "")

    @classmethod
    def made(cls, settings: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> Method:
        parts = tuple(_part(one, methods) for one in settings.get("parts", ()))
        return cls(**{**settings, "parts": parts})

    def start(self, fleet: Fleet, seed: int, warm: Tensors | None = None) -> Parcel:
        return self.each(lambda number, part: part.method.start(part.fleet(fleet), seed, warm))

    def prepare(self, device: Device, seed: int, warm: Tensors | None = None) -> Parcel:
        (part,) = [part for part in self.parts if device.tier in part.tiers]
        return part.method.prepare(device, seed, warm)

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        def ended(number: int, part: Part) -> Parcel:
            engine = PartEngine(context, number, partial(self.guided, part), {})
            last = part.method.finish(state_of(server, number), part.context(context, engine))
            return state_of(server, number) if last is None else last

        asked = context.traffic.asked
        made = self.each(ended)
        return made if context.traffic.asked > asked else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        found: dict[str, EvalTarget] = {}
        for number, part in enumerate(self.parts):
            for name, one in part.method.eval_targets(state_of(server, number)).items():
                free = name if name not in found else f"{name}-{number + 1}"
                found[free] = replace(one, tiers=part.tiers)
                if isinstance(one, DeviceModel):
                    found[free] = replace(one, tiers=part.tiers, address=(str(number), *one.found_at))
        return found

    def find(self, *address: str) -> Any:
        part = self.parts[int(address[0])]
        found = part.method.find(*address[1:])
        return self.guided(part, found) if isinstance(found, Task) else found

    def each(self, play: Callable[[int, Part], Parcel]) -> Parcel:
        """What comes of every part, under its number."""
        made: dict[str, Tensors] = {}
        for number, part in enumerate(self.parts):
            made |= {f"{number}:{name}": one for name, one in play(number, part).items()}
        return made

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = _dealt_out(self.parts, fleet)
        if any(hasattr(part.method, "parts") for part in self.parts):
            problem = "a part of a mixed fleet cannot be mixed itself"
        problems = (part.method.fleet_problem(part.fleet(fleet)) for part in self.parts)
        return problem or next(filter(None, problems), None)


def given(client: Client, inbox: Parcel) -> ModelWeights:
    """A model that the server holds."""
    return client.model, inbox["weights"]


def apart(inbox: Parcel) -> tuple[Parcel, Parcel]:
    """What is the part's own, and what comes from the whole fleet."""
    common = {name.removeprefix(COMMON): one for name, one in inbox.items() if name.startswith(COMMON)}
    return {name: one for name, one in inbox.items() if not name.startswith(COMMON)}, common


def state_of(server: Parcel, number: int) -> dict[str, Tensors]:
    prefix = f"{number}:"
    return {name.removeprefix(prefix): one for name, one in server.items() if name.startswith(prefix)}


def _part(settings: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> Part:
    """From a recipe's table: tiers, align, the method's name, and its own settings."""
    own = {name: value for name, value in settings.items() if name not in ("tiers", "method", "align")}
    method = methods[settings["method"]].made(own, methods)
    return Part(tuple(settings["tiers"]), method, settings.get("align", False))


def _dealt_out(parts: Sequence[Part], fleet: Fleet) -> str | None:
    """Why not every tier belongs to one part."""
    if not all(part.tiers for part in parts):
        return "a part has no tiers; name those that it is for"
    named, known = [tier for part in parts for tier in part.tiers], [tier.name for tier in fleet.active_tiers]
    for name in (*known, *named):
        if name not in known:
            return f"a part has the tier {name!r}, which does not take part"
        if named.count(name) != 1:
            return f"the tier {name!r} belongs to {named.count(name)} parts; every tier must belong to one"
    return None


@dataclass(frozen=True)
class Mixed(Agreement, MadeOfParts):
    """`parts`: each with its `tiers`, its `method` with that method's settings, and `align`."""

    paper = "fedloom"
    leaves = "what the methods of its parts say, and how alike it finds examples that all know"
    keeps, gives, admits = "what the methods of its parts say", "personalized", "any models"

    sample = FixedTable(parts=[
        {"tiers": ["large", "medium"], "method": "heterofl"},
        {"tiers": ["small"], "method": "fedhenn", "align": True},
    ])  # fmt: skip

    parts: tuple[Any, ...] = ()

    @property
    def needs_public_data(self) -> bool:
        return self._aligns or any(part.method.needs_public_data for part in self.parts)

    @property
    def _aligns(self) -> bool:
        return self.strength > 0 and any(part.align for part in self.parts)

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        target = self._mean_kernel(server, context) if self._aligns else {}

        def played(number: int, part: Part) -> Parcel:
            engine = PartEngine(context, number, partial(self.guided, part), target if part.align else {})
            return part.method.round(state_of(server, number), part.context(context, engine))

        return self.each(played)

    def _mean_kernel(self, server: Parcel, context: RoundContext) -> Parcel:
        """What those who align are drawn to: the mean over the fleet as it is before the round."""
        shown = self.shown(context)
        told = list(self._told(server, context, shown)) if shown else []
        return self.aimed(shown, [reply for reply, _ in told], [share for _, share in told])

    def _told(self, server: Parcel, context: RoundContext, shown: Parcel) -> Iterator[tuple[Reply, float]]:
        """Every part counts by its devices. Models that the server holds stand for all theirs; where devices have their
        own, the participants are asked and stand for the others."""
        for number, part in enumerate(self.parts):
            own, held = part.context(context, context.engine), part.method.eval_targets(state_of(server, number))
            members, first = own.fleet.members(context.number), next(iter(held.values()))
            if isinstance(first, DeviceModel):
                boxes = {device: {**shown, **first.inbox(device)} for device in own.cohort}
                told = context.ask(self.find("describe", str(number), *first.found_at), boxes)
                yield from ((one, len(members) / len(told)) for one in told)
                continue
            weights = {tier.name: first.weights(tier) for tier in own.fleet.active_tiers}
            some = {device.tier: device for device in reversed(members)}
            boxes = {device: {**shown, "weights": weights[tier]} for tier, device in some.items()}
            for one in context.compute(self.find("describe"), boxes):
                yield one, float(sum(device.tier == one.device.tier for device in members))

    def guided(self, part: Part, task: Task) -> Task:
        """By devices that are drawn to what the whole fleet sees, where they are told."""
        alone = super().guided(part, task)

        def run(client: Client, inbox: Parcel) -> ClientResult:
            own, common = apart(inbox)
            return alone.run(self.drawn(client, common, {}), own)

        return replace(task, run=run)

    def find(self, *address: str) -> Any:
        if address[0] != "describe":
            return super().find(*address)
        carried = self.parts[int(address[1])].method.find(*address[2:]) if address[1:] else given
        return self.telling_task(carried, *address)

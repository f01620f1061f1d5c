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
from ..settings import FrozenDict
from ..tensors import Parcel, Tensors
from ._alignment import RepresentationAlignment
from .method import Method, MethodInfo, fleet_problem

COMMON = "fleet."  # before the names of what comes from the whole fleet


@dataclass(frozen=True)
class MethodPart:
    """`align`: whether its devices are drawn to how the whole fleet sees things."""

    tiers: tuple[str, ...]
    method: Method
    align: bool = False

    def fleet(self, whole: Fleet) -> Fleet:
        return whole.restrict_tiers(self.tiers)

    def context(self, context: RoundContext, engine: Engine) -> RoundContext:
        """The part's own turn, as if there were no other; what it moves is counted with the whole."""
        fleet = self.fleet(context.fleet)
        footprint = {tier.name: tier.footprint for tier in fleet.active_tiers}
        cohort = [replace(one, footprint=footprint[one.tier]) for one in context.cohort if one.tier in footprint]
        return replace(context, cohort=cohort, fleet=fleet, engine=engine, _asked=Counter())


@dataclass(frozen=True)
class CompositeEngine:
    """The engine of the whole fleet's turn as a part sees it. Its tasks are found under the part's number, and
    `adapt_task`: with every inbox comes what is common to the fleet."""

    whole: RoundContext
    number: int
    adapt_task: Callable[[Task], Task]
    common: Parcel  # beside every inbox

    def ask(self, task: Task, inboxes: Mapping[Device, Parcel], round_number: int, repeat: int = 0) -> Iterable[Reply]:
        extra = {COMMON + name: tensors for name, tensors in self.common.items()}
        boxes = {device: inbox if device.is_server else {**inbox, **extra} for device, inbox in inboxes.items()}
        for device in boxes:
            if not device.is_server:
                self.whole.count_download(device, extra)
        task_ref = (str(self.number), *(task.ref or (task.name,)))
        own = replace(self.adapt_task(task), ref=task_ref, batch_key=None if extra else task.batch_key)
        return self.whole.engine.ask(own, boxes, round_number, repeat)

    def commit(self, round_number: int) -> None:
        self.whole.engine.commit(round_number)

    def close(self) -> None:
        self.whole.engine.close()


class CompositeMethod(Method, Protocol):
    """All that the parts do each for itself. Server state has every part's bundles, under its number."""

    @property
    def parts(self) -> tuple[MethodPart, ...]: ...

    def adapt_task(self, part: MethodPart, task: Task) -> Task:
        """A part's task, by devices that know of no other part's models."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            sizes = {tier: model for tier, model in client.tier_models.items() if tier in part.tiers}
            return task.run(replace(client, tier_models=sizes), inbox)

        return replace(task, run=run)

    @property
    def ships(self) -> str:
        return next((part.method.shares_features for part in self.parts if part.method.shares_features), "")

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> Method:
        parts = tuple(_part(one, methods) for one in settings.get("parts", ()))
        return cls(**{**settings, "parts": parts})

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return self.combine_states(lambda number, part: part.method.start(part.fleet(fleet), seed, warm_start))

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        (part,) = [part for part in self.parts if device.tier in part.tiers]
        return part.method.init_client(device, seed, warm_start)

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        def ended(number: int, part: MethodPart) -> Parcel:
            engine = CompositeEngine(context, number, partial(self.adapt_task, part), {})
            last = part.method.finish(part_state(server, number), part.context(context, engine))
            return part_state(server, number) if last is None else last

        asked = context.traffic.asked
        made = self.combine_states(ended)
        return made if context.traffic.asked > asked else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        found: dict[str, EvalTarget] = {}
        for number, part in enumerate(self.parts):
            for name, one in part.method.eval_targets(part_state(server, number)).items():
                free = name if name not in found else f"{name}-{number + 1}"
                found[free] = replace(one, tiers=part.tiers)
                if isinstance(one, DeviceModel):
                    found[free] = replace(one, tiers=part.tiers, ref=(str(number), *one.load_ref))
        return found

    def find(self, *address: str) -> Any:
        part = self.parts[int(address[0])]
        found = part.method.find(*address[1:])
        return self.adapt_task(part, found) if isinstance(found, Task) else found

    def combine_states(self, play: Callable[[int, MethodPart], Parcel]) -> Parcel:
        """What comes of every part, under its number."""
        made: dict[str, Tensors] = {}
        for number, part in enumerate(self.parts):
            made |= {f"{number}:{name}": one for name, one in play(number, part).items()}
        return made

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = _tiers_problem(self.parts, fleet)
        if any(hasattr(part.method, "parts") for part in self.parts):
            problem = "a part of a mixed fleet cannot be mixed itself"
        problems = (fleet_problem(part.method, part.fleet(fleet)) for part in self.parts)
        return problem or next(filter(None, problems), None)


def server_weights(client: Client, inbox: Parcel) -> ModelWeights:
    """A model that the server holds."""
    return client.model, inbox["weights"]


def split_inbox(inbox: Parcel) -> tuple[Parcel, Parcel]:
    """What is the part's own, and what comes from the whole fleet."""
    common = {name.removeprefix(COMMON): one for name, one in inbox.items() if name.startswith(COMMON)}
    return {name: one for name, one in inbox.items() if not name.startswith(COMMON)}, common


def part_state(server: Parcel, number: int) -> dict[str, Tensors]:
    prefix = f"{number}:"
    return {name.removeprefix(prefix): one for name, one in server.items() if name.startswith(prefix)}


def _part(settings: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> MethodPart:
    """From a recipe's table: tiers, align, the method's name, and its own settings."""
    own = {name: value for name, value in settings.items() if name not in ("tiers", "method", "align")}
    method = methods[settings["method"]].from_settings(own, methods)
    return MethodPart(tuple(settings["tiers"]), method, settings.get("align", False))


def _tiers_problem(parts: Sequence[MethodPart], fleet: Fleet) -> str | None:
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
class Mixed(RepresentationAlignment, CompositeMethod):
    """`parts`: each with its `tiers`, its `method` with that method's settings, and `align`."""

    info = MethodInfo(
        paper="fedloom",
        uploads="what the methods of its parts say, and how alike it finds examples that all know",
        client_state="what the methods of its parts say",
        produces="personalized",
        heterogeneity="any",
        example_settings=FrozenDict(
            parts=[
                {"tiers": ["large", "medium"], "method": "heterofl"},
                {"tiers": ["small"], "method": "fedhenn", "align": True},
            ]
        ),
    )

    parts: tuple[Any, ...] = ()

    @property
    def needs_public_data(self) -> bool:
        return self._aligns or any(part.method.needs_public_data for part in self.parts)

    @property
    def _aligns(self) -> bool:
        return self.strength > 0 and any(part.align for part in self.parts)

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        target = self._mean_kernel(server, context) if self._aligns else {}

        def played(number: int, part: MethodPart) -> Parcel:
            engine = CompositeEngine(context, number, partial(self.adapt_task, part), target if part.align else {})
            return part.method.round(part_state(server, number), part.context(context, engine))

        return self.combine_states(played)

    def _mean_kernel(self, server: Parcel, context: RoundContext) -> Parcel:
        """What those who align are drawn to: the mean over the fleet as it is before the round."""
        shown = self.public_inbox(context)
        told = list(self._kernels(server, context, shown)) if shown else []
        return self.with_target(shown, [reply for reply, _ in told], [share for _, share in told])

    def _kernels(self, server: Parcel, context: RoundContext, shown: Parcel) -> Iterator[tuple[Reply, float]]:
        """Every part counts by its devices. Models that the server holds stand for all theirs; where devices have their
        own, the participants are asked and stand for the others."""
        for number, part in enumerate(self.parts):
            own, held = part.context(context, context.engine), part.method.eval_targets(part_state(server, number))
            members, first = own.fleet.eligible_devices(context.number), next(iter(held.values()))
            if isinstance(first, DeviceModel):
                boxes = {device: {**shown, **first.inbox(device)} for device in own.cohort}
                told = context.ask(self.find("describe", str(number), *first.load_ref), boxes)
                yield from ((one, len(members) / len(told)) for one in told)
                continue
            weights = {tier.name: first.weights(tier) for tier in own.fleet.active_tiers}
            some = {device.tier: device for device in reversed(members)}
            boxes = {device: {**shown, "weights": weights[tier]} for tier, device in some.items()}
            for one in context.compute(self.find("describe"), boxes):
                yield one, float(sum(device.tier == one.device.tier for device in members))

    def adapt_task(self, part: MethodPart, task: Task) -> Task:
        """By devices that are drawn to what the whole fleet sees, where they are told."""
        alone = super().adapt_task(part, task)

        def run(client: Client, inbox: Parcel) -> ClientResult:
            own, common = split_inbox(inbox)
            return alone.run(self.with_alignment(client, common, {}), own)

        return replace(task, run=run)

    def find(self, *address: str) -> Any:
        if address[0] != "describe":
            return super().find(*address)
        carried = self.parts[int(address[1])].method.find(*address[2:]) if address[1:] else server_weights
        return self.kernel_task(carried, *address)

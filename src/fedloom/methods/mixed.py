"""Mixed fleets: several methods in one round, each for its own tiers, aligned with each other as in FedHeNN.

Each part trains as if it were alone. All parts contribute to the mean kernel of public examples, and devices of parts
with `align` are pulled towards it: so models that share no weights still learn from each other.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ..client import Client, ClientResult, Task
from ..data import LearningTask
from ..fleet import Device, DeviceModel, Engine, EvalTarget, Fleet, ModelWeights, Reply, Request, RoundContext
from ..footprints import find_sliced_stack
from ..registry import find_name
from ..settings import FrozenDict
from ..tensors import Parcel, Tensors
from ._alignment import RepresentationAlignment
from .method import Method, MethodInfo, fleet_problem

COMMON = "fleet."  # prefix of the bundles that come from the composite, not from a part's method


@dataclass(frozen=True)
class MethodPart:
    """A method and the tiers that it trains in a mixed fleet.

    Parameters
    ----------
    tiers : the names of its tiers.
    method : the method.
    align : whether its devices are pulled towards the fleet's mean kernel.
    """

    tiers: tuple[str, ...]
    method: Method
    align: bool = False

    def fleet(self, fleet: Fleet) -> Fleet:
        return fleet.restrict_tiers(self.tiers)

    def context(self, context: RoundContext, engine: Engine) -> RoundContext:
        """The round as the part sees it; its traffic is counted with the whole fleet's."""
        fleet = self.fleet(context.fleet)
        footprint = {tier.name: tier.footprint for tier in fleet.active_tiers}
        members = [device for device in context.cohort if device.tier in footprint]
        cohort = [replace(device, footprint=footprint[device.tier]) for device in members]
        return replace(context, cohort=cohort, fleet=fleet, engine=engine, _asked=Counter())


@dataclass(frozen=True)
class Mixed(RepresentationAlignment, Method):
    """Mixed fleets: several methods in one round, each for its own tiers, aligned with each other as in FedHeNN.

    The server state holds the bundles of every part, prefixed with its number.

    Parameters
    ----------
    parts : tables with `tiers`, `method`, that method's settings, and `align`: whether the part's devices are pulled
        towards the fleet's mean kernel.
    """

    info = MethodInfo(
        paper="fedloom",
        uploads="what the methods of its parts upload, and the kernel of public examples",
        client_state="what the methods of its parts keep",
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

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> Method:
        parts = tuple(_build_part(table, methods) for table in settings.get("parts", ()))
        return cls(**{**settings, "parts": parts})

    def to_settings(self, methods: Mapping[str, type[Method]]) -> dict[str, Any]:
        settings = super().to_settings(methods)
        parts = [
            {
                "tiers": list(part.tiers), "method": find_name(methods, type(part.method)),
                **({"align": True} if part.align else {}), **part.method.to_settings(methods),
            }
            for part in self.parts
        ]  # fmt: skip
        return {**settings, "parts": parts}

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return self._for_each_part(lambda number, part: part.method.start(part.fleet(fleet), seed, warm_start))

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        target = self._mean_kernel(server, context) if self._aligns else {}

        def play(number: int, part: MethodPart) -> Parcel:
            engine = CompositeEngine(context, number, partial(self.adapt_task, part), target if part.align else {})
            return part.method.round(part_state(server, number), part.context(context, engine))

        return self._for_each_part(play)

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        (part,) = [part for part in self.parts if device.tier in part.tiers]
        state: Parcel = part.method.init_client(device, seed, warm_start)
        return state

    def finish(self, server: Parcel, context: RoundContext) -> Parcel | None:
        def play(number: int, part: MethodPart) -> Parcel:
            engine = CompositeEngine(context, number, partial(self.adapt_task, part), {})
            state = part_state(server, number)
            finished = part.method.finish(state, part.context(context, engine))
            return state if finished is None else finished

        asked = context.traffic.asked
        finished = self._for_each_part(play)
        return finished if context.traffic.asked > asked else None

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        targets: dict[str, EvalTarget] = {}
        for number, part in enumerate(self.parts):
            for name, target in part.method.eval_targets(part_state(server, number)).items():
                unique = name if name not in targets else f"{name}-{number + 1}"
                targets[unique] = replace(target, tiers=part.tiers)
                if isinstance(target, DeviceModel):
                    targets[unique] = replace(target, tiers=part.tiers, ref=(str(number), *target.load_ref))
        return targets

    def adapt_task(self, part: MethodPart, task: Task) -> Task:
        """A part's task, for clients that see only the part's models and are aligned if the inbox has a target."""

        def run(client: Client, inbox: Parcel) -> ClientResult:
            own, common = split_inbox(inbox)
            tier_models = {tier: model for tier, model in client.tier_models.items() if tier in part.tiers}
            return task.run(replace(self.with_alignment(client, common, {}), tier_models=tier_models), own)

        return replace(task, run=run)

    def find(self, *ref: str) -> Any:
        """A part's tasks are found under its number; "describe" computes the kernel of a part's model."""
        if ref[0] == "describe":
            load = self.parts[int(ref[1])].method.find(*ref[2:]) if ref[1:] else load_server_weights
            return self.kernel_task(load, *ref)
        part = self.parts[int(ref[0])]
        found = part.method.find(*ref[1:])
        return self.adapt_task(part, found) if isinstance(found, Task) else found

    def _mean_kernel(self, server: Parcel, context: RoundContext) -> Parcel:
        """The target for parts that align: the mean kernel of the fleet before the round."""
        public = self.public_inbox(context)
        kernels = list(self._kernels(server, context, public)) if public else []
        return self.with_target(public, [reply for reply, _ in kernels], [share for _, share in kernels])

    def _kernels(self, server: Parcel, context: RoundContext, public: Parcel) -> Iterator[tuple[Reply, float]]:
        """Kernels and their weights, by which every part counts in proportion to its devices.

        A model that the server holds counts once for each device of its tier. Where devices have their own models, the
        participants are asked and stand for the others.
        """
        for number, part in enumerate(self.parts):
            own = part.context(context, context.engine)
            target = next(iter(part.method.eval_targets(part_state(server, number)).values()))
            members = own.fleet.eligible_devices(context.number)
            if isinstance(target, DeviceModel):
                inboxes = {device: {**public, **target.inbox(device)} for device in own.cohort}
                replies = context.ask(self.find("describe", str(number), *target.load_ref), inboxes)
                yield from ((reply, len(members) / len(replies)) for reply in replies)
                continue
            weights = {tier.name: target.weights(tier) for tier in own.fleet.active_tiers}
            first = {device.tier: device for device in reversed(members)}
            inboxes = {device: {**public, "weights": weights[tier]} for tier, device in first.items()}
            for reply in context.compute(self.find("describe"), inboxes):
                yield reply, float(sum(device.tier == reply.device.tier for device in members))

    def _for_each_part(self, play: Callable[[int, MethodPart], Parcel]) -> Parcel:
        """The states that `play` returns for the parts, in one parcel."""
        states: dict[str, Tensors] = {}
        for number, part in enumerate(self.parts):
            states |= {f"{number}:{name}": tensors for name, tensors in play(number, part).items()}
        return states

    def check_fleet(self, fleet: Fleet) -> str | None:
        if any(isinstance(part.method, Mixed) for part in self.parts):
            return "a part of a mixed fleet cannot be mixed itself"
        problems = (
            fleet_problem(part.method, part.fleet(fleet)) or _stacked_problem(part, fleet) for part in self.parts
        )
        return _tiers_problem(self.parts, fleet) or self.counts_problem(fleet) or next(filter(None, problems), None)

    def check_task(self, task: LearningTask, given: Collection[str] = ()) -> str | None:
        return next(filter(None, (part.method.check_task(task) for part in self.parts)), None)

    @property
    def _aligns(self) -> bool:
        return self.strength > 0 and any(part.align for part in self.parts)

    @property
    def needs_public_data(self) -> bool:
        return self._aligns or any(part.method.needs_public_data for part in self.parts)

    @property
    def produces(self) -> Literal["global", "personalized"]:
        personal = any(part.method.produces == "personalized" for part in self.parts)
        return "personalized" if personal else "global"

    @property
    def shares_features(self) -> str:
        return next((part.method.shares_features for part in self.parts if part.method.shares_features), "")

    @property
    def server_step(self) -> str:
        return next((part.method.server_step for part in self.parts if part.method.server_step), "")


@dataclass(frozen=True)
class CompositeEngine:
    """The fleet's engine as one part sees it: tasks are adapted and named by the part's number, and the `common`
    bundles are added to every device's inbox."""

    outer: RoundContext
    number: int
    adapt_task: Callable[[Task], Task]
    common: Parcel

    def ask(self, request: Request) -> Iterable[Reply]:
        task, extra = request.task, {COMMON + name: tensors for name, tensors in self.common.items()}
        extended = {d: inbox if d.is_server else {**inbox, **extra} for d, inbox in request.inboxes.items()}
        for device in extended:
            if not device.is_server:
                self.outer.count_download(device, extra)
        ref = (str(self.number), *(task.ref or (task.name,)))
        adapted = replace(self.adapt_task(task), ref=ref, batch_key=None if extra else task.batch_key)
        return self.outer.engine.ask(replace(request, task=adapted, inboxes=extended))

    def commit(self, round_number: int) -> None:
        self.outer.engine.commit(round_number)

    def close(self) -> None:
        self.outer.engine.close()


def load_server_weights(client: Client, inbox: Parcel) -> ModelWeights:
    return client.model, inbox["weights"]


def split_inbox(inbox: Parcel) -> tuple[Parcel, Parcel]:
    """The bundles of the part's method, and those of the composite."""
    common = {name.removeprefix(COMMON): tensors for name, tensors in inbox.items() if name.startswith(COMMON)}
    return {name: tensors for name, tensors in inbox.items() if not name.startswith(COMMON)}, common


def part_state(server: Parcel, number: int) -> dict[str, Tensors]:
    prefix = f"{number}:"
    return {name.removeprefix(prefix): tensors for name, tensors in server.items() if name.startswith(prefix)}


def _build_part(table: Mapping[str, Any], methods: Mapping[str, type[Method]]) -> MethodPart:
    """From a recipe's table: tiers, align, the method's name, and its settings."""
    settings = {name: value for name, value in table.items() if name not in ("tiers", "method", "align")}
    method = methods[table["method"]].from_settings(settings, methods)
    return MethodPart(tuple(table["tiers"]), method, table.get("align", False))


def _stacked_problem(part: MethodPart, fleet: Fleet) -> str | None:
    """The fleet's footprints are those in its largest model, and stacked axes need those in the part's largest."""
    own = part.fleet(fleet)
    if part.method.info.heterogeneity != "nested" or own.global_model.shapes() == fleet.global_model.shapes():
        return None
    large = own.global_model.shapes()
    found = ((tier.name, find_sliced_stack(tier.model.shapes(), large)) for tier in own.active_tiers)
    return next(
        (
            f"the tier {tier!r} has a part of {name}, which stacks several things on an axis; put the largest tier of "
            "the fleet into its part, or give all tiers of the part the same size of this layer"
            for tier, name in found
            if name
        ),
        None,
    )


def _tiers_problem(parts: Sequence[MethodPart], fleet: Fleet) -> str | None:
    """Why the tiers do not each belong to exactly one part."""
    if not all(part.tiers for part in parts):
        return "a part has no tiers; name those that it is for"
    named, known = [tier for part in parts for tier in part.tiers], [tier.name for tier in fleet.active_tiers]
    for name in (*known, *named):
        if name not in known:
            return f"a part has the tier {name!r}, which does not take part"
        if name not in named:
            return f"no part of method.parts is for the tier {name!r}; every tier must belong to one"
        if named.count(name) != 1:
            return f"the tier {name!r} belongs to {named.count(name)} parts; every tier must belong to one"
    return None

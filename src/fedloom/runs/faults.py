"""What a recipe lets go wrong, round by round: who is asked, who is heard, and whether a round counts."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from ..engines import Codec, Coded, InProcess, Refusal
from ..engines.faults import Damage, DeadlineEngine, FaultInjector, FaultPlan, Remote, Responses, Seconds
from ..evaluation import Row
from ..fleet import Device, Fleet, RoundContext, draw_cohort
from ..fleet.sampling import ALWAYS, BadTrace, AvailabilityTrace, cohort_size, read_trace
from ..fleet.tiers import TierRegion, region_name, tier_regions
from ..footprints.regions import hold_low_coverage
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import FaultsConfig, Recipe
from ..seeds import CORRUPT, CORRUPTION, DROPOUT, generator
from ..tensors import Parcel
from .clock import Clock
from .state import RunState

OLD = 20  # rounds in which nobody was heard on a ring, after which it is said
KINDS: tuple[Damage, ...] = get_args(Damage)


class NoQuorum(Exception):  # noqa: N818 - named for what is wrong
    """Too many rounds in a row in which too few devices were heard."""

    def __init__(self, failed: int, least: float):
        wanted = f"{100 * least:g} % of the devices that were needed" if least else "anybody"
        super().__init__(f"{failed} rounds in a row failed: in none of them {wanted} were heard")
        self.hint = "events.jsonl in the run's folder says of every device why not; or change [faults]"


@dataclass(frozen=True)
class Faults:
    recipe: Recipe
    fleet: Fleet
    engine: InProcess | Remote
    clock: Clock
    trace: AvailabilityTrace
    tell: Callable[[int, Refusal], None]

    @property
    def none(self) -> bool:
        """Whether nothing can go wrong; then a turn is left as it is. Patience and slowness alone change no round."""
        part = self.recipe.faults
        return part == FaultsConfig(max_failed_rounds=part.max_failed_rounds, stragglers=part.stragglers)

    def cohort(self, number: int) -> list[Device]:
        part = self.recipe.fleet
        extra = self.recipe.faults.over_selection
        return draw_cohort(self.fleet, part.participation, number, self.trace, extra, part.sampling)

    def members(self, number: int) -> list[Device]:
        """All that may take part and are there."""
        there = [index for index in self.fleet.eligible_indices(number) if self.trace.is_available(index, number)]
        return [self.fleet.device(index, number) for index in there]

    def around(self, context: RoundContext) -> RoundContext:
        """The same turn with devices as they are."""
        if isinstance(self.engine, InProcess) and self.none:
            return context
        least = self.recipe.faults.min_coverage
        aggregate = hold_low_coverage(context.aggregate, least) if least > 1 else context.aggregate
        return replace(context, engine=self._around(context), aggregate=aggregate)

    def _around(self, context: RoundContext) -> FaultInjector | DeadlineEngine:
        fates = self._fates(context)
        if not isinstance(self.engine, InProcess):
            codec = context.coding if isinstance(context.coding, Codec) else None
            return DeadlineEngine(self.engine, fates.deadline, fates.needed, codec)
        inner = context.engine if isinstance(context.engine, Coded) else self.engine
        return FaultInjector(inner, fates, self._seconds, lambda lost: self.tell(context.number, lost))

    def settled(self, standing: RunState, context: RoundContext, before: Parcel, after: Parcel) -> Parcel:
        """The server's state after a round: that from before it if too few were heard, and then nobody remembers."""
        hearing = hearing_of(context)
        if hearing is None:
            return after
        failed = self._failed(context, hearing)
        standing.failed_in_a_row = standing.failed_in_a_row + 1 if failed else 0
        self._grow_older(standing, context, hearing, failed)
        if not failed:
            return after
        heard, asked = len(hearing.answered()), len(hearing.asked)
        self.tell(context.number, Refusal("", "QUORUM", f"{heard} of {asked} heard: the round does not count"))
        self.engine.memory.abandon()
        return before

    def rows(self, standing: RunState, context: RoundContext) -> list[Row]:
        """Of a round in which anything was missing."""
        hearing = hearing_of(context)
        if hearing is None:
            return []
        heard, asked = len(hearing.answered()), len(hearing.asked)
        if heard >= self._wanted(context, hearing) and not any(standing.ages.values()):
            return []
        figures = {"degraded": 1.0, "asked": float(asked), "replied": float(heard)}
        ages = [Row(context.number, "", name, "", "", "region_age", float(age)) for name, age in standing.ages.items()]
        return [Row(context.number, "", "", "", "", name, one) for name, one in figures.items()] + ages

    def give_up(self, standing: RunState) -> None:
        part = self.recipe.faults
        if standing.failed_in_a_row >= part.max_failed_rounds:
            raise NoQuorum(standing.failed_in_a_row, part.quorum)

    def _fates(self, context: RoundContext) -> FaultPlan:
        part, names = self.recipe.faults, [device.name for device in context.cohort]
        draw = generator(self.fleet.seed, DROPOUT, context.number)
        silent = math.floor(part.dropout * len(names) + draw.random())  # on average just that share
        dead = {one.tier for one in part.outages if one.first <= context.number <= one.to}
        return FaultPlan(
            dead={one.name: f"tier {one.tier} is out of reach" for one in context.cohort if one.tier in dead},
            silent=frozenset(names[index] for index in draw.permutation(len(names))[:silent]),
            broken={name: self._damage(name, context.number) for name in names if name in self._broken},
            deadline=part.deadline or math.inf,
            needed=min(1.0, self._needed(context) / len(names)) if names else 1.0,
        )

    @property
    def _seconds(self) -> Seconds | None:
        """None unless it is known how fast all devices are."""
        return self.clock.seconds if self.clock.knows(tier.name for tier in self.fleet.active_tiers) else None

    @cached_property
    def _broken(self) -> frozenset[str]:
        """The same devices throughout a run."""
        said = self.recipe.faults.corrupt
        if said is None:
            return frozenset()
        count = said.devices if isinstance(said.devices, int) else round(said.devices * self.fleet.size)
        order = generator(self.fleet.seed, CORRUPT).permutation(self.fleet.size)
        return frozenset(self.fleet.name(int(index)) for index in order[:count])

    def _damage(self, device: str, number: int) -> Damage:
        said = self.recipe.faults.corrupt
        if said is not None and said.how != "any":
            return said.how
        return KINDS[int(generator(self.fleet.seed, CORRUPTION, number, device).integers(len(KINDS)))]

    def _needed(self, context: RoundContext) -> int:
        """How many of the cohort's devices a round wants to hear: all but those that were asked to be on the safe side.
        After the last round everybody is asked, and whom chance draws one by one nobody counted on."""
        part = self.recipe.fleet
        if part.sampling != "fixed_size":
            return math.floor(len(context.cohort) / (1 + self.recipe.faults.over_selection) + 1e-9)
        everybody = context.number > self.recipe.rounds
        return cohort_size(self.fleet, 1.0 if everybody else part.participation, context.number)

    def _wanted(self, context: RoundContext, hearing: Responses) -> float:
        """The same for those who were asked: a method need not ask the whole cohort."""
        needed = self._needed(context)
        return needed * len(hearing.asked) / len(context.cohort) - 1e-9 if context.cohort else needed

    def _failed(self, context: RoundContext, hearing: Responses) -> bool:
        """Whether too few were heard; nobody at all is always too few, unless nobody was wanted."""
        wanted = self._wanted(context, hearing)
        return wanted > 0 and len(hearing.answered()) < max(1.0, self.recipe.faults.quorum * wanted)

    def _grow_older(self, standing: RunState, context: RoundContext, hearing: Responses, failed: bool) -> None:
        heard = Counter(device.tier for device in hearing.answered())
        asked = {device.tier for device in hearing.asked.values()}
        last_exchange = context.number > self.recipe.rounds  # which may be with some tiers alone
        for region in self._regions:
            if last_exchange and asked.isdisjoint(region):
                continue
            votes, name = sum(heard[tier] for tier in region), region_name(region)
            changed = not failed and votes >= self.recipe.faults.min_coverage
            standing.ages[name] = 0 if changed else standing.ages.get(name, 0) + 1
            if standing.ages[name] == OLD:
                said = f"what {' and '.join(region)} hold has not changed for {OLD} rounds: too few of them were heard"
                self.tell(context.number, Refusal("", "REGION_AGE", said))

    @cached_property
    def _regions(self) -> list[TierRegion]:
        return tier_regions(self.fleet)


def hearing_of(context: RoundContext) -> Responses | None:
    """Who was heard in a turn; None where everybody always is."""
    return context.engine.hearing if isinstance(context.engine, FaultInjector | DeadlineEngine) else None


def build_faults(
    loaded: LoadedRecipe, fleet: Fleet, engine: InProcess, clock: Clock, tell: Callable[[int, Refusal], None]
) -> Faults:
    part, trace = loaded.recipe.faults, ALWAYS
    if part.trace is not None:
        try:
            trace = read_trace(Path(part.trace), fleet.size)
        except BadTrace as error:
            raise loaded.error(RecipeIssue(("faults", "trace"), "TRACE", str(error))) from error
    for key in ("deadline", "over_selection"):
        known = loaded.recipe.engine.kind != "in_process" or clock.knows(tier.name for tier in fleet.active_tiers)
        if getattr(part, key) and not known:
            said = f"{key} needs to know how fast the devices are"
            hint = "give every tier its speed and bandwidth"
            raise loaded.error(RecipeIssue(("faults", key), "RECIPE_VALUE", said, hint))
    return Faults(loaded.recipe, fleet, engine, clock, trace, tell)

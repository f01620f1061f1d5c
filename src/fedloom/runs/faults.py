"""Faults of a recipe: which devices are asked in a round, which of them fail, and whether the round counts."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from ..engines import ClientStates, Refusal
from ..engines.faults import Corruption, FaultInjector, FaultPlan
from ..engines.gate import Report
from ..evaluation import Row
from ..fleet import Device, Fleet, Responses, RoundContext, draw_cohort
from ..fleet.sampling import ALWAYS, AvailabilityTrace, InvalidTrace, cohort_size, read_trace
from ..fleet.tiers import TierRegion, region_name, tier_regions
from ..footprints.regions import LowCoverageHold
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import FaultsConfig, Recipe
from ..seeds import CORRUPT, CORRUPTION, DROPOUT, generator
from ..tensors import Parcel
from ..wording import pluralize
from .clock import Clock
from .state import RunState

OLD = 20  # rounds without an update of a coverage region, after which it is reported
KINDS: tuple[Corruption, ...] = get_args(Corruption)


class NoQuorum(Exception):  # noqa: N818 - named for what is wrong
    """Too many rounds in a row in which too few devices replied."""

    def __init__(self, failed: int, least: float):
        needed = f"{100 * least:g} % of the needed devices" if least else "any device"
        super().__init__(f"{pluralize(failed, 'round')} in a row failed: in none of them did {needed} reply")
        self.hint = "events.jsonl in the run's folder has a reason for every device; or change [faults]"


@dataclass(frozen=True)
class Faults:
    """Which devices take part in a round, what goes wrong, and whether the round counts."""

    recipe: Recipe
    fleet: Fleet
    clock: Clock
    trace: AvailabilityTrace
    count_examples: Callable[[Device], int]
    report: Report
    simulated: bool = True  # else devices are real, and only deadline and quorum apply

    @property
    def applies(self) -> bool:
        """Whether anything can go wrong. A limit of failed rounds and slow devices alone change no round."""
        config = self.recipe.faults
        harmless = FaultsConfig(max_failed_rounds=config.max_failed_rounds, stragglers=config.stragglers)
        return not self.simulated or config != harmless

    def cohort(self, number: int) -> list[Device]:
        config, extra = self.recipe.fleet, self.recipe.faults.over_selection
        return draw_cohort(self.fleet, config.participation, number, self.trace, extra, config.sampling)

    def members(self, number: int) -> list[Device]:
        """All devices that may take part and are available."""
        available = [index for index in self.fleet.eligible_indices(number) if self.trace.is_available(index, number)]
        return [self.fleet.device(index, number) for index in available]

    def apply(self, context: RoundContext) -> RoundContext:
        """The context with deadline, needed replies and minimum coverage of this recipe."""
        if not self.applies:
            return context
        config, cohort = self.recipe.faults, len(context.cohort)
        least = config.min_coverage
        return replace(
            context,
            aggregate=LowCoverageHold(context.aggregate, least) if least > 1 else context.aggregate,
            deadline=config.deadline or math.inf,
            needed=min(1.0, self._needed(context) / cohort) if cohort else 1.0,
        )

    def injector(self, context: RoundContext) -> FaultInjector | None:
        """The simulated faults of a round, as a transport."""
        if not (self.simulated and self.applies):
            return None
        seconds = self.clock.seconds if self.clock.knows(tier.name for tier in self.fleet.active_tiers) else None
        return FaultInjector(
            self._plan(context),
            seconds,
            self.count_examples,
            context.wire,
            context.responses,
            lambda refusal: self.report(context.number, refusal),
        )

    def round_seconds(self, context: RoundContext) -> float | None:
        """Seconds of the round on the fleet's own devices: until the last reply that was waited for."""
        if not any(tier.speed for tier in self.recipe.tiers):
            return None
        return self.clock.round_seconds(context, context.responses.waited if self.simulated and self.applies else None)

    def settle(
        self, state: RunState, states: ClientStates, context: RoundContext, before: Parcel, after: Parcel
    ) -> Parcel:
        """The server state after a round: that from before if too few replied, and then no device keeps anything."""
        if not self.applies:
            return after
        responses = context.responses
        failed = self._failed(context, responses)
        state.failed_in_a_row = state.failed_in_a_row + 1 if failed else 0
        self._update_ages(state, context, responses, failed)
        if not failed:
            return after
        replied, asked = len(responses.answered()), len(responses.asked)
        self.report(context.number, Refusal("", "QUORUM", f"{replied} of {asked} replied: the round does not count"))
        states.rollback()
        return before

    def rows(self, state: RunState, context: RoundContext) -> list[Row]:
        """Figures of a round in which replies were missing."""
        if not self.applies:
            return []
        responses = context.responses
        replied, asked = len(responses.answered()), len(responses.asked)
        if replied >= self._wanted(context, responses) and not any(state.region_ages.values()):
            return []
        figures = {"degraded": 1.0, "asked": float(asked), "replied": float(replied)}
        ages = [Row(context.number, "", n, "", "", "region_age", float(age)) for n, age in state.region_ages.items()]
        return [Row(context.number, "", "", "", "", name, value) for name, value in figures.items()] + ages

    def check_failures(self, state: RunState) -> None:
        """Raise if too many rounds have failed in a row."""
        config = self.recipe.faults
        if state.failed_in_a_row >= config.max_failed_rounds:
            raise NoQuorum(state.failed_in_a_row, config.quorum)

    def _plan(self, context: RoundContext) -> FaultPlan:
        config, names = self.recipe.faults, [device.name for device in context.cohort]
        draw = generator(self.fleet.seed, DROPOUT, context.number)
        silent = math.floor(config.dropout * len(names) + draw.random())  # on average exactly that share
        outages = {outage.tier for outage in config.outages if outage.first <= context.number <= outage.to}
        return FaultPlan(
            outages={one.name: f"tier {one.tier} is out of reach" for one in context.cohort if one.tier in outages},
            silent=frozenset(names[index] for index in draw.permutation(len(names))[:silent]),
            corrupt={name: self._corruption(name, context.number) for name in names if name in self._corrupt_devices},
        )

    @cached_property
    def _corrupt_devices(self) -> frozenset[str]:
        """The same devices throughout a run."""
        config = self.recipe.faults.corrupt
        if config is None:
            return frozenset()
        count = config.devices if isinstance(config.devices, int) else round(config.devices * self.fleet.size)
        order = generator(self.fleet.seed, CORRUPT).permutation(self.fleet.size)
        return frozenset(self.fleet.name(int(index)) for index in order[:count])

    def _corruption(self, device: str, number: int) -> Corruption:
        config = self.recipe.faults.corrupt
        if config is not None and config.how != "any":
            return config.how
        return KINDS[int(generator(self.fleet.seed, CORRUPTION, number, device).integers(len(KINDS)))]

    def _needed(self, context: RoundContext) -> int:
        """How many replies of the cohort a round needs: all but the over-selected ones. After the last round all
        devices are asked; with Poisson sampling the size of the cohort is not known beforehand."""
        config = self.recipe.fleet
        if config.sampling != "fixed_size":
            return math.floor(len(context.cohort) / (1 + self.recipe.faults.over_selection) + 1e-9)
        last_exchange = context.number > self.recipe.rounds
        return cohort_size(self.fleet, 1.0 if last_exchange else config.participation, context.number)

    def _wanted(self, context: RoundContext, responses: Responses) -> float:
        """The same in proportion to the devices that were asked: a method need not ask the whole cohort."""
        needed = self._needed(context)
        return needed * len(responses.asked) / len(context.cohort) - 1e-9 if context.cohort else needed

    def _failed(self, context: RoundContext, responses: Responses) -> bool:
        """Whether too few replied. No reply at all is always too few, unless none was needed."""
        wanted = self._wanted(context, responses)
        return wanted > 0 and len(responses.answered()) < max(1.0, self.recipe.faults.quorum * wanted)

    def _update_ages(self, state: RunState, context: RoundContext, responses: Responses, failed: bool) -> None:
        replied = Counter(device.tier for device in responses.answered())
        asked = {device.tier for device in responses.asked.values()}
        last_exchange = context.number > self.recipe.rounds  # which may be with some tiers alone
        for region in self._regions:
            if last_exchange and asked.isdisjoint(region):
                continue
            contributors, name = sum(replied[tier] for tier in region), region_name(region)
            changed = not failed and contributors >= self.recipe.faults.min_coverage
            state.region_ages[name] = 0 if changed else state.region_ages.get(name, 0) + 1
            if state.region_ages[name] == OLD:
                reason = f"weights held by {' and '.join(region)} have not changed for {OLD} rounds: too few replies"
                self.report(context.number, Refusal("", "REGION_AGE", reason))

    @cached_property
    def _regions(self) -> list[TierRegion]:
        return tier_regions(self.fleet)


def build_faults(
    loaded: LoadedRecipe, fleet: Fleet, clock: Clock, count_examples: Callable[[Device], int], report: Report
) -> Faults:
    config, trace = loaded.recipe.faults, ALWAYS
    if config.trace is not None:
        try:
            trace = read_trace(Path(config.trace), fleet.size)
        except InvalidTrace as error:
            raise loaded.error(RecipeIssue(("faults", "trace"), "TRACE", str(error))) from error
    for key in ("deadline", "over_selection"):
        known = loaded.recipe.engine.kind != "in_process" or clock.knows(tier.name for tier in fleet.active_tiers)
        if getattr(config, key) and not known:
            message = f"{key} needs to know how fast the devices are"
            hint = 'give every tier its speed and bandwidth; for real devices set engine.kind = "flower"'
            raise loaded.error(RecipeIssue(("faults", key), "RECIPE_VALUE", message, hint))
    return Faults(loaded.recipe, fleet, clock, trace, count_examples, report)

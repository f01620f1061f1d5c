"""What a recipe lets go wrong, round by round: who is asked, who is heard, and whether a round counts."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import get_args

from ..engines import Codec, Coded, InProcess, Refusal
from ..engines.faults import Damage, Fates, Faulty, Hearing, Patient, Remote, Seconds
from ..evaluation import Row
from ..fleet import Device, Fleet, Turn, draw_cohort
from ..fleet.sampling import ALWAYS, BadTrace, Trace, cohort_size, read_trace
from ..fleet.tiers import Ring, ring_name, tier_rings
from ..footprints.regions import thin_rings_stay
from ..recipe.errors import Problem
from ..recipe.load import Loaded
from ..recipe.schema import FaultsPart, Recipe
from ..seeds import CORRUPT, CORRUPTION, DROPOUT, generator
from ..tensors import Parcel
from .clock import Clock
from .state import Standing

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
    trace: Trace
    tell: Callable[[int, Refusal], None]

    @property
    def none(self) -> bool:
        """Whether nothing can go wrong; then a turn is left as it is. Patience and slowness alone change no round."""
        part = self.recipe.faults
        return part == FaultsPart(give_up_after=part.give_up_after, stragglers=part.stragglers)

    def cohort(self, number: int) -> list[Device]:
        part = self.recipe.fleet
        extra = self.recipe.faults.over_selection
        return draw_cohort(self.fleet, part.participation, number, self.trace, extra, part.sampling)

    def members(self, number: int) -> list[Device]:
        """All that may take part and are there."""
        there = [index for index in self.fleet.able(number) if self.trace.there(index, number)]
        return [self.fleet.device(index, number) for index in there]

    def around(self, turn: Turn) -> Turn:
        """The same turn with devices as they are."""
        if isinstance(self.engine, InProcess) and self.none:
            return turn
        least = self.recipe.faults.ring_quorum
        merge = thin_rings_stay(turn.merge, least) if least > 1 else turn.merge
        return replace(turn, engine=self._around(turn), merge=merge)

    def _around(self, turn: Turn) -> Faulty | Patient:
        fates = self._fates(turn)
        if not isinstance(self.engine, InProcess):
            codec = turn.coding if isinstance(turn.coding, Codec) else None
            return Patient(self.engine, fates.deadline, fates.needed, codec)
        inner = turn.engine if isinstance(turn.engine, Coded) else self.engine
        return Faulty(inner, fates, self._seconds, lambda lost: self.tell(turn.number, lost))

    def settled(self, standing: Standing, turn: Turn, before: Parcel, after: Parcel) -> Parcel:
        """The server's state after a round: that from before it if too few were heard, and then nobody remembers."""
        hearing = hearing_of(turn)
        if hearing is None:
            return after
        failed = self._failed(turn, hearing)
        standing.failed_in_a_row = standing.failed_in_a_row + 1 if failed else 0
        self._grow_older(standing, turn, hearing, failed)
        if not failed:
            return after
        heard, asked = len(hearing.answered()), len(hearing.asked)
        self.tell(turn.number, Refusal("", "QUORUM", f"{heard} of {asked} heard: the round does not count"))
        self.engine.memory.abandon()
        return before

    def rows(self, standing: Standing, turn: Turn) -> list[Row]:
        """Of a round in which anything was missing."""
        hearing = hearing_of(turn)
        if hearing is None:
            return []
        heard, asked = len(hearing.answered()), len(hearing.asked)
        if heard >= self._wanted(turn, hearing) and not any(standing.ages.values()):
            return []
        figures = {"degraded": 1.0, "asked": float(asked), "replied": float(heard)}
        ages = [Row(turn.number, "", name, "", "", "ring_age", float(age)) for name, age in standing.ages.items()]
        return [Row(turn.number, "", "", "", "", name, one) for name, one in figures.items()] + ages

    def give_up(self, standing: Standing) -> None:
        part = self.recipe.faults
        if standing.failed_in_a_row >= part.give_up_after:
            raise NoQuorum(standing.failed_in_a_row, part.quorum)

    def _fates(self, turn: Turn) -> Fates:
        part, names = self.recipe.faults, [device.name for device in turn.cohort]
        draw = generator(self.fleet.seed, DROPOUT, turn.number)
        silent = math.floor(part.dropout * len(names) + draw.random())  # on average just that share
        dead = {one.tier for one in part.dead if one.first <= turn.number <= one.to}
        return Fates(
            dead={one.name: f"tier {one.tier} is out of reach" for one in turn.cohort if one.tier in dead},
            silent=frozenset(names[index] for index in draw.permutation(len(names))[:silent]),
            broken={name: self._damage(name, turn.number) for name in names if name in self._broken},
            deadline=part.deadline or math.inf,
            needed=min(1.0, self._needed(turn) / len(names)) if names else 1.0,
        )

    @property
    def _seconds(self) -> Seconds | None:
        """None unless it is known how fast all devices are."""
        return self.clock.seconds if self.clock.knows(tier.name for tier in self.fleet.served) else None

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

    def _needed(self, turn: Turn) -> int:
        """How many of the cohort's devices a round wants to hear: all but those that were asked to be on the safe side.
        After the last round everybody is asked, and whom chance draws one by one nobody counted on."""
        part = self.recipe.fleet
        if part.sampling != "fixed_size":
            return math.floor(len(turn.cohort) / (1 + self.recipe.faults.over_selection) + 1e-9)
        everybody = turn.number > self.recipe.rounds
        return cohort_size(self.fleet, 1.0 if everybody else part.participation, turn.number)

    def _wanted(self, turn: Turn, hearing: Hearing) -> float:
        """The same for those who were asked: a method need not ask the whole cohort."""
        needed = self._needed(turn)
        return needed * len(hearing.asked) / len(turn.cohort) - 1e-9 if turn.cohort else needed

    def _failed(self, turn: Turn, hearing: Hearing) -> bool:
        """Whether too few were heard; nobody at all is always too few, unless nobody was wanted."""
        wanted = self._wanted(turn, hearing)
        return wanted > 0 and len(hearing.answered()) < max(1.0, self.recipe.faults.quorum * wanted)

    def _grow_older(self, standing: Standing, turn: Turn, hearing: Hearing, failed: bool) -> None:
        heard = Counter(device.tier for device in hearing.answered())
        asked = {device.tier for device in hearing.asked.values()}
        last_exchange = turn.number > self.recipe.rounds  # which may be with some tiers alone
        for ring in self._rings:
            if last_exchange and asked.isdisjoint(ring):
                continue
            votes, name = sum(heard[tier] for tier in ring), ring_name(ring)
            changed = not failed and votes >= self.recipe.faults.ring_quorum
            standing.ages[name] = 0 if changed else standing.ages.get(name, 0) + 1
            if standing.ages[name] == OLD:
                said = f"what {' and '.join(ring)} hold has not changed for {OLD} rounds: too few of them were heard"
                self.tell(turn.number, Refusal("", "RING_AGE", said))

    @cached_property
    def _rings(self) -> list[Ring]:
        return tier_rings(self.fleet)


def hearing_of(turn: Turn) -> Hearing | None:
    """Who was heard in a turn; None where everybody always is."""
    return turn.engine.hearing if isinstance(turn.engine, Faulty | Patient) else None


def build_faults(
    loaded: Loaded, fleet: Fleet, engine: InProcess, clock: Clock, tell: Callable[[int, Refusal], None]
) -> Faults:
    part, trace = loaded.recipe.faults, ALWAYS
    if part.trace is not None:
        try:
            trace = read_trace(Path(part.trace), fleet.size)
        except BadTrace as error:
            raise loaded.error(Problem(("faults", "trace"), "TRACE", str(error))) from error
    for key in ("deadline", "over_selection"):
        known = loaded.recipe.engine.kind != "in_process" or clock.knows(tier.name for tier in fleet.served)
        if getattr(part, key) and not known:
            said = f"{key} needs to know how fast the devices are"
            hint = "give every tier its speed and bandwidth"
            raise loaded.error(Problem(("faults", key), "RECIPE_VALUE", said, hint))
    return Faults(loaded.recipe, fleet, engine, clock, trace, tell)

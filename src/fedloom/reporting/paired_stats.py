"""Arms side by side: what the devices of each tier get from each, and whether a difference is more than noise.

What arms are measured by: which way is better, and how far a test set alone can tell.

The one rule for a claim over paired seeds.

What devices moved, as it counts when runs are compared: the bytes that travelled.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..evaluation import Row


@dataclass(frozen=True)
class Metric:
    name: str  # of its rows
    unit: str = ""
    steps: str = ""  # what differences are counted in
    sign: Literal[1, -1] = 1  # -1: less is better

    def said(self, value: float, digits: int = 1) -> str:
        return f"{value:.{digits}f}{self.unit}"

    def gap(self, value: float) -> str:
        return f"{value:+.1f}{self.steps}"

    @property
    def axis(self) -> str:
        return f"{self.name},{self.unit}" if self.unit else self.name

    def test_error(self, level: float, examples: int) -> float:
        """The standard error that a test set leaves of a value: of shares of right answers it is known, of losses it
        is not, and then only seeds tell."""
        share = level / 100
        return 100 * math.sqrt(max(0.0, share * (1 - share)) / examples) if self.unit else 0.0


ACCURACY = Metric("accuracy", " %", " points")
PERPLEXITY = Metric("perplexity", sign=-1)
METRICS = {one.name: one for one in (ACCURACY, PERPLEXITY)}


def metric_of(rows: Iterable[Row]) -> Metric:
    """Perplexity where words are guessed, else accuracy."""
    return PERPLEXITY if any(row.metric == PERPLEXITY.name for row in rows) else ACCURACY


Verdict = Literal["holds", "does not hold", "within noise"]


def more(gap: float) -> bool:
    return gap > 0


def less(gap: float) -> bool:
    return gap < 0


def unanimous(gaps: Sequence[float], agrees: Callable[[float], bool], contradicts: Callable[[float], bool]) -> Verdict:
    """It holds if every seed says so, and does not if every seed says the opposite; a tie or no number is neither."""
    if gaps and all(map(agrees, gaps)):
        return "holds"
    if gaps and all(map(contradicts, gaps)):
        return "does not hold"
    return "within noise"


PLAIN, CODED = ("bytes_down", "bytes_up"), ("bytes_down_compressed", "bytes_up_compressed")


def travelled(rows: Sequence[Row]) -> list[Row]:
    """The rows of a run that say so. With a codec they are those of the coded parcels, for nothing else was sent."""
    coded = [row for row in rows if row.metric in CODED]
    return coded or [row for row in rows if row.metric in PLAIN]


OWN = "local"  # the test on devices' own test examples


@dataclass(frozen=True)
class Serving:
    """The model that a device of a tier ends up with."""

    tier: str
    can_carry: bool


@dataclass(frozen=True)
class Arm:
    """One way to treat the fleet, over all its seeds."""

    name: str
    serving: Mapping[str, Serving]
    runs: Sequence[Sequence[Row]]  # rows, seed by seed
    candidate: str = ""  # the one that counts; empty: the first there is
    shares: Mapping[str, float] = field(default_factory=dict)  # of its devices, by tier, where not as in the others
    metric: Metric = ACCURACY  # whose values its curves have
    macs: Mapping[str, int] = field(default_factory=dict)  # of one example, by the tiers it has
    failed: frozenset[int] = frozenset()  # runs that ended before their time, whose last value says nothing

    def curves(self, tier: str, test: str) -> list[list[Row]]:
        """What a device of this tier gets is worth, seed by seed, evaluation by evaluation."""
        key = (self.serving[tier].tier, "", test, self.metric.name)
        return [_curve(rows, self.candidate, key) for rows in self.runs]

    def ends(self, tier: str, test: str) -> list[float]:
        """What a device of this tier gets, seed by seed: the last value, not the best."""
        found = [judged[-1].value if judged else math.nan for judged in self.curves(tier, test)]
        return [math.nan if at in self.failed else value for at, value in enumerate(found)]

    def worst(self, test: str) -> list[float]:
        """Of the tiers' ends the worst, seed by seed; none that is known, if it leaves devices without a model they can
        carry."""
        if not all(one.can_carry for one in self.serving.values()):
            return [math.nan] * len(self.runs)
        sign, by_tier = self.metric.sign, [self.ends(tier, test) for tier in self.serving]
        known = [[value for value in values if not math.isnan(value)] for values in zip(*by_tier, strict=True)]
        return [sign * min((sign * value for value in values), default=math.nan) for values in known]

    def seconds(self) -> list[float]:
        """Of all its rounds on the fleet's own devices, seed by seed, where it is known."""
        ticks = [[row.value for row in rows if row.metric == "simulated_seconds"] for rows in self.runs]
        return [math.fsum(some) for some in ticks] if all(ticks) else []

    def bytes_per_round(self) -> float:
        """That travelled, both ways, all devices together."""
        moved = [row.value for rows in self.runs for row in travelled(rows)]
        rounds = sum(row.metric == "bytes_down" for rows in self.runs for row in rows)
        return sum(moved) / rounds if rounds else 0.0


@dataclass(frozen=True)
class Difference:
    """`this` minus `other` for the devices of one tier, paired by seed."""

    tier: str
    this: str
    other: str
    this_mean: float
    other_mean: float
    mean: float
    noise: float
    beyond_noise: bool
    metric: Metric = ACCURACY

    @property
    def ahead(self) -> float:
        """By how much `this` is better."""
        return self.metric.sign * self.mean

    @property
    def verdict(self) -> str:
        if self.beyond_noise:
            return "beyond noise"
        return f"within noise (± {self.noise:.1f})" if math.isfinite(self.noise) else "one seed cannot tell"

    def __str__(self) -> str:
        said = self.metric.said
        return (
            f"{self.tier} devices: {self.this} {said(self.this_mean)}, {self.other} {said(self.other_mean)}: "
            f"{self.metric.gap(self.mean)}, {self.verdict}"
        )


def difference(this: Arm, other: Arm, tier: str, test: str, examples: int) -> Difference:
    """Beyond noise: every seed has the same sign and, with fewer than five seeds, the mean is more than two standard
    errors: those of the test set, which all seeds share, and of the seeds."""
    metric = this.metric
    pairs = list(zip(this.ends(tier, test), other.ends(tier, test), strict=True))
    gaps = [one - two for one, two in pairs]
    mean = statistics.fmean(gaps)
    level = statistics.fmean(value for pair in pairs for value in pair)
    spread, of_test = _spread(gaps)["std"] / math.sqrt(len(gaps)), math.sqrt(2) * metric.test_error(level, examples)
    noise = 2 * math.hypot(of_test, spread) if of_test or len(gaps) > 1 else math.inf
    one_sign = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
    beyond = one_sign and (len(gaps) >= 5 or abs(mean) > noise)
    left, right = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    return Difference(tier, this.name, other.name, left, right, mean, noise, beyond, metric)


@dataclass(frozen=True)
class Overall:
    """The first arm against another on all devices, each counting the same: does the first do better?"""

    this: str
    other: str
    this_mean: float
    other_mean: float
    better: int  # seeds
    seeds: int
    verdict: Verdict
    metric: Metric = ACCURACY

    def record(self) -> dict[str, Any]:
        return {**vars(self), "metric": self.metric.name}

    def __str__(self) -> str:
        said, gap = self.metric.said, self.metric.gap(self.this_mean - self.other_mean)
        return (
            f"all devices: {self.this} {said(self.this_mean)}, {self.other} {said(self.other_mean)}: "
            f"{gap}; that {self.this} is better "
            f"{self.verdict if self.verdict != 'within noise' else 'is within noise'} "
            f"({self.better} of {self.seeds} seeds)"
        )


def overall(this: Arm, other: Arm, shares: Mapping[str, float], test: str) -> Overall | None:
    """Holds, or does not, if all seeds agree; None if some tier was not judged."""
    sides = [_of_the_fleet(arm, shares, test) for arm in (this, other)]
    gaps = [this.metric.sign * (one - two) for one, two in zip(*sides, strict=True)]
    if any(math.isnan(gap) for gap in gaps):
        return None
    verdict = unanimous(gaps, more, less) if len(gaps) > 1 else "within noise"
    first, second = (statistics.fmean(side) for side in sides)
    better = sum(gap > 0 for gap in gaps)
    return Overall(this.name, other.name, first, second, better, len(gaps), verdict, this.metric)


def _of_the_fleet(arm: Arm, shares: Mapping[str, float], test: str) -> list[float]:
    by_tier = [(share, arm.ends(tier, test)) for tier, share in (arm.shares or shares).items()]
    return [math.fsum(share * seeds[number] for share, seeds in by_tier) for number in range(len(arm.runs))]


def _on_own_tests(arm: Arm, tiers: Sequence[str], shares: Mapping[str, float]) -> dict[str, dict[str, float]] | None:
    """By tier and, under `all`, of the whole fleet if all of it has a model it can carry; None: nobody looked."""
    by_tier = {tier: _spread(arm.ends(tier, OWN)) for tier in tiers}
    if all(math.isnan(one["mean"]) for one in by_tier.values()):
        return None
    everyone = all(one.can_carry for one in arm.serving.values())
    return {**by_tier, "all": _spread(_of_the_fleet(arm, shares, OWN) if everyone else [math.nan])}


def table(arms: Sequence[Arm], tiers: Sequence[str], shares: Mapping[str, float], test: str) -> list[dict[str, object]]:
    """One record per arm: what it is worth per tier (mean and spread over seeds) and where it is worst, and on devices'
    own tests if those are not what counts; who is served, what models and a round cost."""
    return [
        {
            "arm": arm.name,
            "metric": arm.metric.name,
            arm.metric.name: {tier: _spread(arm.ends(tier, test)) for tier in tiers},
            "worst_tier": _spread(arm.worst(test)),
            "own_tests": None if test == OWN else _on_own_tests(arm, tiers, shares),
            "can_carry": {tier: arm.serving[tier].can_carry for tier in tiers},
            "served_percent": 100 * sum(shares[tier] for tier in tiers if arm.serving[tier].can_carry),
            "macs": {tier: arm.macs[arm.serving[tier].tier] for tier in tiers if arm.serving[tier].tier in arm.macs},
            "bytes_per_round": arm.bytes_per_round(),
            "seconds": statistics.fmean(arm.seconds()) if arm.seconds() else None,
        }
        for arm in arms
    ]


def verdict(
    arms: Sequence[Arm], tiers: Sequence[str], shares: Mapping[str, float], test: str, examples: int
) -> list[str]:
    """The first arm against the others, in words. `tiers` run from the largest to the smallest."""
    first, by_name = arms[0], {arm.name: arm for arm in arms}
    told = []
    pairs = ((tiers[0], "drop-the-small"), (tiers[0], "small-for-all"), (tiers[-1], "small-for-all"))
    for tier, control in pairs:
        if control in by_name and control != first.name:
            told.append(difference(first, by_name[control], tier, test, examples))
    if "standalone" in by_name and first.name != "standalone":
        told += [difference(first, by_name["standalone"], tier, test, examples) for tier in tiers]
    lines = [str(one) for one in told if not math.isnan(one.mean)]  # a tier may have no device, and then no model
    for record in table(arms, tiers, shares, test):
        if record["arm"] in (first.name, "drop-the-small"):
            lines.append(
                f"{record['arm']} gives {record['served_percent']:.0f} % of the devices a model they can carry"
            )
    if "all-large" in by_name and 0 < first.bytes_per_round() < by_name["all-large"].bytes_per_round():
        ratio = by_name["all-large"].bytes_per_round() / first.bytes_per_round()
        lines.append(f"a round of {first.name} moves {ratio:.1f} times less than if every device had the largest model")
    return lines


def _curve(rows: Sequence[Row], candidate: str, key: tuple[str, str, str, str]) -> list[Row]:
    found = [row for row in rows if (row.tier, row.device, row.test, row.metric) == key]
    return [row for row in found if row.candidate == (candidate or found[0].candidate)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    """A number that is not there makes both of them not be there."""
    if any(map(math.isnan, values)):
        return {"mean": math.nan, "std": math.nan}
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}

"""Compare arms over paired seeds: final values by tier, differences with their noise, and the verdicts drawn from them.

One rule decides every statement that one arm is better than another: the difference must be beyond the noise of the
test set and of the seeds. A paper's claim in the ledger holds if every seed agrees.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ..evaluation import Row
from ..evaluation.metrics import NOTHING_DECLARED, MetricInfo, UndeclaredDirection, metric_info
from ..runs.correct_examples import CorrectExamples, Flags
from ..wording import format_number, join_words, pluralize


@dataclass(frozen=True)
class ComparedMetric:
    """A metric of the rows, with its direction and how its values are written."""

    name: str  # as in the rows
    unit: str = ""  # with the space in front of it
    difference_unit: str = ""
    higher_is_better: bool | None = True  # None: not declared, so that nothing is better or worse

    @property
    def title(self) -> str:
        """The name as the beginning of a title."""
        return self.name.replace("_", " ").capitalize()

    @property
    def is_directed(self) -> bool:
        return self.higher_is_better is not None

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1. Raises if the metric does not say."""
        if self.higher_is_better is None:
            raise UndeclaredDirection(self.name)
        return 1 if self.higher_is_better else -1

    def number(self, value: float, sign: str = "") -> str:
        """A value without its unit: with one decimal in percent and for perplexities, else four digits."""
        decimal = self.unit == " %" or self.name.startswith(PERPLEXITY_PREFIX)
        return format_number(value, ".1f" if decimal else ".4g", signed=bool(sign))

    def format(self, value: float) -> str:
        return f"{self.number(value)}{self.unit}"

    def signed(self, value: float) -> str:
        """A difference without its unit, with the sign that typesetting has for minus."""
        return self.number(value, "+").replace("-", "−")

    def format_difference(self, value: float) -> str:
        return f"{self.number(value, '+')}{self.difference_unit}"

    @property
    def axis_label(self) -> str:
        """Name and unit; also the direction, unless everybody knows it."""
        label = f"{self.name},{self.unit}" if self.unit else self.name
        return label if self in (ACCURACY, PERPLEXITY) else f"{label} ({self.direction})"

    @property
    def direction(self) -> str:
        """In words."""
        if self.higher_is_better is None:
            return "direction not declared"
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def has_standard_error(self) -> bool:
        """Whether the size of the test set says how uncertain a value is: it does for shares of examples."""
        return self.name.startswith(ACCURACY_PREFIX)

    def standard_error(self, level: float, examples: float) -> float:
        """Standard error due to the test set's size; 0 where it is unknown, as for perplexities."""
        share = level / 100
        return 100 * math.sqrt(max(0.0, share * (1 - share)) / examples) if self.has_standard_error else 0.0


ACCURACY_PREFIX, PERPLEXITY_PREFIX = "accuracy", "perplexity"
ACCURACY = ComparedMetric("accuracy", " %", " points")
PERPLEXITY = ComparedMetric("perplexity", higher_is_better=False)


def compared_metric(name: str, declared: Mapping[str, MetricInfo] = NOTHING_DECLARED) -> ComparedMetric:
    """A metric by the name of its rows, with direction and unit as the run declares them, or else as built in."""
    info = metric_info(name, declared)
    unit = f" {info.unit}" if info.unit else ""
    return ComparedMetric(name, unit, " points" if info.unit == "%" else unit, info.higher_is_better)


def metric_of(
    rows: Iterable[Row], declared: Mapping[str, MetricInfo] = NOTHING_DECLARED, name: str | None = None
) -> ComparedMetric:
    """The metric that a report or a verdict is about.

    The one named; else the task's headline, which is accuracy, or perplexity for language models, unless a run declares
    another; else the first that says which direction is better.
    `declared` are the metrics of the run; runs of older releases have none, and their rows are searched.
    """
    if name:
        return compared_metric(name, declared)
    found = list(dict.fromkeys(row.metric for row in rows if row.candidate))
    known = list(declared) or found
    headlines = [metric for metric, info in declared.items() if info.headline]
    usual = [*headlines, *(metric for metric in known if metric in (ACCURACY.name, PERPLEXITY.name))]
    directed = [metric for metric in known if metric_info(metric, declared).higher_is_better is not None]
    chosen = next(iter([*usual, *directed, *known]), ACCURACY.name)
    several = [metric for metric in found if metric.startswith(f"{chosen}[")]  # such as one per class
    return compared_metric(several[0] if several else chosen, declared)


ClaimVerdict = Literal["holds", "does not hold", "within noise"]


def is_positive(difference: float) -> bool:
    return difference > 0


def is_negative(difference: float) -> bool:
    return difference < 0


def decide_unanimously(
    differences: Sequence[float], agrees: Callable[[float], bool], contradicts: Callable[[float], bool]
) -> ClaimVerdict:
    """Holds if all seeds agree, does not hold if all contradict; a tie or NaN does neither."""
    if differences and all(map(agrees, differences)):
        return "holds"
    if differences and all(map(contradicts, differences)):
        return "does not hold"
    return "within noise"


def mean_and_std(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over seeds; both NaN if a value is missing."""
    if any(map(math.isnan, values)):
        return {"mean": math.nan, "std": math.nan}
    return {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else 0.0}


def mean_by_share(values: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """Mean over the tiers in `values`, weighted by their share of the devices."""
    return math.fsum(shares[tier] * value for tier, value in values.items()) / math.fsum(
        shares[tier] for tier in values
    )


PLAIN_BYTES, COMPRESSED_BYTES = ("bytes_down", "bytes_up"), ("bytes_down_compressed", "bytes_up_compressed")


def transfer_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows that count transferred bytes: the compressed sizes if the run compresses its messages."""
    compressed = [row for row in rows if row.metric in COMPRESSED_BYTES]
    return compressed or [row for row in rows if row.metric in PLAIN_BYTES]


REFERENCES = ("small-for-all", "drop-the-small")  # the controls that charts show as lines
MIN_SEEDS = 3  # that say how noisy a difference is, where the size of the test does not
LOCAL_TEST, GLOBAL_TEST = "local", "global"  # devices' own test examples, the whole test set


def on_test(test: str) -> str:
    """Where something was measured, in words."""
    known = {LOCAL_TEST: "on the devices' own test examples", GLOBAL_TEST: "on the whole test set"}
    return known.get(test, f"on the {test} test")


def other_test(test: str) -> str:
    """The test that tables show beside the one that a verdict is about."""
    return GLOBAL_TEST if test == LOCAL_TEST else LOCAL_TEST


def describe_tests(test: str, headlines: Mapping[str, str]) -> str:
    """Which test a verdict is about, and why, if arms are made for different ones; else "".

    Parameters
    ----------
    test : the test.
    headlines : the test that each arm's method is for.
    """
    others = [name for name, headline in headlines.items() if headline != test]
    if len(set(headlines.values())) < 2 or not others:
        return ""
    made = f"{join_words(others)} {'is' if len(others) == 1 else 'are'} made for the {other_test(test)} test"
    return f"judged on the {test} test, which every arm has; {made}, shown beside it"


@dataclass(frozen=True)
class ServedModel:
    """The model that a device of some tier ends up with: its tier, and whether the device can run it."""

    tier: str
    can_run: bool


@dataclass(frozen=True)
class Arm:
    """One configuration of a comparison, over all its seeds."""

    name: str
    serving: Mapping[str, ServedModel]
    runs: Sequence[Sequence[Row]]  # rows, by seed
    candidate: str = ""  # the evaluated model that counts; empty: the first
    shares: Mapping[str, float] = field(default_factory=dict)  # of its devices by tier, if other than the recipe's
    metric: ComparedMetric = ACCURACY
    macs: Mapping[str, int] = field(default_factory=dict)  # per example, by tier
    failed: frozenset[int] = frozenset()  # indices of runs that failed; their last value does not count
    correct: Sequence[CorrectExamples | None] = ()  # which test examples its models get right in the end, by seed

    def curves(self, tier: str, test: str) -> list[list[Row]]:
        """Rows of the model that devices of this tier end up with, by seed and evaluation."""
        key = (self.serving[tier].tier, "", test, self.metric.name)
        return [_curve(rows.get(key, []), self.candidate) for rows in self._rows_by_key]

    @cached_property
    def _rows_by_key(self) -> list[dict[tuple[str, str, str, str], list[Row]]]:
        """By seed, the rows of each tier, device, test and metric: charts ask for many of them."""
        found: list[dict[tuple[str, str, str, str], list[Row]]] = []
        for rows in self.runs:
            found.append({})
            for row in rows:
                found[-1].setdefault((row.tier, row.device, row.test, row.metric), []).append(row)
        return found

    def final_values(self, tier: str, test: str) -> list[float]:
        """The last value, not the best, by seed."""
        values = [curve[-1].value if curve else math.nan for curve in self.curves(tier, test)]
        return [math.nan if index in self.failed else value for index, value in enumerate(values)]

    def correct_examples(self, tier: str, test: str) -> list[Flags] | None:
        """Which test examples the final model gets right, by seed; None unless that is known of all of them."""
        if test != GLOBAL_TEST or self.metric != ACCURACY or len(self.correct) != len(self.runs) or self.failed:
            return None
        found = []
        for known, curve in zip(self.correct, self.curves(tier, test), strict=True):
            last = curve[-1] if curve else None
            flags = known.by_model.get((last.candidate, last.tier)) if known and last else None
            if flags is None or known is None or last is None or known.round != last.round:
                return None
            found.append(flags)
        return found

    @property
    def test_data(self) -> set[str]:
        """The fingerprints of the data sets that its runs were tested on."""
        return {known.data for known in self.correct if known is not None}

    def worst_tier_values(self, test: str) -> list[float]:
        """Final value of the worst tier, by seed; NaN if some devices cannot run their model."""
        if not all(served.can_run for served in self.serving.values()):
            return [math.nan] * len(self.runs)
        sign, by_tier = self.metric.sign, [self.final_values(tier, test) for tier in self.serving]
        known = [[value for value in values if not math.isnan(value)] for values in zip(*by_tier, strict=True)]
        return [sign * min((sign * value for value in values), default=math.nan) for values in known]

    def simulated_seconds(self) -> list[float]:
        """Simulated duration of all rounds, by seed; empty if unknown."""
        by_seed = [[row.value for row in rows if row.metric == "simulated_seconds"] for rows in self.runs]
        return [math.fsum(seconds) for seconds in by_seed] if all(by_seed) else []

    def bytes_per_round(self) -> float:
        """Bytes transferred in both directions by all devices together."""
        moved = [row.value for rows in self.runs for row in transfer_rows(rows)]
        rounds = sum(row.metric == "bytes_down" for rows in self.runs for row in rows)
        return sum(moved) / rounds if rounds else 0.0


def _curve(rows: Sequence[Row], candidate: str) -> list[Row]:
    return [row for row in rows if row.candidate == (candidate or rows[0].candidate)]


@dataclass(frozen=True)
class Difference:
    """`this` minus `other` for the devices of one tier, or for the average device (`tier` is empty), paired by seed."""

    tier: str
    this: str
    other: str
    this_mean: float
    other_mean: float
    mean: float
    noise: float
    beyond_noise: bool
    metric: ComparedMetric = ACCURACY
    seeds: int = 1
    better: int = 0  # seeds in which `this` is better
    where: str = ""  # which devices, in words, if not those of a tier or all

    @property
    def advantage(self) -> float:
        """By how much `this` is better; negative if it is worse."""
        return self.metric.sign * self.mean

    @property
    def place(self) -> str:
        """Which devices the difference is about, in words."""
        return self.where or (f"on {self.tier} devices" if self.tier else "on the average device")

    @property
    def verdict(self) -> str:
        """Whether the difference may be claimed, and why."""
        if self.beyond_noise:
            reason = "beyond noise" if abs(self.mean) > self.noise else f"all {self.seeds} seeds agree"
            return f"{reason}, may be claimed"
        if not math.isfinite(self.noise):
            return f"{'one seed' if self.seeds == 1 else f'{self.seeds} seeds'} cannot tell, not to be claimed"
        reason = "within noise" if abs(self.mean) <= self.noise else "the seeds disagree"
        return f"{reason}, not to be claimed"

    @property
    def claim(self) -> ClaimVerdict:
        """Whether `this` is better."""
        if not self.beyond_noise:
            return "within noise"
        return "holds" if self.advantage > 0 else "does not hold"

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "this": self.this, "other": self.other, "this_mean": self.this_mean, "other_mean": self.other_mean,
            "noise": self.noise, "better": self.better, "seeds": self.seeds, "verdict": self.claim,
            "metric": self.metric.name,
        }  # fmt: skip

    def __str__(self) -> str:
        """Which arm is better, where, by how much, and whether it may be claimed."""
        unit, seeds = self.metric.difference_unit, pluralize(self.seeds, "seed")
        noise = f"± {self.metric.number(self.noise)}, " if math.isfinite(self.noise) else ""
        size = self.metric.number(abs(self.mean))
        if float(size) == 0:
            return f"{self.this} and {self.other} are level {self.place} ({noise}{seeds}): nothing to be claimed"
        better, worse = (self.this, self.other) if self.advantage > 0 else (self.other, self.this)
        return f"{better} beats {worse} {self.place} by {size}{unit} ({noise}{seeds}): {self.verdict}"


def compute_difference(this: Arm, other: Arm, tier: str, test: str, examples: int) -> Difference:
    """Compare two arms on one tier.

    A difference is beyond noise if every seed has the same sign and, with fewer than five seeds, the mean exceeds two
    standard errors: those of the test set of `examples`, which all seeds share, and of the seeds.
    """
    values = this.final_values(tier, test), other.final_values(tier, test)
    of_test = error_of_examples((this, {tier: 1.0}), (other, {tier: 1.0}), test)
    return paired_difference(tier, this, other, *values, examples, of_test)


ArmPart = tuple[Arm, Mapping[str, float]]
"""An arm, and how much each of its tiers counts."""


def error_of_examples(first: ArmPart, second: ArmPart, test: str) -> float | None:
    """The standard error of the difference of two arms that is due to the choice of test examples, in points.

    Both arms and all seeds are tested on the same examples, so it is that of the mean difference on an example; that
    each arm is right in as many examples as another would overstate it. It takes three seeds: the examples on which two
    models differ by chance are others with every seed. None if it is not known which examples the models get right.
    """
    (this, _), (other, _) = first, second
    if len(this.runs) < MIN_SEEDS or len(this.test_data | other.test_data) != 1:
        return None
    left, right = (_mean_correct(arm, shares, test) for arm, shares in (first, second))
    if left is None or right is None:
        return None
    return 100 * float(np.std(left - right, ddof=1)) / math.sqrt(len(left))


def _mean_correct(arm: Arm, shares: Mapping[str, float], test: str) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
    """How often an example is predicted correctly, over seeds and, by their shares, over tiers."""
    total: Any = 0.0
    for tier, share in shares.items():
        flags = arm.correct_examples(tier, test)
        if flags is None:
            return None
        total = total + share * np.mean(flags, axis=0)
    return np.asarray(total)


def paired_difference(
    tier: str,
    this: Arm,
    other: Arm,
    first: Sequence[float],
    second: Sequence[float],
    examples: float,
    of_test: float | None = None,
) -> Difference:
    """Compare values of two arms, paired by seed, by the rule of `compute_difference`.

    `examples` of math.inf leaves the noise to the seeds alone, of which it takes at least three to know it. `of_test`:
    the standard error due to the test examples; None: as if both arms had been tested on examples of their own.
    """
    metric, pairs = this.metric, list(zip(first, second, strict=True))
    differences = [one - two for one, two in pairs]
    mean = statistics.fmean(differences)
    level = statistics.fmean(value for pair in pairs for value in pair)
    of_seeds = mean_and_std(differences)["std"] / math.sqrt(len(differences))
    if of_test is None:
        of_test = math.sqrt(2) * metric.standard_error(level, examples)
    is_known = of_test or len(differences) >= MIN_SEEDS
    noise = 2 * math.hypot(of_test, of_seeds) if is_known else math.inf
    same_sign = all(map(is_positive, differences)) or all(map(is_negative, differences))
    beyond = same_sign and (len(differences) >= 5 or abs(mean) > noise)
    left, right = (statistics.fmean(side) for side in zip(*pairs, strict=True))
    better = sum(metric.is_directed and metric.sign * one > 0 for one in differences)
    return Difference(tier, this.name, other.name, left, right, mean, noise, beyond, metric, len(pairs), better)


def compare_overall(this: Arm, other: Arm, shares: Mapping[str, float], test: str, examples: int) -> Difference | None:
    """Compare two arms on the average device, by the rule of `compute_difference`; None if a tier was not evaluated."""
    first, second = (_fleet_values(arm, shares, test) for arm in (this, other))
    if any(map(math.isnan, (*first, *second))):
        return None
    of_test = error_of_examples((this, this.shares or shares), (other, other.shares or shares), test)
    return paired_difference("", this, other, first, second, examples, of_test)


def _fleet_values(arm: Arm, shares: Mapping[str, float], test: str) -> list[float]:
    """Mean over all devices, by seed; NaN if a tier was not evaluated."""
    by_tier = [(share, arm.final_values(tier, test)) for tier, share in (arm.shares or shares).items()]
    return [math.fsum(share * values[seed] for share, values in by_tier) for seed in range(len(arm.runs))]


def summarize_arms(
    arms: Sequence[Arm], tiers: Sequence[str], shares: Mapping[str, float], test: str
) -> list[dict[str, object]]:
    """One record per arm: final values by tier and of the worst tier, which devices can run their model, and costs.

    `local_test` holds the values on devices' own test examples, `global_test` those on the whole test set; each is None
    if that is the test compared.
    """
    return [
        {
            "arm": arm.name,
            "metric": arm.metric.name,
            arm.metric.name: {tier: mean_and_std(arm.final_values(tier, test)) for tier in tiers},
            "worst_tier": mean_and_std(arm.worst_tier_values(test)),
            **{
                f"{other}_test": None if test == other else _other_test_values(arm, tiers, shares, other)
                for other in (LOCAL_TEST, GLOBAL_TEST)
            },
            "can_run": {tier: arm.serving[tier].can_run for tier in tiers},
            "served_percent": 100 * sum(shares[tier] for tier in tiers if arm.serving[tier].can_run),
            "macs": {tier: arm.macs[arm.serving[tier].tier] for tier in tiers if arm.serving[tier].tier in arm.macs},
            "bytes_per_round": arm.bytes_per_round(),
            "seconds": statistics.fmean(seconds) if (seconds := arm.simulated_seconds()) else None,
        }
        for arm in arms
    ]


def _other_test_values(
    arm: Arm, tiers: Sequence[str], shares: Mapping[str, float], test: str
) -> dict[str, dict[str, float]] | None:
    """By tier, and under `all` for the whole fleet if every device can run its model; None if not evaluated."""
    by_tier = {tier: mean_and_std(arm.final_values(tier, test)) for tier in tiers}
    if all(math.isnan(values["mean"]) for values in by_tier.values()):
        return None
    all_served = all(served.can_run for served in arm.serving.values())
    return {**by_tier, "all": mean_and_std(_fleet_values(arm, shares, test) if all_served else [math.nan])}


def write_verdict(
    arms: Sequence[Arm], tiers: Sequence[str], shares: Mapping[str, float], test: str, examples: int
) -> list[str]:
    """Sentences that compare the first arm with the controls. `tiers` run from the largest to the smallest."""
    first, by_name = arms[0], {arm.name: arm for arm in arms}
    differences = []
    pairs = ((tiers[0], "drop-the-small"), (tiers[0], "small-for-all"), (tiers[-1], "small-for-all"))
    for tier, control in pairs:
        if control in by_name and control != first.name:
            differences.append(compute_difference(first, by_name[control], tier, test, examples))
    if "standalone" in by_name and first.name != "standalone":
        differences += [compute_difference(first, by_name["standalone"], tier, test, examples) for tier in tiers]
    lines = [str(one) for one in differences if not math.isnan(one.mean)]  # a tier without devices has no model
    served = {
        arm.name: 100 * sum(shares[tier] for tier in tiers if arm.serving[tier].can_run)
        for arm in arms
        if arm.name in (first.name, "drop-the-small")
    }
    lines.append(f"devices with a model they can run: {join_words([f'{n} {v:.0f} %' for n, v in served.items()])}")
    if "all-large" in by_name and 0 < first.bytes_per_round() < by_name["all-large"].bytes_per_round():
        ratio = by_name["all-large"].bytes_per_round() / first.bytes_per_round()
        lines.append(f"a round in which every device has the largest model transfers {ratio:.1f} times the bytes")
    return lines

"""Statistics over paired seeds: differences, noise and verdicts."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from fedloom.evaluation import Row
from fedloom.reporting import Arm, ServedModel, compare_overall, compute_difference, summarize_arms, write_verdict
from fedloom.runs.correct_examples import CorrectExamples

TIERS = ["large", "small"]
SHARES = {"large": 0.25, "small": 0.75}
OWN = {tier: ServedModel(tier, True) for tier in TIERS}
LARGE_ONLY = {"large": ServedModel("large", True), "small": ServedModel("large", False)}
SMALL_ONLY = {tier: ServedModel("small", True) for tier in TIERS}


def run_of(accuracies, moved=100.0, test="global"):
    """Two rounds: an early one that must not count, and a last one with these accuracies by tier."""
    rows = [
        Row(number, "server", tier, device, test, metric, value if number == 2 else 99.0)
        for number in (1, 2)
        for tier, last in accuracies.items()
        for device, metric, value in (("", "accuracy", last), ("", "loss", 1.0), ("0", "accuracy", 1.0))
    ]
    return rows + [
        Row(number, "", "", "", "", metric, moved / 2) for number in (1, 2) for metric in ("bytes_down", "bytes_up")
    ]


def arm(name, *values, serving=None, moved=100.0):
    """An arm whose large devices get these accuracies, seed by seed, and its small ones ten points less."""
    runs = [run_of({"large": value, "small": value - 10}, moved) for value in values]
    return Arm(name, serving or OWN, runs)


def gap(ours, theirs, examples=10_000, tier="large"):
    return compute_difference(arm("this", *ours), arm("other", *theirs), tier, "global", examples)


def test_difference_of_one_seed_has_noise_of_test_set():
    result = gap([80.0], [70.0], examples=100)
    assert result.noise == pytest.approx(2 * 100 * math.sqrt(2 * 0.75 * 0.25 / 100))
    assert gap([80.0, 80.0], [70.0, 70.0], examples=100).noise == pytest.approx(result.noise)  # one test set for all


def test_difference_noise_includes_spread_of_seeds():
    alike, apart = gap([80.0, 80.0], [70.0, 70.0]), gap([82.0, 78.0], [70.0, 70.0])
    spread = math.sqrt(8) / math.sqrt(2)  # the standard error of the gaps 12 and 8
    assert apart.noise == pytest.approx(math.hypot(alike.noise, 2 * spread))


@pytest.mark.parametrize(("examples", "beyond"), [(100, False), (10_000, True)])
def test_difference_of_one_seed_needs_large_test_set(examples, beyond):
    result = gap([80.0], [70.0], examples)
    assert (result.mean, result.beyond_noise) == (10.0, beyond)


@pytest.mark.parametrize("sign", [1, -1])
def test_difference_of_three_seeds_needs_agreement_and_size(sign):
    ours, theirs = [72.0, 73.0, 74.0], [70.0, 70.0, 70.0]
    pair = (ours, theirs) if sign > 0 else (theirs, ours)
    assert gap(*pair).beyond_noise
    assert gap(*pair).mean == sign * 3.0
    assert not gap(*pair, examples=100).beyond_noise


def test_difference_of_disagreeing_seeds_is_within_noise():
    result = gap([90.0, 90.0, 69.9], [70.0, 70.0, 70.0])
    assert not result.beyond_noise


def test_difference_with_a_tied_seed_is_within_noise():
    assert not gap([80.0, 80.0, 70.0], [70.0, 70.0, 70.0]).beyond_noise
    assert not gap([70.0], [70.0]).beyond_noise


@pytest.mark.parametrize("sign", [1, -1])
def test_difference_of_five_agreeing_seeds_is_beyond_noise_at_any_size(sign):
    level, tiny = [70.0, 71.0, 69.0, 70.5, 70.2], sign * 0.01
    ours = [value + tiny for value in level]
    result = gap(ours, level, examples=10)
    assert abs(result.mean) < result.noise
    assert result.beyond_noise
    assert not gap(ours[:4], level[:4], examples=10).beyond_noise


def test_difference_of_five_disagreeing_seeds_is_within_noise():
    level = [70.0, 71.0, 69.0, 70.5, 70.2]
    assert not gap([79.0, 80.0, 79.0, 80.0, 70.1], level).beyond_noise


def test_difference_pairs_seeds():
    """Values vary much between seeds and little within pairs; only the latter counts."""
    ours, theirs = [90.0, 50.0, 70.0, 60.0, 80.0], [89.0, 49.0, 69.0, 59.0, 79.0]
    assert gap(ours, theirs, examples=100).beyond_noise
    assert not gap(ours, theirs[::-1], examples=100).beyond_noise
    with pytest.raises(ValueError, match="zip"):
        gap(ours, theirs[:4])


def test_difference_has_means_and_names():
    result = gap([72.0, 74.0], [70.0, 70.0])
    assert (result.tier, result.this, result.other) == ("large", "this", "other")
    assert (result.this_mean, result.other_mean, result.mean) == (73.0, 70.0, 3.0)


def test_difference_as_text_is_one_statement():
    """One sentence: what is better, by how much, whether it may be claimed. A loss names the winner."""
    place = "on large devices by 5.0 points (± 1.3, 1 seed): beyond noise, may be claimed"
    assert str(gap([75.0], [70.0])) == f"this beats other {place}"
    assert str(gap([70.0], [75.0])) == f"other beats this {place}"
    assert str(gap([71.0], [70.0], 100)) == (
        "this beats other on large devices by 1.0 points (± 12.9, 1 seed): within noise, not to be claimed"
    )


def test_difference_of_seeds_that_disagree_is_not_to_be_claimed():
    found = str(gap([99.0] * 9 + [89.9], [90.0] * 10))
    assert found.startswith("this beats other on large devices by 8.1 points (± ")
    assert found.endswith(", 10 seeds): the seeds disagree, not to be claimed")


def test_difference_within_the_noise_of_many_agreeing_seeds_may_be_claimed():
    found = str(gap([70.5] * 5, [70.0] * 5, 100))
    assert found.endswith("5 seeds): all 5 seeds agree, may be claimed")


@pytest.mark.parametrize("gain", [0.0, -0.04, 0.04])
def test_difference_that_rounds_to_zero_names_no_winner(gain):
    assert str(gap([70.0 + gain], [70.0], 100)) == (
        "this and other are level on large devices (± 13.0, 1 seed): nothing to be claimed"
    )


def test_final_values_are_last_values_of_served_model():
    assert arm("a", 80.0).final_values("small", "global") == [70.0]
    assert arm("a", 80.0, serving=LARGE_ONLY).final_values("small", "global") == [80.0]
    assert arm("a", 80.0, serving=SMALL_ONLY).final_values("large", "global") == [70.0]


def test_summarize_arms_has_values_and_costs():
    ours, dropped = summarize_arms(
        [arm("ours", 80.0, 84.0), arm("dropped", 90.0, 90.0, serving=LARGE_ONLY, moved=400.0)], TIERS, SHARES, "global"
    )
    assert ours == {
        "arm": "ours",
        "metric": "accuracy",
        "accuracy": {"large": {"mean": 82.0, "std": 8**0.5}, "small": {"mean": 72.0, "std": 8**0.5}},
        "worst_tier": {"mean": 72.0, "std": 8**0.5},
        "local_test": None,
        "global_test": None,
        "can_run": {"large": True, "small": True},
        "served_percent": 100.0,
        "macs": {},
        "bytes_per_round": 100.0,
        "seconds": None,
    }
    assert dropped["accuracy"] == {"large": {"mean": 90.0, "std": 0.0}, "small": {"mean": 90.0, "std": 0.0}}
    assert dropped["can_run"] == {"large": True, "small": False}
    assert (dropped["served_percent"], dropped["bytes_per_round"]) == (25.0, 400.0)
    assert math.isnan(dropped["worst_tier"]["mean"])  # its small devices cannot run their model


def test_summarize_arms_includes_local_test():
    runs = [run_of({"large": 80.0, "small": 70.0}) + run_of({"large": 90.0, "small": 50.0}, 0, "local")]
    (both,) = summarize_arms([Arm("both", OWN, runs)], TIERS, SHARES, "global")
    assert both["accuracy"]["large"]["mean"] == 80.0
    assert {tier: one["mean"] for tier, one in both["local_test"].items()} == {
        "large": 90.0,
        "small": 50.0,
        "all": 60.0,
    }
    (dropped,) = summarize_arms([Arm("dropped", LARGE_ONLY, runs)], TIERS, SHARES, "global")
    assert math.isnan(dropped["local_test"]["all"]["mean"])
    (local,) = summarize_arms([Arm("both", OWN, runs)], TIERS, SHARES, "local")
    assert local["accuracy"]["large"]["mean"] == 90.0 and local["local_test"] is None


def test_summarize_arms_of_one_seed_has_zero_std():
    (record,) = summarize_arms([arm("ours", 80.0)], TIERS, SHARES, "global")
    assert record["accuracy"]["large"] == {"mean": 80.0, "std": 0.0}


def test_bytes_per_round_is_mean_over_rounds_and_seeds():
    runs = [
        [Row(1, "", "", "", "", "bytes_down", 10.0), Row(1, "", "", "", "", "bytes_up", 20.0)],
        [Row(1, "", "", "", "", "bytes_down", 30.0), Row(1, "", "", "", "", "bytes_up", 60.0)],
    ]
    assert Arm("a", OWN, runs).bytes_per_round() == statistics.fmean([30.0, 90.0])
    assert Arm("a", OWN, [[]]).bytes_per_round() == 0


def full(*values):
    return [
        arm("heterofl", *values),
        arm("standalone", *(value - 20 for value in values), moved=0.0),
        arm("small-for-all", *values, serving=SMALL_ONLY, moved=50.0),
        arm("drop-the-small", *(value - 5 for value in values), serving=LARGE_ONLY, moved=80.0),
        arm("all-large", *values, serving=LARGE_ONLY, moved=250.0),
    ]


def test_write_verdict_with_all_controls_states_each_comparison_once():
    lines = write_verdict(full(80.0, 80.0, 80.0), TIERS, SHARES, "global", 10_000)
    for line in (
        "heterofl beats drop-the-small on large devices by 5.0 points (± 1.2, 3 seeds): beyond noise, may be claimed",
        "heterofl and small-for-all are level on small devices (± 1.3, 3 seeds): nothing to be claimed",
        "heterofl beats standalone on large devices by 20.0 points (± 1.3, 3 seeds): beyond noise, may be claimed",
        "heterofl beats standalone on small devices by 20.0 points (± 1.4, 3 seeds): beyond noise, may be claimed",
        "devices with a model they can run: heterofl 100 % and drop-the-small 25 %",
        "a round in which every device has the largest model transfers 2.5 times the bytes",
    ):
        assert lines.count(line) == 1, line


def test_write_verdict_mentions_only_given_arms():
    first, standalone, *_ = full(80.0)
    assert write_verdict([first], TIERS, SHARES, "global", 100) == ["devices with a model they can run: heterofl 100 %"]
    assert not any(
        "all-large" in line or "drop" in line for line in write_verdict([first, standalone], TIERS, SHARES, "global", 9)
    )


def test_write_verdict_of_control_skips_itself():
    _, standalone, *_ = full(80.0)
    lines = write_verdict([standalone], TIERS, SHARES, "global", 100)
    assert lines == ["devices with a model they can run: standalone 100 %"]


def test_write_verdict_without_transfers_has_no_ratio():
    _, standalone, *_, all_large = full(80.0)
    assert not any(
        "times the bytes" in line for line in write_verdict([standalone, all_large], TIERS, SHARES, "global", 100)
    )


def test_final_values_depend_on_test():
    runs = [run_of({"large": 50.0}) + run_of({"large": 60.0}, test="local")]
    only = Arm("a", {"large": ServedModel("large", True)}, runs)
    assert only.final_values("large", "local") == [60.0]
    assert only.final_values("large", "global") == [50.0]


def runs_of(name: str, seeds: list[dict[str, float]]) -> Arm:
    rows = [[Row(1, "server", tier, "", "local", "accuracy", value) for tier, value in one.items()] for one in seeds]
    return Arm(name, {tier: ServedModel(tier, True) for tier in seeds[0]}, rows)


@pytest.mark.parametrize(
    ("gains", "examples", "verdict"),
    [([1, 2, 3], 10**9, "holds"), ([-1, -2, -3], 10**9, "does not hold"), ([1, -1, 3], 10**9, "within noise"),
     ([0, 1, 1], 10**9, "within noise"), ([3.8, 3.9], 400, "within noise"), ([5], 100, "within noise")],
)  # fmt: skip
def test_compare_overall_has_the_rule_of_single_tiers(gains: list[float], examples: int, verdict: str) -> None:
    shares = {"a": 0.75, "b": 0.25}
    this = runs_of("this", [{"a": 50.0 + gain, "b": 60.0 + gain} for gain in gains])
    other = runs_of("other", [{"a": 50.0, "b": 60.0} for _ in gains])
    result = compare_overall(this, other, shares, "local", examples)
    assert result is not None
    assert (result.claim, result.seeds, result.better) == (verdict, len(gains), sum(gain > 0 for gain in gains))
    assert (result.this_mean, result.other_mean) == (pytest.approx(52.5 + sum(gains) / len(gains)), pytest.approx(52.5))
    assert " on the average device by " in str(result)
    assert result.beyond_noise == compute_difference(this, other, "a", "local", examples).beyond_noise
    assert ("not to be claimed" in str(result)) == (verdict == "within noise")


def test_compare_overall_with_unevaluated_tier_is_none() -> None:
    this, other = runs_of("this", [{"a": 1.0}]), runs_of("other", [{"a": float("nan")}])
    assert compare_overall(this, other, {"a": 1.0}, "local", 100) is None


def arm_with_examples(name, flags, data="digits", number=2, serving=None):
    """An arm whose models of both sizes get these test examples right, seed by seed."""
    runs = [run_of({tier: 100 * float(np.mean(one)) for tier in TIERS}) for one in flags]
    correct = [
        CorrectExamples(number, data, {("server", tier): np.array(one, bool) for tier in TIERS}) for one in flags
    ]
    return Arm(name, serving or OWN, runs, correct=correct)


def draw_flags(seeds, examples=400, share=0.1):
    """Hard and easy examples, the same for two arms that differ on few of them."""
    draw = np.random.default_rng(0)
    easy = draw.random(examples) < 0.7
    theirs = [easy ^ (draw.random(examples) < 0.05) for _ in range(seeds)]
    return [one | (draw.random(examples) < share) for one in theirs], theirs


def test_difference_of_known_examples_has_the_standard_error_of_the_mean_difference():
    ours, theirs = draw_flags(3)
    found = compute_difference(
        arm_with_examples("this", ours), arm_with_examples("other", theirs), "large", "global", 400
    )
    gaps = [
        100 * statistics.fmean(int(a[i]) - int(b[i]) for a, b in zip(ours, theirs, strict=True)) for i in range(400)
    ]
    by_seed = [100 * (float(np.mean(a)) - float(np.mean(b))) for a, b in zip(ours, theirs, strict=True)]
    of_examples, of_seeds = statistics.stdev(gaps) / math.sqrt(400), statistics.stdev(by_seed) / math.sqrt(3)
    assert found.noise == pytest.approx(2 * math.hypot(of_examples, of_seeds))
    assert found.mean == pytest.approx(statistics.fmean(by_seed))
    unknown = compute_difference(
        replace(arm_with_examples("this", ours), correct=()), arm_with_examples("other", theirs), "large", "global", 400
    )
    assert found.noise < unknown.noise / 2
    assert found.beyond_noise and not unknown.beyond_noise


def test_difference_of_equal_models_has_no_noise_of_examples():
    ours, _ = draw_flags(4)
    found = compute_difference(
        arm_with_examples("this", ours), arm_with_examples("other", ours), "small", "global", 400
    )
    assert (found.mean, found.noise, found.beyond_noise) == (0.0, 0.0, False)


def test_difference_on_average_device_weighs_examples_by_tier():
    ours, theirs = draw_flags(3)
    this, other = arm_with_examples("this", ours), arm_with_examples("other", theirs, serving=SMALL_ONLY)
    for one in this.correct:
        one.by_model["server", "small"] = one.by_model["server", "large"] & (np.arange(400) % 5 > 0)
    overall = compare_overall(this, other, SHARES, "global", 400)
    mean = [np.mean([one.by_model["server", tier] for one in this.correct], axis=0) for tier in TIERS]
    gaps = 100 * (0.25 * mean[0] + 0.75 * mean[1] - np.mean(theirs, axis=0))
    by_seed = [100 * float(np.mean(a)) - 100 * float(np.mean(b)) for a, b in zip(ours, theirs, strict=True)]
    of_examples, of_seeds = float(np.std(gaps, ddof=1)) / 20, statistics.stdev(by_seed) / math.sqrt(3)
    assert overall is not None
    assert overall.noise == pytest.approx(2 * math.hypot(of_examples, of_seeds))


@pytest.mark.parametrize(
    "change",
    [
        {"data": "other data"},
        {"number": 1},  # of an earlier round than the last row
        {"flags": 2},  # with two seeds chance is not known
        {"test": "local"},
        {"missing": "server"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_difference_of_unknown_or_other_examples_is_as_of_independent_ones(change):
    ours, theirs = draw_flags(change.get("flags", 3))
    this, other = (
        arm_with_examples("this", ours),
        arm_with_examples("other", theirs, change.get("data", "digits"), change.get("number", 2)),
    )
    if "missing" in change:
        del other.correct[1].by_model["server", "large"]
    test = change.get("test", "global")
    if test == "local":
        this, other = (
            replace(one, runs=[[replace(r, test="local") for r in run] for run in one.runs]) for one in (this, other)
        )
    plain = (replace(one, correct=()) for one in (this, other))
    assert compute_difference(this, other, "large", test, 400) == compute_difference(*plain, "large", test, 400)

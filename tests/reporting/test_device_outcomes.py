"""What arms mean for single devices: worse off than alone, and the worst tenth."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.evaluation import Row
from fedloom.reporting import Arm, ServedModel
from fedloom.reporting.device_outcomes import (
    compare_pairs,
    compare_worst_tenth,
    device_sentences,
    device_values,
    summarize_devices,
)
from fedloom.reporting.paired_stats import PERPLEXITY

TIER_OF = {f"{number}": "large" if number < 5 else "small" for number in range(20)}
OWN = {tier: ServedModel(tier, True) for tier in ("large", "small")}
SMALL_ONLY = {tier: ServedModel("small", True) for tier in OWN}
LARGE_ONLY = {"large": ServedModel("large", True), "small": ServedModel("large", False)}


def arm(name, *seeds, serving=OWN, **more):
    """An arm in which device n has the n-th value of each seed; every tier's model is evaluated on every device."""
    runs = [
        [
            Row(4, "server", tier, device, "local", "accuracy", value if serving[own].tier == tier else -1.0)
            for tier in OWN
            for (device, own), value in zip(TIER_OF.items(), values, strict=True)
        ]
        + [Row(4, "server", tier, "", "global", "accuracy", statistics.fmean(values)) for tier in OWN]
        for values in seeds
    ]
    return Arm(name, serving, runs, **more)


LEVEL = [50.0] * 20


def test_device_values_are_those_of_the_model_that_a_device_ends_up_with():
    values = [float(number) for number in range(20)]
    assert device_values(arm("a", values), TIER_OF) == [dict(zip(TIER_OF, values, strict=True))]
    assert device_values(arm("b", values, serving=SMALL_ONLY), TIER_OF)[0]["0"] == 0.0
    assert set(device_values(arm("c", values, serving=LARGE_ONLY), TIER_OF)[0]) == {"0", "1", "2", "3", "4"}


def test_summarize_devices_counts_who_is_worse_off_than_alone():
    ours = [40.0, 48.0, *[60.0] * 18]  # two of twenty lose ten and two points
    (found, alone) = summarize_devices([arm("ours", ours, LEVEL), arm("standalone", LEVEL, LEVEL)], TIER_OF)
    assert found.worse_off == [10.0, 0.0]
    assert found.burden == [pytest.approx(12 / 20), 0.0]
    assert found.worst_tenth == [44.0, 50.0]  # two of twenty
    assert alone.worse_off == [] and alone.record()["negative_transfer_percent"] is None


def test_summarize_devices_where_lower_is_better_turns_the_sign():
    ours = [60.0, *[40.0] * 19]
    arms = [
        Arm(one.name, one.serving, [[Row(*list(vars(row).values())[:5], "perplexity", row.value) for row in rows]
                                    for rows in one.runs], metric=PERPLEXITY)
        for one in (arm("ours", ours), arm("standalone", LEVEL))
    ]  # fmt: skip
    found = summarize_devices(arms, TIER_OF)[0]
    assert (found.worse_off, found.burden, found.worst_tenth) == ([5.0], [0.5], [50.0])


@given(st.lists(st.floats(0, 100), min_size=20, max_size=20), st.lists(st.floats(0, 100), min_size=20, max_size=20))
def test_burden_is_zero_exactly_if_no_device_is_worse_off(ours, alone):
    found = summarize_devices([arm("ours", ours), arm("standalone", alone)], TIER_OF)[0]
    oracle = [max(0.0, b - a) for a, b in zip(ours, alone, strict=True)]
    assert found.worse_off[0] == pytest.approx(5 * sum(loss > 0 for loss in oracle))
    assert found.burden[0] == pytest.approx(sum(oracle) / 20)
    assert found.worst_tenth[0] == pytest.approx(sum(sorted(ours)[:2]) / 2)
    assert found.worst_tenth[0] <= statistics.fmean(ours) + 1e-9


def test_summarize_devices_without_rows_of_devices_or_fixed_tiers_is_empty():
    assert summarize_devices([arm("ours", LEVEL)], {}) == []
    assert summarize_devices([arm("ours", LEVEL, failed=frozenset({0}))], TIER_OF) == []


def test_compare_worst_tenth_of_one_seed_cannot_be_claimed():
    arms = [arm("ours", LEVEL), arm("other", [value - 5 for value in LEVEL])]
    (gap,) = compare_worst_tenth(arms, summarize_devices(arms, TIER_OF))
    assert gap.mean == 5.0 and not math.isfinite(gap.noise)
    assert str(gap) == (
        "ours beats other on the worst tenth of devices by 5.0 points (1 seed): one seed cannot tell, not to be claimed"
    )


def test_compare_worst_tenth_of_two_seeds_that_agree_cannot_be_claimed():
    arms = [arm("ours", LEVEL, LEVEL), arm("other", *([value - 5 for value in LEVEL] for _ in range(2)))]
    (gap,) = compare_worst_tenth(arms, summarize_devices(arms, TIER_OF))
    assert gap.verdict == "2 seeds cannot tell, not to be claimed"


def test_compare_worst_tenth_leaves_out_arms_that_serve_fewer_devices():
    arms = [arm("ours", LEVEL), arm("drop-the-small", LEVEL, serving=LARGE_ONLY)]
    assert compare_worst_tenth(arms, summarize_devices(arms, TIER_OF)) == []


def test_device_sentences_say_how_many_are_worse_off():
    arms = [arm("ours", [40.0, *LEVEL[1:]]), arm("standalone", LEVEL)]
    first, second = device_sentences(arms, summarize_devices(arms, TIER_OF))
    assert first == (
        "ours leaves 5 % of 20 devices worse off than standalone; the average device loses 0.5 points by it"
    )
    assert second.startswith("standalone beats ours on the worst tenth of devices by 5.0 points")
    better = [arm("ours", LEVEL), arm("standalone", [40.0, *LEVEL[1:]])]
    first, second = device_sentences(better, summarize_devices(better, TIER_OF))
    assert first == "ours leaves none of 20 devices worse off than standalone"
    assert second.startswith("ours beats standalone on the worst tenth of devices by 5.0 points")


def test_compare_pairs_covers_every_tier_that_can_run_both():
    arms = [
        arm("ours", LEVEL, LEVEL), arm("small-for-all", LEVEL, LEVEL, serving=SMALL_ONLY),
        arm("drop-the-small", LEVEL, LEVEL, serving=LARGE_ONLY),
    ]  # fmt: skip
    pairs = compare_pairs(arms, ["large", "small"], "global", 1000)
    assert [(pair.other, pair.tier) for pair in pairs] == [
        ("small-for-all", "large"), ("small-for-all", "small"), ("drop-the-small", "large"),
    ]  # fmt: skip

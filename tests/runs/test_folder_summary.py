"""The summary of a run's rows: last, best and mean values."""

import math

import pytest

from fedloom.evaluation import Row
from fedloom.runs.folder import Final, summarize


def row(number, value, metric="accuracy", candidate="server", tier="large", device="", test="global"):
    return Row(number, candidate, tier, device, test, metric, value)


def test_summarize_series_has_last_and_best_value():
    (final,) = summarize([row(1, 40.0), row(2, 60.0), row(3, 50.0)])
    assert final == Final("server", "large", "global", "accuracy", value=50.0, best=60.0, best_round=2, mean_of_10=50.0)


def test_summarize_loss_has_lowest_as_best():
    (final,) = summarize([row(1, 2.0, "loss"), row(2, 0.5, "loss"), row(3, 0.7, "loss")])
    assert (final.value, final.best, final.best_round) == (0.7, 0.5, 2)


@pytest.mark.parametrize("metric", ["accuracy", "initial", "personalized"])
def test_summarize_accuracy_has_highest_as_best(metric):
    (final,) = summarize([row(1, 40.0, metric), row(2, 60.0, metric), row(3, 50.0, metric)])
    assert (final.best, final.best_round) == (60.0, 2)


def test_summarize_equal_values_has_first_as_best():
    (final,) = summarize([row(1, 10.0), row(2, 30.0), row(3, 30.0)])
    assert (final.value, final.best, final.best_round) == (30.0, 30.0, 2)


def test_summarize_one_round_is_last_and_best():
    (final,) = summarize([row(7, 12.5)])
    assert (final.value, final.best, final.best_round) == (12.5, 12.5, 7)


def test_summarize_groups_by_candidate_tier_test_and_metric():
    series = [
        ("server", "a", "global", "accuracy"),
        ("server", "a", "local", "accuracy"),
        ("server", "b", "global", "loss"),
        ("personal", "a", "global", "accuracy"),
    ]
    rows = [
        row(number, float(10 * number + place), metric, candidate, tier, "", test)
        for number in (1, 2)
        for place, (candidate, tier, test, metric) in enumerate(series)
    ]
    finals = summarize(rows)
    assert [(one.candidate, one.tier, one.test, one.metric) for one in finals] == series
    assert [one.value for one in finals] == [20.0, 21.0, 22.0, 23.0]


def test_summarize_leaves_out_rows_of_devices():
    (final,) = summarize([row(1, 40.0), row(1, 99.0, device="3"), row(2, 41.0), row(2, 99.0, device="3")])
    assert (final.value, final.best) == (41.0, 41.0)


def test_summarize_no_rows_is_empty():
    assert summarize([]) == []


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_summarize_nan_is_never_best(metric, bad):
    values = [1.0, 1.0, 1.0]
    values[bad] = math.nan
    (final,) = summarize(row(number, value, metric) for number, value in enumerate(values, 1))
    assert final.best == 1.0
    assert final.best_round != bad + 1

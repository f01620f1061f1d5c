"""Every sentence of the page, each with a case in which it must say the opposite."""
# ruff: noqa: E501 - a sentence of the page stands on one line, as a reader sees it

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.reporting.charts import Chart, MissingChart, build_charts, build_hero_charts
from fedloom.reporting.charts import devices as charts_of_devices
from fedloom.reporting.charts import participation as charts_of_participation
from fedloom.reporting.page import build_page
from fedloom.reporting.report_data import ReportData, ReportError, read_report_data
from fedloom.reporting.summary import build_tiles, write_basis, write_headline
from tests.reporting.synthetic import Made, finals, reply, write_comparison, write_run

BOTH = ("large", "small")


def run_of(path: Path, made: Made) -> ReportData:
    return read_report_data([write_run(path / "run", made)])


def compared(path: Path, arms: Mapping[str, Sequence[Made]], **terms: Any) -> ReportData:
    return read_report_data([write_comparison(path / "home", arms, **terms)])


def charts(data: ReportData) -> dict[str, Chart]:
    built = [*build_hero_charts(data), *(chart for part in build_charts(data).values() for chart in part)]
    return {chart.key: chart for chart in built if isinstance(chart, Chart)}


def missing(data: ReportData) -> dict[str, str]:
    built = [chart for part in build_charts(data).values() for chart in part]
    return {chart.title: chart.reason for chart in built if isinstance(chart, MissingChart)}


def figures(data: ReportData) -> dict[str, list[str]]:
    """Large numbers with unit and note, by the title of their tile."""
    return {tile.title: [f"{one.value} {one.unit}; {one.note}" for one in tile.figures] for tile in build_tiles(data)}


# --- the finding


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ((90, 80), "heterofl beats the best simple alternative on large devices by 10.0 points and on small devices by 10.0 points."),
        ((70, 60), "heterofl loses to the best simple alternative on large devices by 10.0 points and on small devices by 10.0 points."),
        ((90, 60), "heterofl beats the best simple alternative on large devices by 10.0 points and loses on small devices by 10.0 points."),
        ((80, 80), "heterofl beats the best simple alternative on small devices by 10.0 points and is within noise of it on large devices."),
        ((80, 70), "heterofl is within noise of the best simple alternative on every tier."),
    ],
)  # fmt: skip
def test_finding_against_controls_says_who_is_better(tmp_path: Path, first: tuple[float, float], expected: str) -> None:
    arms = {"heterofl": [finals(*first)], "small-for-all": [finals(70, 70)], "drop-the-small": [finals(80, 10)]}
    assert write_headline(compared(tmp_path, arms)) == expected


def test_finding_of_same_gain_with_few_test_examples_is_noise(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(85, 85)], "small-for-all": [finals(80, 80)]}
    sure = compared(tmp_path / "many", arms, examples=10_000)
    assert write_headline(sure).startswith("heterofl beats the best simple alternative on large")
    unsure = compared(tmp_path / "few", arms, examples=50)
    assert "heterofl is within noise of the best simple alternative on every tier." in write_headline(unsure)


def test_finding_does_not_count_all_large_as_a_simple_alternative(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(80, 80)], "small-for-all": [finals(60, 60)], "all-large": [finals(99, 99)]}
    assert write_headline(compared(tmp_path, arms)).startswith("heterofl beats the best simple alternative on large")


@pytest.mark.parametrize(
    ("fjord", "fedrolex", "expected"),
    [
        ((90, 90), (50, 50), "fjord is best on large and small devices."),
        ((90, 50), (50, 90), "fjord is best on large devices; fedrolex is best on small devices."),
        ((90, 70), (50, 50), "fjord is best on large devices; no arm is best beyond noise on small devices."),
        ((70.1, 70), (50, 50.0), "No arm is best beyond noise; fjord leads on large, heterofl on small devices."),
    ],
)  # fmt: skip
def test_finding_of_several_methods_names_the_best_by_tier(
    tmp_path: Path, fjord: tuple[float, float], fedrolex: tuple[float, float], expected: str
) -> None:
    arms = {"heterofl": [finals(70, 70)], "fjord": [finals(*fjord)], "fedrolex": [finals(*fedrolex)]}
    assert write_headline(compared(tmp_path, arms)) == expected


def test_finding_without_competitors_says_so(tmp_path: Path) -> None:
    arms = {"drop-the-small": [finals(70, 70)], "all-large": [finals(70, 70)]}
    terms = {"tiers": ["small"], "shares": {"small": 1.0}}
    assert write_headline(compared(tmp_path, arms, **terms)).startswith("No tier has two arms")


def test_page_of_comparison_in_which_all_failed_is_built(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(70, 70, status="failed")], "fjord": [finals(70, 70, status="failed")]}
    data = compared(tmp_path, arms)
    assert (
        write_headline(data)
        == "No tier has two arms that finished with a model its devices can run: there is nothing to compare."
    )
    assert data.result is not None and "fjord failed with seed 0" in data.result.verdict
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", build_page(data).html, flags=re.DOTALL))
    assert missing(data)["Rounds to target"] == "fjord, which sets the targets, did not finish"


def test_page_of_diverged_run_draws_what_is_finite(tmp_path: Path) -> None:
    made = Made({"large": [math.nan, 50.0, math.inf], "small": [1.0, math.nan, 2.0]}, metric="score", unit="")
    html = build_page(run_of(tmp_path, made)).html
    pictures = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert not re.search(r'="[^"]*\b(nan|inf)\b', pictures)


def test_finding_for_lower_is_better_turns_around(tmp_path: Path) -> None:
    for name, higher, verb in (("a", True, "loses to"), ("b", False, "beats")):
        kind = {"metric": "score", "higher_is_better": higher, "unit": ""}
        arms = {
            "heterofl": [finals(40 + seed, 40 + seed, **kind) for seed in range(5)],
            "small-for-all": [finals(50 + seed, 50 + seed, **kind) for seed in range(5)],
        }
        assert write_headline(compared(tmp_path / name, arms)).startswith(
            f"heterofl {verb} the best simple alternative"
        )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "heterofl reaches an accuracy of 80.0 % on large and 60.0 % on small devices."),
        ({"status": "running", "rounds": 9}, "So far, after 2 of 9 rounds, heterofl reaches an accuracy of"),
        ({"status": "failed", "rounds": 9}, "heterofl failed after 2 of 9 rounds; what it had measured does not count."),
        ({"status": "interrupted", "rounds": 9}, "heterofl was interrupted after 2 of 9 rounds, at an accuracy of 80.0 %"),
    ],
)  # fmt: skip
def test_headline_of_run_follows_its_status(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    assert write_headline(run_of(tmp_path, finals(80, 60, **changes))).startswith(expected)


def test_headline_before_any_evaluation_says_nothing_was_evaluated(tmp_path: Path) -> None:
    made = Made({"large": []}, status="running", rounds=3)
    assert write_headline(run_of(tmp_path, made)) == "Nothing has been evaluated yet."
    assert build_tiles(run_of(tmp_path / "again", made)) == []


def test_headline_of_personal_models_is_about_their_own_test(tmp_path: Path) -> None:
    local = {"large": [1.0, 95.0], "small": [1.0, 93.0]}
    personal = run_of(tmp_path / "a", finals(40, 30, produces="personalized", local=local))
    assert "95.0 % on large" in write_headline(personal)
    assert write_basis(personal)[0].startswith("Judged on the devices' own test examples")
    assert "On the whole test set: 40.0 % on large and 30.0 % on small devices." in write_basis(personal)
    whole = run_of(tmp_path / "b", finals(40, 30, local=local))
    assert "40.0 % on large" in write_headline(whole)
    assert write_basis(whole)[0].startswith("Judged on the whole test set")
    assert "On the devices' own test examples: 95.0 % on large and 93.0 % on small devices." in write_basis(whole)


@pytest.mark.parametrize(
    ("other", "seed", "expected"),
    [
        ({}, 1, "the runs have different seeds (0; 1)"),
        ({"data": "else"}, 0, "the runs have different data"),
        ({"tiers": ("large", "tiny"), "values": {"large": [50.0], "tiny": [40.0]}}, 0, "the runs have different tiers"),
    ],
)
def test_headline_of_unpaired_runs_claims_nothing(
    tmp_path: Path, other: dict[str, Any], seed: int, expected: str
) -> None:
    first = write_run(tmp_path / "one", Made({"large": [90.0], "small": [90.0]}))
    values = {"large": [50.0], "small": [50.0]}
    second = write_run(tmp_path / "two", Made(**{"values": values, "method": "fjord", **other}), seed)
    data = read_report_data([first, second])
    assert data.result is None
    assert write_headline(data) == f"2 arms side by side, not compared: {expected}."
    assert build_tiles(data)[0].figures[0].note == expected
    paired = write_run(tmp_path / "three", Made(values, method="fjord"))
    assert write_headline(read_report_data([first, paired])) == "heterofl is best on large and small devices."


def test_report_data_of_run_named_twice_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", finals(1, 1))
    with pytest.raises(ReportError, match="named twice"):
        read_report_data([folder, folder])


# --- what it rests on


def test_basis_states_noise_of_values_or_of_differences(tmp_path: Path) -> None:
    assert "Each value is known to about ± 0.9 points." in write_basis(run_of(tmp_path / "a", finals(80, 60)))
    few = run_of(tmp_path / "b", finals(80, 60, examples=100))
    assert "Each value is known to about ± 9.2 points." in write_basis(few)
    loose = run_of(tmp_path / "c", finals(80, 60, metric="score", unit=""))
    assert "`fedloom compare --seeds 5` shows how much results vary between seeds." in write_basis(loose)
    pair = {"heterofl": [finals(80, 60)], "small-for-all": [finals(70, 70)]}
    assert "Differences below 1.3 points can be noise." in write_basis(compared(tmp_path / "d", pair))
    kind = {"metric": "score", "unit": ""}
    pair = {"heterofl": [finals(80, 60, **kind)], "small-for-all": [finals(70, 70, **kind)]}
    line = "One seed cannot say how much of a difference is noise; `fedloom compare --seeds 5` can."
    assert line in write_basis(compared(tmp_path / "e", pair))


def test_basis_mentions_rounds_that_did_not_count(tmp_path: Path) -> None:
    void = [{"round": 1, "device": "", "code": "QUORUM", "reason": "too few"}]
    line = "1 round did not count: too few replies."
    assert line in write_basis(run_of(tmp_path / "a", finals(80, 60, events=void)))
    assert line not in write_basis(run_of(tmp_path / "b", finals(80, 60)))


# --- large numbers


def test_tiles_gain_follows_sign_and_noise(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "small-for-all": [finals(70, 70)]}
    tile = build_tiles(compared(tmp_path / "a", arms))[0]
    assert tile.title == "Gain of heterofl over the best simple alternative"
    assert [(one.value, one.tone) for one in tile.figures] == [("+20.0", "good"), ("−10.0", "bad")]
    assert tile.figures[0].note == "over small-for-all: ± 1.1, beyond noise"
    few = build_tiles(compared(tmp_path / "b", arms, examples=40))[0]
    assert [(one.value, one.tone) for one in few.figures] == [("+20.0", "good"), ("−10.0", "")]
    assert few.figures[1].note.endswith("within noise")
    level = {"heterofl": [finals(70, 70)], "small-for-all": [finals(70, 70)]}
    assert build_tiles(compared(tmp_path / "c", level))[0].figures[0].note.endswith("level")


def test_tiles_gain_is_positive_where_lower_is_better(tmp_path: Path) -> None:
    for name, higher, value in (("a", False, "+10"), ("b", True, "−10")):
        kind = {"metric": "score", "unit": "", "higher_is_better": higher}
        arms = {"heterofl": [finals(40, 40, **kind)], "small-for-all": [finals(50, 50, **kind)]}
        assert build_tiles(compared(tmp_path / name, arms))[0].figures[0].value == value


def test_tiles_without_simple_alternative_show_a_lead(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "all-large": [finals(70, 70)]}
    assert build_tiles(compared(tmp_path, arms))[0].title == "Lead of the best arm over the next"


def test_tiles_of_several_methods_show_the_lead_of_the_best(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(70, 70)], "fjord": [finals(80, 60)]}
    tile = build_tiles(compared(tmp_path, arms))[0]
    assert tile.title == "Lead of the best arm over the next"
    assert [one.note.partition(":")[0] for one in tile.figures] == ["fjord over heterofl", "heterofl over fjord"]


def test_tiles_served_bytes_and_time_follow_the_runs(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60, simulated=30.0)], "drop-the-small": [finals(70, 70, bytes_each_way=4e6)]}
    shown = figures(compared(tmp_path / "a", arms))
    assert shown["Devices served"] == ["100 %; by heterofl; drop-the-small: 50 %"]
    assert shown["Bytes per round"] == ["2 kB; heterofl; drop-the-small: 8 MB"]
    assert shown["Time"] == ["60 s; heterofl, on the fleet, simulated; 4 s on this machine"]
    arms = {"heterofl": [finals(90, 60)], "small-for-all": [finals(70, 70)]}
    shown = figures(compared(tmp_path / "b", arms))
    assert shown["Devices served"] == ["100 %; by heterofl; the same in every arm"]
    assert shown["Time"] == ["4 s; heterofl, on this machine"]
    arms = {"heterofl": [finals(90, 60)] * 2, "fjord": [finals(70, 70)] * 2, "standalone": [finals(1, 1)] * 2}
    shown = figures(compared(tmp_path / "c", arms))
    assert shown["Time"] == ["4 s; a run of heterofl, on this machine"]
    assert shown["Bytes per round"] == ["2 kB; heterofl; others: 2 kB"]
    arms["standalone"] = [finals(1, 1, bytes_each_way=1.0)] * 2
    shown = figures(compared(tmp_path / "d", arms))
    assert shown["Bytes per round"] == ["2 kB; heterofl; others: 2 B (standalone) to 2 kB (fjord)"]


def test_tiles_of_run_show_values_replies_and_bytes(tmp_path: Path) -> None:
    shown = figures(run_of(tmp_path / "a", finals(80, 60)))
    assert shown["Accuracy, whole test set"] == ["80.0 %; ± 0.8 by test size", "60.0 %; ± 1.0 by test size"]
    assert shown["Replies admitted"] == ["100 %; of 8 requests to devices"]
    assert shown["Bytes per round"] == ["2 kB; down and up, all devices; 4 kB in all"]
    lost = [reply(1, "large"), reply(1, "small", "SILENT")]
    made = finals(80, 60, participation=lost, metric="score", unit="")
    shown = figures(run_of(tmp_path / "b", made))
    assert shown["Replies admitted"] == ["50 %; of 4 requests to devices"]
    assert shown["Score, whole test set"][0] == "80 ; noise unknown"


# --- charts


def test_arms_sentence_names_the_best_for_the_worst_off_tier(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)]}
    sentence = charts(compared(tmp_path / "a", arms))["arms"].sentence
    assert (
        sentence == "Of 2 arms with a model for every device, fjord has the highest mean on the worst-off tier, 70.0 %."
    )
    arms = {"heterofl": [finals(90, 80)], "fjord": [finals(70, 70)]}
    assert "heterofl has the highest" in charts(compared(tmp_path / "b", arms))["arms"].sentence
    kind = {"metric": "score", "unit": "", "higher_is_better": False}
    arms = {"heterofl": [finals(90, 80, **kind)], "fjord": [finals(70, 70, **kind)]}
    assert "fjord has the lowest mean" in charts(compared(tmp_path / "c", arms))["arms"].sentence
    arms = {"drop-the-small": [finals(1, 1)], "all-large": [finals(1, 1)]}
    sentence = charts(compared(tmp_path / "d", arms))["arms"].sentence
    assert sentence == "None of 2 arms gives every device a model it can run."


def test_arms_note_explains_only_what_is_drawn(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "small-for-all": [finals(70, 70)], "drop-the-small": [finals(70, 70)]}
    note = charts(compared(tmp_path / "a", arms))["arms"].note
    assert note == (
        "Dashed lines: small-for-all and drop-the-small; whiskers: two standard errors, of the test set; "
        "hollow, in brackets: a model that these devices cannot run."
    )
    kind = {"metric": "score", "unit": ""}
    arms = {"heterofl": [finals(90, 60, **kind)], "fjord": [finals(70, 70, **kind)]}
    assert charts(compared(tmp_path / "b", arms))["arms"].note == ""


def on_the_same_examples(right: int, data: str = "data") -> Made:
    """A model that gets the first of a hundred test examples right, on which others agree with it."""
    correct = {tier: [at < right for at in range(100)] for tier in BOTH}
    return finals(right, right, correct=correct, data=data, examples=100)


def test_arms_and_noise_on_the_same_examples_are_compared_one_by_one(tmp_path: Path) -> None:
    arms = {"heterofl": [on_the_same_examples(72)] * 3, "fjord": [on_the_same_examples(70)] * 3}
    data = compared(tmp_path / "a", arms, examples=100)
    assert (
        "all arms saw the same examples, so differences are known better than whiskers show"
        in charts(data)["arms"].note
    )
    assert "Differences below 2.8 points can be noise." in write_basis(data)  # 200 * sqrt(0.02 * 0.98 / 99)
    arms = {"heterofl": [on_the_same_examples(72)] * 3, "fjord": [on_the_same_examples(70, "other data")] * 3}
    data = compared(tmp_path / "b", arms, examples=100)
    assert "same examples" not in charts(data)["arms"].note
    assert "Differences below 12.8 points can be noise." in write_basis(data)


def test_differences_sentence_counts_both_signs(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)], "fedrolex": [finals(90, 60.1)]}
    chart = charts(compared(tmp_path / "a", arms))["differences"]
    assert (
        chart.sentence == "Of 4 differences, heterofl is better beyond noise in 1 and worse in 1; 2 may not be claimed."
    )
    assert chart.note == "Whiskers: two standard errors, of the test set and of 1 seed. Hollow: not to be claimed."
    kind = {"metric": "score", "unit": ""}
    arms = {"heterofl": [finals(90, 60, **kind)], "fjord": [finals(70, 70, **kind)]}
    chart = charts(compared(tmp_path / "b", arms))["differences"]
    assert chart.sentence.endswith("in 0 and worse in 0; 2 may not be claimed.")
    assert chart.note == "With one seed, the noise of this metric is unknown."


def test_learning_sentences_name_highest_and_lowest(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["learning_rounds"].sentence
    assert line == "After round 2, tier large is highest with 80.0 % and tier small lowest with 60.0 %."
    line = charts(run_of(tmp_path / "b", finals(60, 80)))["learning_rounds"].sentence
    assert line == "After round 2, tier small is highest with 80.0 % and tier large lowest with 60.0 %."
    kind = {"metric": "score", "unit": "", "higher_is_better": False}
    line = charts(run_of(tmp_path / "c", finals(60, 80, **kind)))["learning_rounds"].sentence
    assert line == "After round 2, tier large is lowest with 60 and tier small highest with 80."
    kind["higher_is_better"] = None
    line = charts(run_of(tmp_path / "d", finals(60, 80, **kind)))["learning_rounds"].sentence
    assert line == "After round 2, tier large is at 60 and tier small is at 80."
    one = Made({"large": [50.0, 60.0]}, tiers=("large",))
    assert charts(run_of(tmp_path / "e", one))["learning_rounds"].sentence == "After round 2, accuracy is at 60.0 %."


def test_sentences_of_a_single_tier_do_not_name_it(tmp_path: Path) -> None:
    for name, last, target in (("a", 60.0, "60 % was reached in 2 rounds."), ("b", 50.0, "")):
        data = run_of(tmp_path / name, Made({"large": [50.0, last]}, tiers=("large",)))
        shown = charts(data)
        assert shown["learning_bytes"].sentence == f"Transferring 4 kB brought accuracy to {last:.1f} %."
        assert shown["targets"].sentence == target if target else "targets" not in shown
    arms = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)]}
    terms = {"tiers": ["large"], "shares": {"large": 1.0}}
    line = charts(compared(tmp_path / "c", arms, **terms))["learning_rounds"].sentence
    assert line == "After round 2, heterofl is highest with 90.0 % and fjord lowest with 70.0 %."


def test_other_test_is_shown_unless_it_says_the_same(tmp_path: Path) -> None:
    local = {"large": [1.0, 95.0], "small": [1.0, 93.0]}
    shown = charts(run_of(tmp_path / "a", finals(40, 30, local=local)))
    assert shown["learning_rounds_local"].title == "Accuracy on the devices' own test examples, by round"
    assert shown["learning_rounds_local"].sentence.startswith("After round 2, tier large is highest with 95.0 %")
    shown = charts(run_of(tmp_path / "b", finals(40, 30, local=local, produces="personalized")))
    assert shown["learning_rounds_global"].title == "Accuracy on the whole test set, by round"
    same = run_of(tmp_path / "c", Made(local, local=local))
    assert next(iter(charts(same))) == "learning_rounds" and "learning_rounds_local" not in charts(same)
    assert (
        missing(same)["Accuracy on the devices' own test examples, by round"]
        == "its values are those of the global test"
    )
    assert "On the devices' own test examples the values are the same." in write_basis(same)
    assert "Devices' own tests" not in figures(same)


def test_bytes_sentence_names_least_and_most(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70, bytes_each_way=5000)]}
    line = charts(compared(tmp_path / "a", arms))["learning_bytes"].sentence
    assert line.startswith("heterofl transferred least, 4 kB; fjord most, 20 kB.")
    arms = {"heterofl": [finals(90, 60, bytes_each_way=5000)], "fjord": [finals(70, 70)]}
    line = charts(compared(tmp_path / "b", arms))["learning_bytes"].sentence
    assert line.startswith("fjord transferred least, 4 kB; heterofl most, 20 kB.")
    single = charts(run_of(tmp_path / "c", finals(80, 60)))["learning_bytes"].sentence
    assert single == "Transferring 4 kB brought large to 80.0 % and small to 60.0 %."
    silent = run_of(tmp_path / "d", finals(80, 60, bytes_each_way=0.0))
    assert missing(silent)["Accuracy against transferred bytes"] == "no bytes were transferred"


def test_targets_sentence_follows_who_is_faster(tmp_path: Path) -> None:
    slow = Made({tier: [10.0, 20.0, 30.0, 80.0] for tier in BOTH})
    fast = Made({tier: [80.0, 80.0, 80.0, 80.0] for tier in BOTH})
    line = charts(compared(tmp_path / "a", {"heterofl": [fast], "fjord": [slow]}))["targets"].sentence
    assert line.startswith("On tier large the fastest other arm takes 4.0 times the rounds of heterofl")
    line = charts(compared(tmp_path / "b", {"heterofl": [slow], "fjord": [fast]}))["targets"].sentence
    assert line.startswith("On tier large the fastest other arm takes 0.2 times the rounds of heterofl")
    both = charts(run_of(tmp_path / "c", fast.__class__({"large": [20.0, 60.0], "small": [20.0, 60.0]})))["targets"]
    assert both.sentence.startswith("All tiers reach 60 %; ")
    apart = charts(run_of(tmp_path / "d", Made({"large": [20.0, 60.0], "small": [1.0, 2.0]})))["targets"]
    assert "small reached none of them" in apart.sentence and not apart.sentence.startswith("All tiers")


def test_targets_sentence_explains_pale_bars_only_where_there_are(tmp_path: Path) -> None:
    never, always = (Made({tier: [1.0, last] for tier in BOTH}) for last in (20.0, 80.0))
    missed = charts(compared(tmp_path / "a", {"heterofl": [never], "fjord": [always]}))["targets"].sentence
    assert missed.endswith("; pale bars did not reach it.")
    reached = charts(compared(tmp_path / "b", {"heterofl": [always], "fjord": [always]}))["targets"].sentence
    assert reached.endswith("less 1 point.")


def test_entries_sentence_names_lowest_and_highest(tmp_path: Path) -> None:
    for name, (cats, dogs), expected in (
        ("a", (30.0, 60.0), "from 30.0 % (cat) to 60.0 % (dog)"),
        ("b", (70.0, 40.0), "from 40.0 % (dog) to 70.0 % (cat)"),
    ):
        others = {"recall[cat]": dict.fromkeys(BOTH, cats), "recall[dog]": dict.fromkeys(BOTH, dogs)}
        line = charts(run_of(tmp_path / name, finals(80, 60, others=others)))["entries_recall"].sentence
        assert (
            line == f"Lowest and highest final value: tier large {expected}; tier small {expected}. Higher is better."
        )


def test_reason_of_missing_metric_names_the_test(tmp_path: Path) -> None:
    known = run_of(tmp_path / "a", finals(80, 60, others={"recall": dict.fromkeys(BOTH, 50.0)}))
    assert "Recall by round" not in missing(known)
    unknown = run_of(tmp_path / "b", finals(80, 60, others={"recall": {}}))
    assert missing(unknown)["Recall by round"] == "recall has no value on the global test"


def test_devices_sentence_follows_the_worst_tenth(tmp_path: Path) -> None:
    def with_worst(value: float) -> Made:
        return finals(80, 60, devices={"d0": 90.0, "d1": 80.0, "d2": 70.0, "d3": value})

    line = charts(run_of(tmp_path / "a", with_worst(10.0)))["devices"].sentence
    assert line == "Mean accuracy is 62.5 %, and 10.0 % for the worst tenth of devices; 4 devices from 10 to 90 %."
    line = charts(run_of(tmp_path / "b", with_worst(60.0)))["devices"].sentence
    assert line == "Mean accuracy is 75.0 %, and 60.0 % for the worst tenth of devices; 4 devices from 60 to 90 %."
    for name, first, second, best in (("c", 10.0, 20.0, "fjord"), ("d", 20.0, 10.0, "heterofl")):
        arms = {"heterofl": [with_worst(first)], "fjord": [with_worst(second)]}
        line = charts(compared(tmp_path / name, arms))["devices"].sentence
        assert line.startswith(f"The worst tenth of devices is best off with {best}, with a mean accuracy of 20.0 %")


def test_devices_chart_omits_devices_that_cannot_run_the_model(tmp_path: Path) -> None:
    own = {"d0": 90.0, "d1": 80.0, "d2": 70.0, "d3": 60.0}
    arms = {"heterofl": [finals(80, 60, devices=own)], "drop-the-small": [finals(80, 60, devices=own)]}
    records = charts(compared(tmp_path, arms))["devices"].records
    assert [row[2] for row in records if row[0] == "heterofl"] == list(own)
    assert [row[2] for row in records if row[0] == "drop-the-small"] == ["d0", "d1"]


@pytest.mark.parametrize(
    ("shared", "expected"),
    [
        ((60, 60, 60, 60), "With heterofl no device of 4 is worse off than alone; the mean device gains 10.0 points."),
        ((60, 60, 60, 40), "With heterofl 1 of 4 devices (25 %) is worse off than alone; the mean device gains 5.0 points."),
        ((40, 40, 60, 40), "With heterofl 3 of 4 devices (75 %) are worse off than alone; the mean device loses 5.0 points."),
        ((50, 50, 50, 50), "With heterofl no device of 4 is worse off than alone; the mean device gains nothing."),
    ],
)  # fmt: skip
def test_alone_sentence_counts_negative_transfer(tmp_path: Path, shared: tuple[float, ...], expected: str) -> None:
    names = ("d0", "d1", "d2", "d3")
    first = finals(80, 60, devices=dict(zip(names, shared, strict=True)))
    arms = {"heterofl": [first], "standalone": [finals(50, 50, devices=dict.fromkeys(names, 50.0))]}
    chart = charts(compared(tmp_path, arms))["alone"]
    assert chart.sentence == expected
    assert sum(row[4] for row in chart.records) == sum(value < 50 for value in shared)


def test_alone_chart_without_standalone_says_why(tmp_path: Path) -> None:
    reason = missing(run_of(tmp_path, finals(80, 60)))["Devices worse off than alone"]
    assert reason == "there is no arm in which devices train alone (control standalone)"


def test_fine_tuning_sentence_counts_gains(tmp_path: Path) -> None:
    helps = finals(80, 60, fine_tuned={"d0": (50.0, 60.0), "d2": (50.0, 60.0)})
    line = charts(run_of(tmp_path / "a", helps))["personalized"].sentence
    assert "tier large from 50.0 % to 60.0 % (1 of 1 device gained)" in line and line.endswith(
        "above the line it helps."
    )
    hurts = finals(80, 60, fine_tuned={"d0": (60.0, 50.0), "d2": (60.0, 50.0)})
    line = charts(run_of(tmp_path / "b", hurts))["personalized"].sentence
    assert "tier large from 60.0 % to 50.0 % (0 of 1 device gained)" in line


def test_partition_sentence_follows_the_counts(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["partition"].sentence
    assert (
        line
        == "A device holds 10 examples of 1 to 2 classes; its most frequent class makes up 72 % of them on average."
    )
    even = finals(80, 60, counts=((5, 5), (9, 9), (5, 5), (4, 4)))
    line = charts(run_of(tmp_path / "b", even))["partition"].sentence
    assert line.startswith("A device holds 8 to 18 examples of 2 classes; its most frequent class makes up 50 %")


def test_participation_sentence_says_all_or_what_was_lost(tmp_path: Path) -> None:
    everyone = charts(run_of(tmp_path / "a", finals(80, 60)))["participation"]
    assert everyone.sentence == "All 4 devices replied in all 2 rounds."
    some = [reply(1, "large"), reply(1, "small", "SILENT"), reply(2, "large"), reply(2, "small", "SHAPE")]
    line = charts(run_of(tmp_path / "b", finals(80, 60, participation=some)))["participation"].sentence
    assert line == "4 of 8 requests led to an admitted reply (2 silent and 2 refused); fewest came from device d2: 0."
    sampled = [reply(1, "large"), reply(2, "small")]
    line = charts(run_of(tmp_path / "c", finals(80, 60, participation=sampled)))["participation"].sentence
    assert line == "4 of 4 requests led to an admitted reply; fewest came from device d0: 1."


def test_participation_note_explains_blanks_only_where_there_are(tmp_path: Path) -> None:
    assert charts(run_of(tmp_path / "a", finals(80, 60)))["participation"].note == ""
    sampled = finals(80, 60, participation=[reply(1, "large"), reply(2, "small")])
    assert charts(run_of(tmp_path / "b", sampled))["participation"].note == "Blank: not sampled."


def test_maps_of_many_devices_say_how_many_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = charts(run_of(tmp_path / "a", finals(80, 60)))
    for module in (charts_of_devices, charts_of_participation):
        monkeypatch.setattr(module, "MAX_DEVICES", 2)
    many = charts(run_of(tmp_path / "b", finals(80, 60)))
    assert "shown" not in few["participation"].note and "shown" not in few["partition"].sentence
    assert many["participation"].note == "One device in 2 is shown."
    assert many["partition"].sentence.endswith(" One device in 2 is shown.")


def test_coverage_sentence_says_enough_or_too_few(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["coverage"].sentence
    assert line.endswith("Every region had enough updates in every round.")
    some = [reply(1, "large"), reply(1, "small"), reply(2, "large", "SILENT"), reply(2, "small")]
    line = charts(run_of(tmp_path / "b", finals(80, 60, participation=some)))["coverage"].sentence
    assert line.startswith("Lowest coverage: 0 updates for weights held only by tier large, in round 2. ")
    assert line.endswith("Weights held only by tier large had too few updates for 1 round in a row.")


def test_refusals_sentence_counts_codes(tmp_path: Path) -> None:
    assert missing(run_of(tmp_path / "a", finals(80, 60)))["Lost and refused replies"] == "every reply was admitted"
    events = [{"round": 1, "device": "d0", "code": "SHAPE", "reason": ""}, {"round": 2, "device": "d0", "code": "LATE"}]
    line = charts(run_of(tmp_path / "b", finals(80, 60, events=events)))["refusals"].sentence
    assert line == "Over 2 rounds: 1 SHAPE and 1 LATE."


def test_norms_sentence_follows_the_norms(tmp_path: Path) -> None:
    some = [reply(1, "large", norm=4.0), reply(2, "large", norm=1.0)]
    line = charts(run_of(tmp_path / "a", finals(80, 60, participation=some)))["norms"].sentence
    assert "large from 4 to 1; the largest was 8, of a large device in round 1." in line
    some = [reply(1, "large", norm=1.0), reply(2, "large", norm=4.0)]
    line = charts(run_of(tmp_path / "b", finals(80, 60, participation=some)))["norms"].sentence
    assert "large from 1 to 4; the largest was 8, of a large device in round 2." in line


def test_uploads_sentence_warns_of_features_and_states_epsilon(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["uploads"].sentence
    assert line == "With heterofl, devices upload weights: 400 B of weights in total."
    risky = finals(80, 60, features="extractor", uploads="features", epsilon=1.5)
    line = charts(run_of(tmp_path / "b", risky))["uploads"].sentence
    assert line.endswith(
        "This includes features of the extractor, from which inputs can be reconstructed. Differential privacy: "
        "epsilon 1.50 so far."
    )


def test_time_sentence_follows_the_clock(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["time"].sentence
    assert line.startswith("2 rounds took 4.0 s on this machine: 75 % training, 25 % evaluation and 0 % saving;")
    line = charts(run_of(tmp_path / "b", finals(80, 60, simulated=50.0, seconds=1.0)))["time"].sentence
    assert line.startswith("2 rounds took 2.0 s") and line.endswith(
        "On the fleet's devices the rounds would take 100 s."
    )
    arms = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)]}
    line = charts(compared(tmp_path / "c", arms))["time"].sentence
    assert line.startswith("Shares of the time: 75 % training") and "side by side" in line


def test_pareto_sentence_follows_the_values(tmp_path: Path) -> None:
    line = charts(run_of(tmp_path / "a", finals(80, 60)))["pareto"].sentence
    assert line == (
        "The smallest takes 5,000 and reaches 60.0 %, the largest takes 10,000 and reaches 80.0 %; 2 of 2 models are on "
        "the Pareto front. `fedloom subnet` evaluates subnets between them."
    )
    nets = [{"examples": 10, "parameters": 7, "macs": 7000, "accuracy": 90.0}]
    line = charts(run_of(tmp_path / "b", finals(60, 80, subnets=nets)))["pareto"].sentence
    assert "2 of 3 models are on the Pareto front." in line and "fedloom subnet" not in line


def test_cka_sentence_gives_the_similarity(tmp_path: Path) -> None:
    def similar(value: float) -> Made:
        same = {"layers": ["f"], "layers_against": ["f"], "against": "large"}
        return finals(
            80, 60, cka=[{"tier": "large", "cka": [[1.0]], **same}, {"tier": "small", "cka": [[value]], **same}]
        )

    for name, value in (("a", 0.9), ("b", 0.1)):
        line = charts(run_of(tmp_path / name, similar(value)))["cka"].sentence
        assert line == f"Similarity to large in the last layer (f), where 1 means identical: small {value:.2f}."
    only = [{"tier": "large", "cka": [[1.0]], "layers": ["f"], "layers_against": ["f"], "against": "large"}]
    line = charts(run_of(tmp_path / "c", finals(80, 60, cka=only)))["cka"].sentence
    assert line.startswith("There is no other tier to compare with large")


def test_verdict_of_runs_of_unequal_length_says_what_counts(tmp_path: Path) -> None:
    short, long = ({tier: [50.0] * rounds for tier in BOTH} for rounds in (2, 3))
    data = compared(tmp_path / "a", {"heterofl": [Made(short)], "fjord": [Made(long)]})
    assert data.result is not None and "at equal rounds: fjord counts up to round 2 of 3" in data.result.verdict
    data = compared(tmp_path / "b", {"heterofl": [Made(short)], "fjord": [Made(short)]})
    assert data.result is not None and not any("at equal rounds" in line for line in data.result.verdict)


# --- what is missing, and why


def without(path: Path, *names: str) -> ReportData:
    """A run that lacks some of its files."""
    folder = write_run(path / "run", finals(80, 60))
    for name in names:
        (folder / name).write_text("") if name.endswith("l") else (folder / name).unlink()
    return read_report_data([folder])


def test_reasons_of_missing_charts_follow_what_the_run_recorded(tmp_path: Path) -> None:
    complete = charts(run_of(tmp_path / "a", finals(80, 60)))
    assert {"participation", "coverage", "partition", "uploads", "time", "norms", "pareto"} <= set(complete)
    bare = missing(without(tmp_path / "b", "fleet.json", "participation.jsonl", "timings.jsonl"))
    assert bare["Participation"] == "no device has been sampled yet, or the run does not record participation"
    assert bare["Coverage by region of the model"] == "devices upload nothing"
    assert bare["Data by device"] == "the run does not record which data its devices hold"
    assert bare["Uploaded data"] == "the run does not record uploads"
    assert bare["Time and memory"] == "the run does not record them"
    assert bare["Norms of updates"] == "devices upload no weights"
    assert bare["Accuracy against multiply-adds"] == (
        "costs of the models are unknown, or nothing has been evaluated yet"
    )
    silent = [reply(1, "large", "SILENT"), reply(1, "small", "SILENT")]
    assert (
        missing(run_of(tmp_path / "c", finals(80, 60, participation=silent)))["Uploaded data"]
        == "devices upload nothing"
    )


def test_reason_of_missing_norms_with_privacy_is_the_guarantee(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finals(80, 60, participation=[{**reply(1, "large"), "norms": None}]))
    assert missing(read_report_data([folder]))["Norms of updates"] == "devices upload no weights"
    file = folder / "recipe.toml"
    file.write_text(file.read_text() + "\n[privacy]\nclip = 1.0\n")
    reason = missing(read_report_data([folder]))["Norms of updates"]
    assert reason == "norms are not recorded: they would void the DP guarantee"


def test_reason_of_missing_similarity_follows_the_status(tmp_path: Path) -> None:
    title = "Similarity of the tiers' models (CKA)"
    running = run_of(tmp_path / "a", finals(80, 60, status="running"))
    assert missing(running)[title] == "it is computed at the end of the run"
    ended = run_of(tmp_path / "b", finals(80, 60))
    assert missing(ended)[title] == "no model of the largest tier is available"


def test_reason_of_missing_targets_follows_the_metric(tmp_path: Path) -> None:
    def reason(name: str, made: Made) -> str:
        return missing(run_of(tmp_path / name, made)).get("Rounds to target", "")

    assert reason("a", finals(80, 60)) == ""
    assert reason("b", Made({"large": [50.2, 50.3], "small": [50.2, 50.3]})) == "accuracy has hardly changed yet"
    kind = {"metric": "perplexity", "unit": "", "higher_is_better": False}
    ending = "has targets only in a comparison, where a baseline sets them"
    assert reason("c", finals(80, 60, **kind)) == f"a perplexity {ending}"
    assert reason("d", finals(80, 60, metric="score", unit="")) == f"score {ending}"


def test_reason_without_result_follows_what_is_missing(tmp_path: Path) -> None:
    unfinished = {"heterofl": [finals(90, 60)], "fjord": [Made({"large": [], "small": []}, status="running", rounds=2)]}
    assert compared(tmp_path / "a", unfinished).missing_result_reason == "not all arms have been evaluated yet"
    kind = {"metric": "score", "unit": "", "higher_is_better": None}
    undirected = compared(tmp_path / "b", {"heterofl": [finals(9, 6, **kind)], "fjord": [finals(7, 7, **kind)]})
    assert "score" in undirected.missing_result_reason and undirected.result is None
    assert missing(undirected)["Devices worse off than alone"].startswith(
        "there is no arm in which devices train alone"
    )
    kept = {"heterofl": [finals(9, 6, **kind)], "standalone": [finals(7, 7, **kind)]}
    reason = missing(compared(tmp_path / "c", kept))["Devices worse off than alone"]
    assert reason == "score does not say whether higher is better"
    kept = {"heterofl": [finals(9, 6)], "standalone": [finals(7, 7)]}
    reason = missing(compared(tmp_path / "d", kept))["Devices worse off than alone"]
    assert reason == "devices were not evaluated one by one (evaluation.per_device)"


def test_differences_without_a_model_to_compare_say_so(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(70, 70)], "drop-the-small": [finals(70, 70)]}
    terms = {"tiers": ["small"], "shares": {"small": 1.0}}
    reason = missing(compared(tmp_path / "a", arms, **terms))["Paired differences"]
    assert reason == "no other arm gives these devices a model they can run"
    assert "Paired differences" not in missing(compared(tmp_path / "b", arms))


def test_reason_of_missing_second_test_names_it(tmp_path: Path) -> None:
    reason = missing(run_of(tmp_path, finals(80, 60)))["Accuracy on the devices' own test examples, by round"]
    assert reason == "there is no local test"


# --- notes and other sentences of the page


def test_notes_explain_bands_only_with_several_seeds(tmp_path: Path) -> None:
    one = {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)]}
    assert charts(compared(tmp_path / "a", one))["learning_rounds"].note == ""
    two = {"heterofl": [finals(90, 60), finals(80, 50)], "fjord": [finals(70, 70), finals(60, 60)]}
    note = charts(compared(tmp_path / "b", two))["learning_rounds"].note
    assert note == "Bands: one standard deviation over seeds."
    assert charts(run_of(tmp_path / "c", finals(80, 60)))["norms"].note == "Bands: from the smallest to the largest."


def test_headline_of_running_comparison_says_so_far(tmp_path: Path) -> None:
    arms = {"heterofl": [finals(90, 80)], "small-for-all": [finals(70, 70, status="running", rounds=4)]}
    line = write_headline(compared(tmp_path / "a", arms))
    assert line.startswith("So far, after 4 of 6 rounds: heterofl beats the best simple alternative")
    arms["small-for-all"] = [finals(70, 70)]
    assert write_headline(compared(tmp_path / "b", arms)).startswith("heterofl beats")


def test_devices_sentence_of_undirected_metric_claims_nothing(tmp_path: Path) -> None:
    kind = {"metric": "score", "unit": "", "devices": {"d0": 1.0, "d1": 3.0}}
    line = charts(run_of(tmp_path / "a", finals(9, 6, higher_is_better=None, **kind)))["devices"].sentence
    assert line == "Mean score over devices: heterofl 2, 2 devices from 1 to 3."
    line = charts(run_of(tmp_path / "b", finals(9, 6, higher_is_better=False, **kind)))["devices"].sentence
    assert line == "Mean score is 2, and 3 for the worst tenth of devices; 2 devices from 1 to 3."


def test_repeat_section_names_own_code_and_methods_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finals(80, 60))
    assert "It uses your own code" not in build_page(read_report_data([folder])).html
    fleet = json.loads((folder / "fleet.json").read_text())
    (folder / "fleet.json").write_text(json.dumps({**fleet, "own_names": ["mynet"]}))
    html = build_page(read_report_data([folder])).html
    assert "It uses your own code for: mynet." in html and "--with YOUR_FILE.py" in html
    home = write_comparison(tmp_path / "home", {"heterofl": [finals(90, 60)], "fjord": [finals(70, 70)]})
    assert "Left out, because" not in build_page(read_report_data([home])).html
    described = json.loads((home / "comparison.json").read_text())
    (home / "comparison.json").write_text(json.dumps({**described, "left_out": {"fedgkt": "it needs a CNN"}}))
    html = build_page(read_report_data([home])).html
    assert "Left out, because these methods do not fit the recipe:" in html and "fedgkt: it needs a CNN" in html

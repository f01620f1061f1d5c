"""The search for settings on the page: every sentence has a case in which it must say the opposite."""
# ruff: noqa: E501 - a sentence of the page stands on one line, as a reader sees it

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.api.run import build_report
from fedloom.reporting.charts import Chart, build_charts
from fedloom.reporting.charts.drawing import Dot, Line
from fedloom.reporting.charts.search import draw_settings, draw_stages
from fedloom.reporting.gallery import build_gallery
from fedloom.reporting.page import build_page
from fedloom.reporting.report_data import ReportData, ReportError, read_report_data
from fedloom.reporting.search import search_sentence, summarize_search, write_budget, write_choices, write_stages
from fedloom.reporting.search_page import (
    build_search_page,
    build_search_tiles,
    read_search_report,
    write_search_headline,
    write_search_progress,
)
from fedloom.runs.resume import list_runs
from tests.reporting.synthetic import finals, searched, write_comparison, write_search

HALVED = ({1: 10.0}, {1: 30.0, 3: 40.0, 9: 60.0}, {1: 20.0, 3: 35.0})  # the recipe itself stopped early
FIRST_BEST = ({1: 30.0, 3: 40.0, 9: 60.0}, {1: 10.0}, {1: 20.0, 3: 35.0})
FULL = ({9: 50.0}, {9: 60.0})


def tuned(path: Path, searches: Sequence[Mapping[str, Any]]) -> ReportData:
    """A comparison of the arms that were searched."""
    home = write_comparison(path / "home", {search["arm"]: [finals(80, 60)] for search in searches})
    write_search(home / "tune", searches)
    return read_report_data([home])


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        (HALVED, "heterofl scored best with lr 0.2: 60.0 % (the recipe itself: not run to the end)."),
        (FULL, "heterofl scored best with lr 0.2: 60.0 % (the recipe itself: 50.0 %)."),
        (({1: None}, {1: 5.0, 9: 60.0}), "heterofl scored best with lr 0.2: 60.0 % (the recipe itself: failed)."),
        (FIRST_BEST, "heterofl scored best with the recipe's own settings: 60.0 %."),
        (({1: 10.0}, {1: 20.0}), "Nothing is chosen for heterofl."),
    ],
)
def test_choice_sentence_follows_the_scores(trials: Sequence[Mapping[int, float | None]], expected: str) -> None:
    assert write_choices([searched("heterofl", trials)]) == expected


def test_choice_sentence_of_lower_is_better_follows_the_lowest() -> None:
    kind = {"metric": "perplexity", "unit": "", "higher_is_better": False}
    assert write_choices([searched("heterofl", FULL, **kind)]).startswith("heterofl scored best with the recipe's own")
    assert write_choices([searched("heterofl", ({9: 60.0}, {9: 50.0}), **kind)]).startswith(
        "heterofl scored best with lr"
    )


def test_choices_sentence_of_several_arms_sorts_them_by_outcome() -> None:
    both = [searched("heterofl", HALVED), searched("fjord", FIRST_BEST), searched("fedrolex", ({1: 1.0},))]
    assert write_choices(both) == (
        "Other settings than the recipe's scored best for heterofl; the recipe itself scored best for fjord; nothing is "
        "chosen for fedrolex."
    )
    same = [searched("heterofl", FIRST_BEST), searched("fjord", FIRST_BEST)]
    assert write_choices(same) == "The recipe itself scored best for heterofl and fjord."


def test_budget_sentence_says_whether_arms_had_the_same() -> None:
    ending = "Trials were scored by accuracy on 100 validation examples; the test set was not used."
    one, other = searched("heterofl", HALVED), searched("fjord", HALVED)
    assert write_budget([one]) == f"The search had 3 trials of at most 9 rounds. {ending}"
    same = f"Every arm had the same budget: 3 trials of at most 9 rounds. {ending}"
    assert write_budget([one, other]) == same
    assert "3 trials of at most 9 rounds with 2 seeds each." in write_budget(
        [searched("heterofl", HALVED, seeds=[0, 1])]
    )
    shorter = searched("fjord", ({2: 1.0},), rounds=2, equal="bytes")
    assert write_budget([{**one, "equal": "bytes"}, shorter]) == (
        "Arms had unequal numbers of rounds, so that no trial transfers more than one of heterofl: heterofl 3 trials of at "
        f"most 9 rounds and fjord 1 trial of at most 2 rounds. {ending}"
    )
    assert write_budget([one, shorter]).startswith("Arms had unequal numbers of rounds: heterofl")


def test_stages_sentence_counts_trials_after_each_stage() -> None:
    halved = searched("heterofl", HALVED)
    assert write_stages([halved]) == "3 trials were scored after 1 round, 2 after 3 rounds and 1 after 9 rounds."
    assert write_stages([searched("heterofl", FULL)]) == "All 2 trials ran all 9 rounds."
    assert write_stages([searched("heterofl", ({9: 50.0},))]) == "The only trial ran all 9 rounds."
    assert write_stages([searched("heterofl", ({1: 5.0}, {}))]) == "1 trial was scored after 1 round."
    assert write_stages([searched("heterofl", ({}, {}))]) == "No trial was scored yet."
    assert write_stages([halved, searched("fjord", FIRST_BEST)]).startswith(
        "In every arm, 3 trials were scored after 1"
    )
    assert write_stages([halved, searched("fjord", FULL)]) == (
        "heterofl: 3 trials were scored after 1 round, 2 after 3 rounds and 1 after 9 rounds; fjord: all 2 trials ran all "
        "9 rounds."
    )


def test_search_sentence_says_what_was_chosen_or_that_nothing_was() -> None:
    begun = "heterofl: 3 trials of training.optimizer.lr on 100 validation examples"
    assert search_sentence(searched("heterofl", HALVED)) == f"{begun}; chosen training.optimizer.lr 0.2 (60.0 %)"
    assert search_sentence(searched("heterofl", ({1: 1.0},) * 3)) == f"{begun}; nothing chosen yet"


def test_stages_chart_draws_a_line_per_trial_that_went_on_and_marks_the_chosen() -> None:
    chart = draw_stages([searched("heterofl", HALVED), searched("small-for-all", FIRST_BEST)])
    assert [panel.arm for panel in chart.panels] == ["heterofl", "small-for-all"]
    lines = [mark for mark in chart.panels[0].marks if isinstance(mark, Line)]
    assert [(line.label, line.labeled, list(line.y)) for line in lines] == [
        ("trial 2", False, [20.0, 35.0]), ("trial 1", True, [30.0, 40.0, 60.0]),
    ]  # fmt: skip
    assert sum(isinstance(mark, Dot) for mark in chart.panels[0].marks) == 6
    assert len(chart.records) == 12 and [row[:3] for row in chart.records if row[4]][:1] == [("heterofl", 1, 1)]
    assert len({panel.y for panel in chart.panels}) == 1  # one scale


def test_stages_chart_before_any_score_is_empty_but_drawn(tmp_path: Path) -> None:
    home = write_search(tmp_path / "home", [searched("heterofl", ({},))], status="running")
    page = build_search_page(read_search_report(home))
    assert "nan" not in "".join(re.findall(r"<svg.*?</svg>", page.html, flags=re.DOTALL))
    assert page.is_running and page.progress == "1 of 1 trial begun: No trial has been scored yet."


def test_settings_chart_has_numbers_or_names_below_and_hollow_points_for_trials_that_stopped() -> None:
    settings = [
        {"training.optimizer.lr": lr, "training.lr_schedule": {"kind": kind}}
        for lr, kind in ((0.1, "cosine"), (0.2, "constant"), (0.4, "cosine"))
    ]
    space = {"training.optimizer.lr": "0.01..1.0:log", "training.lr_schedule": "constant,cosine"}
    rate, schedule = draw_settings([searched("heterofl", HALVED, settings, space=space)]).panels
    assert rate.x.log and not rate.x.names and rate.title == "lr"
    assert list(schedule.x.names) == ["cosine", "constant"] and not schedule.x.log
    dots = [mark for mark in rate.marks if isinstance(mark, Dot)]
    assert [(dot.x, dot.hollow, dot.size > 6) for dot in dots] == [
        (0.1, True, False), (0.2, False, True), (0.4, True, False),
    ]  # fmt: skip
    assert dots[1].tip == "heterofl, trial 1 with lr 0.2 and lr_schedule constant: 60.0 % after 9 rounds"


def test_page_of_tuned_comparison_has_a_section_on_the_search_and_others_have_not(tmp_path: Path) -> None:
    searches = [searched("heterofl", HALVED), searched("fjord", FIRST_BEST)]
    data = tuned(tmp_path / "a", searches)
    page = build_page(data)
    section = page.html.partition('id="section-search"')[2].partition('id="section-repeat"')[0]
    assert "Every arm had the same budget: 3 trials of at most 9 rounds." in section
    assert section.count("<tr data-arm=") == 2 and "lr 0.2" in section and "not run to the end" in section
    assert 'id="search_stages"' in section and 'id="search_settings"' in section
    assert {"search_stages.csv", "search_settings.csv"} <= set(page.csvs)
    plain = build_page(read_report_data([write_comparison(tmp_path / "b", {"heterofl": [finals(80, 60)]})]))
    assert 'id="section-search"' not in plain.html
    assert (
        "Trials by stage: settings were not searched; <code>fedloom compare --tune N</code> searches them."
        in plain.html
    )


def test_report_data_of_tuned_comparison_keeps_the_order_of_arms(tmp_path: Path) -> None:
    data = tuned(tmp_path, [searched("heterofl", HALVED), searched("fjord", HALVED)])
    assert [search["arm"] for search in data.searches] == ["heterofl", "fjord"]
    charts = {chart.key: chart for chart in build_charts(data)["search"] if isinstance(chart, Chart)}
    assert [panel.arm for panel in charts["search_stages"].panels] == ["heterofl", "fjord"]


def test_page_of_a_search_leads_with_the_choice(tmp_path: Path) -> None:
    home = write_search(tmp_path / "home", [searched("heterofl", HALVED)])
    page = build_report([home])
    assert write_search_headline(read_search_report(home)) in page.html.replace("\u00a0", " ")
    assert not page.is_running and f"fedloom run {home / 'heterofl' / 'chosen.toml'}" in page.html
    going = write_search(tmp_path / "going", [{**searched("heterofl", HALVED), "trials": 8}], status="running")
    report = read_search_report(going)
    assert write_search_headline(report).startswith("So far: heterofl scored best with lr 0.2")
    assert write_search_progress(report) == "3 of 8 trials begun"
    page = build_report([going])
    assert (
        page.is_running and "In progress: 3 of 8 trials begun." in page.html and f"fedloom resume {going}" in page.html
    )


def test_tiles_of_a_search_show_scores_of_few_arms(tmp_path: Path) -> None:
    home = write_search(tmp_path / "a", [searched("heterofl", HALVED), searched("fjord", FULL)])
    first, trials, examples, moved = build_search_tiles(read_search_report(home))
    assert [(one.of, one.value, one.note) for one in first.figures] == [
        ("heterofl", "60.0", "trial 1; the recipe itself: not run to the end"), ("fjord", "60.0", "trial 1; the recipe itself: 50.0 %"),
    ]  # fmt: skip
    assert (trials.figures[0].value, examples.figures[0].value, moved.figures[0].value) == ("5", "100", "5")
    many = write_search(tmp_path / "b", [searched(f"arm{at}", HALVED) for at in range(5)])
    assert build_search_tiles(read_search_report(many))[0].title == "Trials"


def test_search_that_has_not_begun_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"no trial of .* has begun yet"):
        build_report([write_search(tmp_path / "home", [])])


def test_gallery_shows_a_search(tmp_path: Path) -> None:
    write_search(tmp_path / "found", [searched("heterofl", HALVED)])
    html = build_gallery(tmp_path, list_runs(tmp_path)).replace("\u00a0", " ")
    assert "heterofl scored best with lr 0.2: 60.0 % (the recipe itself: not run to the end)." in html
    assert "<span>search</span>" in html and html.count("<svg") == 1


def test_summary_counts_budget_and_bytes() -> None:
    summary = summarize_search(searched("heterofl", HALVED, seeds=[0, 1]))
    assert (summary.trials, summary.rounds, summary.seeds, summary.bytes) == (3, 9, 2, 3000.0)
    assert (summary.chosen_trial, summary.settings, summary.score, summary.own) == (
        1,
        "lr 0.2",
        60.0,
        "not run to the end",
    )

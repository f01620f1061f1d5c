"""Drawing: scales, ticks, labels that do not overlap, and marks that carry what the page needs."""

import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.reporting.charts.drawing import (
    Axis,
    Bar,
    Cells,
    Dot,
    Line,
    Look,
    Panel,
    ReferenceLine,
    Scale,
    log_ticks,
    nice_ticks,
    render_svg,
    spread_labels,
)

LOOK = Look("--a0", arm="one", tier="large")
FINITE = st.floats(-1e6, 1e6, allow_nan=False)


@given(FINITE, st.floats(1e-6, 1e6), st.booleans())
def test_nice_ticks_lie_inside_and_are_few(low: float, width: float, integer: bool) -> None:
    high = low + width
    ticks = nice_ticks(low, high, 6, integer)
    assert len(ticks) <= 8
    slack = 1e-6 * max(abs(low), abs(high), 1.0)
    assert all(low - slack <= tick <= high + slack for tick in ticks)
    assert not integer or all(tick == round(tick) for tick in ticks)


@given(st.floats(1e-3, 1e9), st.floats(1.5, 1e6))
def test_log_ticks_lie_inside(low: float, times: float) -> None:
    assert all(low <= tick <= low * times * 1.001 for tick in log_ticks(low, low * times))


@given(st.lists(st.floats(0, 300), max_size=15))
def test_spread_labels_never_overlap_and_keep_their_order(wanted: list[float]) -> None:
    places = spread_labels(wanted, 14.0, 0.0, 300.0)
    ordered = sorted(range(len(wanted)), key=lambda at: wanted[at])
    gaps = [places[two] - places[one] for one, two in itertools.pairwise(ordered)]
    assert all(gap >= 14.0 - 1e-9 for gap in gaps)
    assert all(-1e-9 <= place <= 300.0 + 1e-9 for place in places)


def test_spread_labels_far_apart_stay_where_they_are() -> None:
    assert spread_labels([50.0, 10.0, 100.0], 14.0, 0.0, 300.0) == [50.0, 10.0, 100.0]


def test_scale_maps_ends_and_logarithms() -> None:
    assert Scale(0, 10, 100, 200)(5) == 150
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)


def svg(*marks: object, x: Axis | None = None, y: Axis | None = None) -> str:
    return render_svg(Panel("a text & more", list(marks), x or Axis(), y or Axis()), "key")  # type: ignore[arg-type]


def test_render_svg_has_a_text_alternative_and_owners() -> None:
    drawn = svg(Line("one", [1, 2], [3.0, 4.0], LOOK, format="{:.1f} %".format), Dot(1, 3, LOOK, "a tip"))
    assert 'aria-labelledby="key-alt"><title id="key-alt">a text &amp; more</title>' in drawn
    assert drawn.count('data-arm="one" data-tier="large"') == 3  # the curve, its label, the point
    assert 'data-x="1 2" data-v="3.0 %|4.0 %"' in drawn and "<title>a tip</title>" in drawn
    assert "nan" not in drawn


def test_render_svg_escapes_names() -> None:
    drawn = svg(Line('<b>"x"', [1, 2], [3.0, 4.0], Look("--a0", arm='"><script>')))
    assert "<b>" not in drawn and "<script>" not in drawn


def test_render_svg_omits_what_is_not_a_number() -> None:
    drawn = svg(Dot(math.nan, 1, LOOK), ReferenceLine(math.nan, LOOK, "gone"), Line("", [1, 2], [math.nan, 4.0], LOOK))
    assert "nan" not in drawn and 'class="dot"' not in drawn and "gone" not in drawn


def test_render_svg_rounds_only_where_the_axis_counts_them() -> None:
    line = Line("one", [1, 9], [3.0, 4.0], LOOK)
    assert re.search(r'data-rounds="1 9 [\d.]+ [\d.]+"', svg(line, x=Axis(is_round=True)))
    assert "data-rounds" not in svg(line)


@pytest.mark.parametrize(("rows", "cells"), [(5, True), (90, False)])
def test_render_svg_large_maps_merge_cells_of_equal_shade(rows: int, cells: bool) -> None:
    shades = [[0.5] * 10 for _ in range(rows)]
    drawn = svg(Cells(shades, [["x"] * 10] * rows, [str(at) for at in range(rows)], [str(at) for at in range(10)]))
    assert (drawn.count('class="cell"') == rows * 10) == cells
    assert (drawn.count("<path fill=") == 1) == (not cells)


def test_render_svg_full_map_shows_gaps_between_cells() -> None:
    drawn = svg(Cells([[1.0, 1.0]], [["a", "b"]], ["row"], ["one", "two"]))
    (first, wide), (second, _) = [
        (float(x), float(width)) for x, width in re.findall(r'<rect x="([\d.]+)".*?width="([\d.]+)"', drawn)
    ]
    assert first + wide < second


def test_render_svg_bars_have_their_value_beside_them() -> None:
    drawn = svg(Bar(0, 5, -0.3, 0.3, LOOK, "five", "5"), x=Axis(from_zero=True), y=Axis(names=["a"]))
    assert re.search(r'<g class="bar".*?<title>five</title><rect .*?class="value".*?>5</text></g>', drawn)


def test_render_svg_logarithmic_axis_without_positive_values_is_drawn() -> None:
    assert "nan" not in svg(Dot(0, 1, LOOK), x=Axis(log=True))

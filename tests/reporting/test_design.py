"""The palettes: arms and tiers never share a hue, stay distinct for color-blind readers, and have contrast."""

import colorsys
import math
from itertools import combinations, product

import pytest

from fedloom import design

SCHEMES = {"light": False, "dark": True}
PALETTES = {
    "arms": (design.ARMS_LIGHT, design.ARMS_DARK),
    "tiers": (design.TIERS_LIGHT, design.TIERS_DARK),
}
VISION = {  # Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}


def channels(color: str) -> list[float]:
    return [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def linear(color: str) -> list[float]:
    return [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels(color)]


def contrast(one: str, other: str) -> float:
    """By WCAG 2."""
    dark, light = sorted(
        sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (one, other)
    )
    return (light + 0.05) / (dark + 0.05)


def hue(color: str) -> float:
    return 360 * colorsys.rgb_to_hls(*channels(color))[0]


def hue_distance(one: str, other: str) -> float:
    gap = abs(hue(one) - hue(other))
    return min(gap, 360 - gap)


def lab(color: str, vision: str) -> list[float]:
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear(color), strict=True)))) for row in VISION[vision]]
    weights = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.95047, 1.0, 1.08883)
    xyz = [sum(a * b for a, b in zip(row, seen, strict=True)) / w for row, w in zip(weights, white, strict=True)]
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_arms_and_tiers_never_share_a_hue(scheme: str) -> None:
    arms, tiers = (PALETTES[kind][SCHEMES[scheme]] for kind in ("arms", "tiers"))
    assert min(hue_distance(one, other) for one, other in product(arms, tiers)) > 25


@pytest.mark.parametrize("kind", PALETTES)
def test_palette_has_the_same_hues_on_dark_paper(kind: str) -> None:
    light, dark = PALETTES[kind]
    assert len(light) == len(dark)
    assert max(hue_distance(*pair) for pair in zip(light, dark, strict=True)) < 10


@pytest.mark.parametrize(("kind", "scheme", "vision"), list(product(PALETTES, SCHEMES, VISION)))
def test_palette_stays_distinct_for_color_blind_readers(kind: str, scheme: str, vision: str) -> None:
    palette = PALETTES[kind][SCHEMES[scheme]]
    assert min(math.dist(lab(one, vision), lab(other, vision)) for one, other in combinations(palette, 2)) > 7


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colors_have_contrast_with_the_paper(scheme: str) -> None:
    colors = design.css_variables(SCHEMES[scheme])
    paper = colors["--paper"]
    for name in ("--ink", "--soft", "--link", "--good", "--bad"):  # of text, also on tiles
        assert min(contrast(colors[name], paper), contrast(colors[name], colors["--wash"])) >= 4.5, name
    marks = [color for name, color in colors.items() if name[2] in "atn" and name[3:].isdigit()]
    assert len(marks) == 15 and min(contrast(color, paper) for color in marks) >= 3


def test_stylesheet_defines_what_pages_use() -> None:
    text = design.stylesheet()
    assert all(
        f"{name}:{color}" in text for dark in (False, True) for name, color in design.css_variables(dark).items()
    )
    assert "@import" not in text and "url(" not in text

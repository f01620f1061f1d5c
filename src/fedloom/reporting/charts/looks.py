"""Which arm and which tier has which color: the same everywhere, and never a color of the other kind.

Methods get the colors of arms in the order in which they are compared; controls are neutral, as they are what others
are measured against; tiers get shades of another hue, from the largest to the smallest.
"""

from collections.abc import Sequence

from ...design import ARMS_LIGHT, TIERS_LIGHT
from ..report_data import ReportData
from .drawing import Look

CONTROL_DASHES = {"small-for-all": "7 3", "drop-the-small": "2 3", "standalone": "7 3 2 3", "all-large": "1 2"}
ARM_DASHES = ("", "8 3", "2 2", "8 3 2 3")
TIER_DASHES = ("", "7 3", "2 2", "7 3 2 3", "4 2")


def arm_look(report: ReportData, name: str, tier: str = "") -> Look:
    """The look of an arm; `tier` says which tier its mark is about."""
    return look_among([group.name for group in report.groups], name, tier)


def look_among(names: Sequence[str], name: str, tier: str = "") -> Look:
    """The look of one of several arms."""
    if _is_control(names, name):
        at = list(CONTROL_DASHES).index(name)
        return Look(f"--n{at}", CONTROL_DASHES[name], at + 3, name, tier)
    at = [one for one in names if not _is_control(names, one)].index(name)
    dash = ARM_DASHES[at // len(ARMS_LIGHT) % len(ARM_DASHES)]
    return Look(f"--a{at % len(ARMS_LIGHT)}", dash, at, name, tier)


def is_control(report: ReportData, name: str) -> bool:
    """True for a control that others are compared with; the first arm is what the report is about."""
    return _is_control([group.name for group in report.groups], name)


def _is_control(names: Sequence[str], name: str) -> bool:
    return name in CONTROL_DASHES and name != names[0]


def tier_look(report: ReportData, tier: str, arm: str = "") -> Look:
    """The look of a tier."""
    return shade_of(list(report.tiers).index(tier) if tier in report.tiers else len(report.tiers), tier, arm)


def shade_of(at: int, tier: str = "", arm: str = "") -> Look:
    """The look of the tier at this place, counted from the largest."""
    return Look(f"--t{at % len(TIERS_LIGHT)}", TIER_DASHES[at % len(TIER_DASHES)], at, arm, tier)


def series_look(report: ReportData, arm: str, tier: str) -> Look:
    """The look of an arm's result on a tier: the arm's color if there are several arms, else the tier's."""
    return arm_look(report, arm, tier) if report.has_several_arms else tier_look(report, tier)

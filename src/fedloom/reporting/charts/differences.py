"""The first arm against every other, paired by seed, with the uncertainty of each difference."""

import math

from matplotlib.axes import Axes

from ..comparison import Difference, difference
from ..subject import Subject
from . import drawing
from .chart import Absent, Chart, Panel, Record, beside, counted

TITLE = "Paired differences"
COLUMNS = ("tier", "arm", "other", "arm_mean", "other_mean", "difference", "noise", "beyond_noise", "seeds")


def paired(subject: Subject) -> Chart | Absent:
    if subject.result is None:
        return Absent(TITLE, subject.uncompared)
    found = _differences(subject)
    if not found:
        return Absent(TITLE, "no other arm gives these devices a model they can carry")
    seeds = len(subject.groups[0].stories)
    records: list[Record] = [
        (
            one.tier,
            one.this,
            one.other,
            one.this_mean,
            one.other_mean,
            one.mean,
            one.noise,
            int(one.beyond_noise),
            seeds,
        )
        for one in found
    ]
    tiers = [tier for tier in subject.tiers if any(one.tier == tier for one in found)]
    panels = [_panel(tier, [one for one in found if one.tier == tier]) for tier in tiers]
    return Chart("differences", TITLE, _read(subject, found, seeds), COLUMNS, records, panels)


def _differences(subject: Subject) -> list[Difference]:
    first, *others = subject.groups
    terms = subject.terms
    found = [
        difference(first.arm, other.arm, tier, terms.test, terms.examples)
        for tier in subject.tiers
        for other in others
        if other.arm.serving[tier].can_carry and first.arm.serving[tier].can_carry
    ]
    return [one for one in found if not math.isnan(one.mean)]


def _panel(tier: str, found: list[Difference]) -> Panel:
    unit = found[0].metric.steps.strip() or found[0].metric.name

    def draw(axes: Axes) -> None:
        axes.axvline(0, color=drawing.INK, linewidth=0.8)
        for row, one in enumerate(found):
            strong, noise = one.beyond_noise, one.noise if math.isfinite(one.noise) else None
            colour = drawing.PALETTE[(0 if one.ahead > 0 else 1) if strong else 6]
            axes.errorbar(
                one.ahead, row, xerr=noise, fmt="o" if strong else "s", color=colour, capsize=3, markersize=6,
                markerfacecolor=colour if strong else "none",
            )  # fmt: skip
        axes.set_yticks(range(len(found)), [one.other for one in found])
        axes.set_ylim(len(found) - 0.5, -0.5)
        drawing.told(axes, f"{unit} that {found[0].this} is ahead", "")

    parts = [f"{one.other} {one.mean:+.1f} ± {one.noise:.1f}" for one in found]
    alt = f"{found[0].this} minus others for tier {tier}, in {unit}: {'; '.join(parts)}"
    return Panel(alt, draw, f"tier {tier}", tier, (5.0, 0.7 + 0.42 * len(found)), beside([one.other for one in found]))


def _read(subject: Subject, found: list[Difference], seeds: int) -> str:
    ahead = sum(one.beyond_noise and one.ahead > 0 for one in found)
    behind = sum(one.beyond_noise and one.ahead < 0 for one in found)
    return (
        f"Of {counted(len(found), 'difference')}, {found[0].this} is ahead beyond noise in {ahead} and behind in "
        f"{behind}; the others (hollow) are within noise. "
        f"Whiskers are two standard errors, of {'the test set and of ' if subject.metric.unit else ''}"
        f"{counted(seeds, 'seed')}."
    )

"""The result of a comparison, and its tables and verdict as text, Markdown, CSV and LaTeX.

The rules are the same whether the comparison has just run or is read from its folder.
"""

import csv
import io
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..wording import format_amount, format_bytes
from .device_outcomes import DeviceOutcomes
from .findings import gains_over_alternatives, has_rival_methods, leads, write_finding
from .paired_stats import (
    ACCURACY,
    GLOBAL_TEST,
    LOCAL_TEST,
    PERPLEXITY,
    Arm,
    ComparedMetric,
    Difference,
    compare_overall,
    compute_difference,
    describe_tests,
    summarize_arms,
    write_verdict,
)
from .targets import (
    Amount,
    CostToTarget,
    SoonerClaim,
    conclude_sooner,
    costs_to_targets,
    gain_of,
    median_amount,
    sort_amounts,
    tier_targets,
)

DESCRIPTION_FILE, DESCRIPTION_FORMAT = "comparison.json", "fedloom comparison 1"


@dataclass(frozen=True)
class ComparisonTerms:
    """How arms are compared. `tiers` run from the largest to the smallest."""

    tiers: Sequence[str]
    shares: Mapping[str, float]  # of the devices, by tier
    test: str
    examples: int  # in that test
    controls: Collection[str] = ()  # names of arms that are controls
    baseline: str | None = None  # the arm whose final value, less the margin, is the target
    margin: float = 1.0
    metric: str = ""  # the one compared, as rows name it; empty: accuracy or perplexity
    headlines: Mapping[str, str] = field(default_factory=dict)  # the test that each arm's method is for


@dataclass(frozen=True)
class ComparisonResult:
    records: list[dict[str, Any]]
    verdict: list[str]
    reached: list[CostToTarget] = field(default_factory=list)
    claims: list[SoonerClaim] = field(default_factory=list)
    overall: list[Difference] = field(default_factory=list)
    winners: dict[str, str | None] = field(default_factory=dict)
    metric: ComparedMetric = ACCURACY
    test: str = "global"  # that the verdict is about
    left_out: dict[str, str] = field(default_factory=dict)  # methods that do not fit, and why
    finding: str = ""  # what came out, in one sentence
    gains: list[Difference] = field(default_factory=list)  # by tier: the first arm, or the best one, over the next best
    statements: list[str] = field(default_factory=list)  # the part of the verdict that compares arms
    pairs: list[Difference] = field(default_factory=list)  # the first arm against every other, at every tier
    devices: list[DeviceOutcomes] = field(default_factory=list)  # what arms mean for single devices
    details: list[str] = field(default_factory=list)  # the part of the verdict on single devices and on searches

    @property
    def notes(self) -> list[str]:
        """The rest of the verdict: budgets, failures, and arms that did the same."""
        return [line for line in self.verdict if line not in self.statements and line not in self.details]


def conclude(arms: Sequence[Arm], terms: ComparisonTerms) -> ComparisonResult:
    first, tiers, shares, test = arms[0], terms.tiers, terms.shares, terms.test
    reached = []
    if terms.baseline is not None:
        reached = costs_to_targets(arms, tier_targets(arms, tiers, test, terms.baseline, terms.margin), test)
    claims, sooner = conclude_sooner(reached)
    others = [arm for arm in arms[1:] if arm.name not in terms.controls or arm.name == "standalone"]
    fleet = [one for one in (compare_overall(first, other, shares, test, terms.examples) for other in others) if one]
    lines = write_verdict(arms, tiers, shares, test, terms.examples) + [str(one) for one in fleet] + sooner
    lines += filter(None, [describe_tests(test, terms.headlines)])
    records = summarize_arms(arms, tiers, shares, test)
    found = (arms, tiers, test, terms.examples)
    rivals = has_rival_methods(arms, terms.controls)
    gains = [] if rivals else gains_over_alternatives(*found)
    return ComparisonResult(
        records, lines, reached, claims, fleet, find_winners(arms, terms), first.metric, test,
        finding=write_finding(*found, terms.controls), gains=gains or leads(*found), statements=list(lines),
    )  # fmt: skip


def find_winners(arms: Sequence[Arm], terms: ComparisonTerms) -> dict[str, str | None]:
    """By tier, the arm that is better than every other beyond noise, or None.

    An arm whose model the tier's devices cannot run does not compete for them.
    """
    return {tier: _find_winner(arms, tier, terms) for tier in terms.tiers}


def _find_winner(arms: Sequence[Arm], tier: str, terms: ComparisonTerms) -> str | None:
    finals = {arm.name: arm.final_values(tier, terms.test) for arm in arms}
    eligible = [arm for arm in arms if arm.serving[tier].can_run and not any(map(math.isnan, finals[arm.name]))]
    if len(eligible) < 2:
        return None
    best = max(eligible, key=lambda arm: arm.metric.sign * sum(finals[arm.name]))
    gaps = [compute_difference(best, arm, tier, terms.test, terms.examples) for arm in eligible if arm is not best]
    return best.name if all(gap.beyond_noise and gap.advantage > 0 for gap in gaps) else None


@dataclass(frozen=True)
class TextTable:
    """A table of text; `strong` cells belong to arms that win beyond noise."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[tuple[int, int]] = frozenset()  # (row, column)

    def legend(self, mark: str) -> str:
        """The caption; `mark` says what strong cells look like."""
        best = f"\n{mark}: better than every other arm, and it may be claimed." if self.strong else ""
        return self.caption + best

    def mark_strong(self, mark: Callable[[str], str]) -> list[list[str]]:
        return [
            [mark(cell) if (row, column) in self.strong else cell for column, cell in enumerate(cells)]
            for row, cells in enumerate(self.rows)
        ]


def build_tables(result: ComparisonResult) -> list[TextTable]:
    return [_value_table(result), *([_target_table(result.reached)] if result.reached else [])]


def _value_table(result: ComparisonResult) -> TextTable:
    first = result.records[0]
    tiers, metric, name = list(first["can_run"]), result.metric, first["metric"]
    columns = [column for column in COLUMNS if column.applies(result)]
    rows, strong = [], set()
    for number, record in enumerate(result.records):
        cells = [_format_value(record[name][tier], metric, record["can_run"][tier]) for tier in tiers]
        strong |= {(number, 1 + at) for at, tier in enumerate(tiers) if result.winners.get(tier) == record["arm"]}
        rows.append((str(record["arm"]), *cells, *(column.cell(record, metric) for column in columns)))
    unit = f" in{metric.unit}" if metric.unit else ""
    direction = "" if metric in (ACCURACY, PERPLEXITY) else f" ({metric.direction})"
    over = ", mean ± standard deviation over seeds" if any(first[name][tier]["std"] for tier in tiers) else ""
    model = "of the model that devices of the tier end up with; in brackets: they cannot run it."
    on = f" on the {result.test} test{TEST_MEANINGS.get(result.test, '')}"
    shown = [f" {test.capitalize()} test: {about}." for test, about in _other_tests(columns)]
    caption = f"{metric.title}{unit}{direction}{on}{over}, {model}{''.join(shown)}"
    return TextTable(caption, ("arm", *tiers, *(column.header for column in columns)), rows, frozenset(strong))


def _format_value(value: dict[str, float], metric: ComparedMetric, can_run: bool = True) -> str:
    if math.isnan(value["mean"]):  # a tier without devices has no model
        return "–"
    text = metric.number(value["mean"]) + (f" ± {metric.number(value['std'])}" if value["std"] else "")
    return text if can_run else f"({text})"


@dataclass(frozen=True)
class OptionalColumn:
    """A column besides those of the tiers."""

    header: str
    cell: Callable[[dict[str, Any], ComparedMetric], str]
    applies: Callable[[ComparisonResult], bool] = lambda result: True


def _format_macs(record: dict[str, Any], metric: ComparedMetric) -> str:
    return " / ".join(format_amount(macs) for macs in dict.fromkeys(record["macs"].values())) or "–"


TEST_MEANINGS = {LOCAL_TEST: " (each device on its own test examples)", GLOBAL_TEST: ""}


def _other_test_column(test: str) -> OptionalColumn:
    key = f"{test}_test"
    return OptionalColumn(
        f"{test} test",
        lambda record, metric: _format_value(record[key]["all"], metric) if record.get(key) else "–",
        lambda result: any(record.get(key) for record in result.records),
    )


def _other_tests(columns: Sequence[OptionalColumn]) -> list[tuple[str, str]]:
    """The tests with a column, and what is evaluated there."""
    about = {
        LOCAL_TEST: "devices' own test examples, mean over tiers; a tier's model on those of all devices, or personal "
        "models on their own",
        GLOBAL_TEST: "the average device on the whole test set",
    }
    return [(test, about[test]) for test, column in TEST_COLUMNS.items() if column in columns]


TEST_COLUMNS = {test: _other_test_column(test) for test in (LOCAL_TEST, GLOBAL_TEST)}
COLUMNS = (
    OptionalColumn(
        "worst",
        lambda record, metric: _format_value(record["worst_tier"], metric),
        lambda result: len(result.records[0]["can_run"]) > 1,
    ),
    *TEST_COLUMNS.values(),
    OptionalColumn("served", lambda record, metric: f"{record['served_percent']:.0f} %"),
    OptionalColumn("MACs", _format_macs, lambda result: any(record["macs"] for record in result.records)),
    OptionalColumn("bytes per round", lambda record, metric: format_bytes(record["bytes_per_round"])),
    OptionalColumn(
        "simulated s",
        lambda record, metric: "–" if record["seconds"] is None else f"{record['seconds']:.1f}",
        lambda result: any(record["seconds"] is not None for record in result.records),
    ),
)


def _target_table(costs: Sequence[CostToTarget]) -> TextTable:
    rows = []
    for cost in costs:
        seconds = _format_amounts(cost.seconds, 1, ".1f") if cost.seconds else "–"
        spent = (_format_amounts(cost.rounds), _format_amounts(cost.bytes, 1e6, ".2f"), seconds)
        rows.append((cost.arm, cost.tier, cost.metric.format(cost.target), *spent, gain_of(cost, costs) or "–"))
    caption = (
        "Rounds, megabytes and simulated seconds until a tier reaches its target: median [lowest–highest] over seeds; "
        ">: not reached within the run. Gain: how many times as many rounds the fastest other arm takes."
    )
    return TextTable(caption, ("arm", "tier", "target", "rounds", "MB", "seconds", "gain"), rows)


def _format_amounts(amounts: Sequence[Amount], unit: float = 1, digits: str = "g") -> str:
    texts = [amount.format(unit, digits) for amount in sort_amounts(amounts)]
    return median_amount(amounts).format(unit, digits) + (f" [{texts[0]}–{texts[-1]}]" if len(texts) > 1 else "")


def left_out_lines(result: ComparisonResult) -> list[str]:
    """The methods that do not fit, each with its reason."""
    return [f"left out: {name}: {reason}" for name, reason in result.left_out.items()]


def to_markdown(result: ComparisonResult) -> str:
    lines = "\n".join(f"- {line}" for line in [*result.verdict, *left_out_lines(result)])
    finding = [result.finding] if result.finding else []
    return "\n\n".join([*map(_markdown_table, build_tables(result)), *finding, lines]) + "\n"


def _markdown_table(table: TextTable) -> str:
    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(table.header) - 1)]) + "|"
    rows = map(row, table.mark_strong(lambda cell: f"**{cell}**"))
    return "\n".join([row(table.header), rule, *rows, "", table.legend("Bold")])


CSV_COLUMNS = (
    "arm", "tier", "can_run", "metric", "mean", "std", "winner", "worst_tier_mean", "worst_tier_std",
    "local_test_mean", "local_test_std", "global_test_mean", "global_test_std", "served_percent",
    "macs", "bytes_per_round", "seconds", "target", "reached",
    "rounds_to_target", "bytes_to_target", "seconds_to_target", "gain",
)  # fmt: skip


def to_csv(result: ComparisonResult) -> str:
    """One line per arm and tier, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    reached = {(cost.arm, cost.tier): cost for cost in result.reached}
    for record in result.records:
        for tier, value in record[record["metric"]].items():
            name, worst = record["arm"], record["worst_tier"]
            won = int(result.winners.get(tier) == name)
            of_tier = (int(record["can_run"][tier]), record["metric"], value["mean"], value["std"], won)
            spent = (record["macs"].get(tier, ""), record["bytes_per_round"], record["seconds"])
            of_arm = (worst["mean"], worst["std"], *_other_test_cells(record), record["served_percent"], *spent)
            writer.writerow([name, tier, *of_tier, *of_arm, *_target_cells(reached.get((name, tier)), result.reached)])
    return text.getvalue()


def _other_test_cells(record: Mapping[str, Any]) -> list[Any]:
    known = [record.get(f"{test}_test") for test in TEST_COLUMNS]
    return [cell for values in known for cell in (values["all"].values() if values else ("", ""))]


def _target_cells(cost: CostToTarget | None, costs: Sequence[CostToTarget]) -> tuple[Any, ...]:
    if cost is None:
        return ("",) * 6
    rounds, moved = median_amount(cost.rounds), median_amount(cost.bytes)
    seconds = median_amount(cost.seconds).value if cost.seconds else ""
    return cost.target, int(rounds.exact), rounds.value, moved.value, seconds, gain_of(cost, costs) or ""


def to_latex(result: ComparisonResult) -> str:
    """Tables for a paper; they need no package."""
    verdict = "\n".join(f"% {line}" for line in result.verdict)
    return "\n\n".join([*map(_latex_table, build_tables(result)), verdict]) + "\n"


def _latex_table(table: TextTable) -> str:
    layout = "l" + "r" * (len(table.header) - 1)
    escaped = TextTable("", table.header, [[_escape_tex(cell) for cell in row] for row in table.rows], table.strong)
    rows = [" & ".join(row) + r" \\" for row in escaped.mark_strong(lambda cell: rf"\textbf{{{cell}}}")]
    header = " & ".join(map(_escape_tex, table.header)) + r" \\"
    body = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", header, r"\hline", *rows, r"\hline", r"\end{tabular}"]
    caption = rf"\caption{{{_escape_tex(table.legend('Bold'))}}}"
    return "\n".join([r"\begin{table}", r"\centering", *body, caption, r"\end{table}"])


def _escape_tex(text: str) -> str:
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for sign, tex in (("±", r"$\pm$"), (">", "$>$"), ("<", "$<$"), ("–", "--"), ("[", "{[}"), ("]", "{]}")):
        text = text.replace(sign, tex)
    return text


FILES: dict[str, Callable[[ComparisonResult], str]] = {
    "results.md": to_markdown,
    "results.csv": to_csv,
    "results.tex": to_latex,
}

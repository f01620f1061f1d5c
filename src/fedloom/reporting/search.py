"""The record of a search for settings, as `fedloom tune` keeps it: what tables and reports read and say about it.

Everything here is about validation examples. The value of a choice is optimistic, because it was chosen by that value.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..runs.folder import MANIFEST, read_manifest
from ..wording import join_words, pluralize
from .paired_stats import ComparedMetric

SearchRecord = Mapping[str, Any]
"""The content of an arm's `search.json`."""

SEARCH_FILE, SEARCH_FORMAT, SEARCH_FOLDER = "search.json", "fedloom search 1", "tune"
SEARCH_KIND = "search"  # what the manifest of its folder says


def is_search(home: Path) -> bool:
    """True for the folder of a search."""
    return (home / MANIFEST).is_file() and read_manifest(home).get("kind") == SEARCH_KIND


def read_searches(home: Path) -> list[dict[str, Any]]:
    """The records of all arms in the folder of a search, or of a comparison with one; none if there was no search."""
    folder = home / SEARCH_FOLDER if (home / SEARCH_FOLDER).is_dir() else home
    paths = sorted(folder.glob(f"*/{SEARCH_FILE}"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def trial_records(search: SearchRecord) -> list[dict[str, Any]]:
    """A record for each trial: its settings, the rounds it ran, its score there, and whether it is the choice."""
    chosen = (search["choice"] or {}).get("trial")
    return [
        {
            "trial": one["number"], **one["settings"], "rounds": after, "score": _mean(known),
            "chosen": one["number"] == chosen,
        }
        for one in search["tried"]
        for after, known in [max(((int(after), known) for after, known in one["scores"].items()), default=(0, {}))]
    ]  # fmt: skip


def stage_scores(search: SearchRecord) -> dict[int, dict[int, float | None]]:
    """By trial, its score after each number of rounds at which it was scored; None: failed."""
    return {
        one["number"]: {int(after): _mean(known) for after, known in sorted(one["scores"].items(), key=_rounds_of)}
        for one in search["tried"]
    }


def _rounds_of(scored: tuple[str, Any]) -> int:
    return int(scored[0])


def _mean(scores: Mapping[str, float | None]) -> float | None:
    values = [score for score in scores.values() if score is not None]
    return sum(values) / len(values) if values and len(values) == len(scores) else None


def metric_of_search(search: SearchRecord) -> ComparedMetric:
    """The metric that scores trials."""
    return ComparedMetric(search["metric"], search["unit"], higher_is_better=search["higher_is_better"])


@dataclass(frozen=True)
class SearchSummary:
    """The search of one arm: its budget, what was chosen, and what the recipe itself scored."""

    arm: str
    trials: int
    rounds: int  # of a trial that runs to the end
    seeds: int  # of a trial
    bytes: float  # transferred by all trials
    chosen_trial: int | None  # None: nothing is chosen
    settings: str  # that were chosen
    score: float | None
    own: str  # the score of the recipe itself, which is the first trial, in words


def summarize_search(search: SearchRecord) -> SearchSummary:
    choice = search["choice"] or {"trial": None, "settings": None, "score": None}
    return SearchSummary(
        search["arm"], len(search["tried"]), search["rounds"], len(search["seeds"]), search["bytes"], choice["trial"],
        format_settings(choice["settings"]) if choice["settings"] else "", choice["score"], _own_score(search),
    )  # fmt: skip


def _own_score(search: SearchRecord) -> str:
    scores = stage_scores(search)[0]
    last = scores.get(search["rounds"])
    if last is not None:
        return metric_of_search(search).format(last)
    return "failed" if None in scores.values() else "not run to the end"


def write_budget(searches: Sequence[SearchRecord]) -> str:
    """What each arm could spend on its search, and what its trials were scored on."""
    budgets = {one["arm"]: _describe_budget(one) for one in searches}
    first, *others = budgets.values()
    if not others:
        spent = f"The search had {first}"
    elif all(other == first for other in others):
        spent = f"Every arm had the same budget: {first}"
    else:
        listed = join_words([f"{arm} {budget}" for arm, budget in budgets.items()])
        limit = f", so that no trial transfers more than one of {searches[0]['arm']}"
        spent = f"Arms had unequal numbers of rounds{limit if searches[0]['equal'] == 'bytes' else ''}: {listed}"
    examples = pluralize(searches[0]["validation_examples"], "validation example")
    return f"{spent}. Trials were scored by {searches[0]['metric']} on {examples}; the test set was not used."


def _describe_budget(search: SearchRecord) -> str:
    trials, rounds = pluralize(len(search["tried"]), "trial"), pluralize(search["rounds"], "round")
    seeds = f" with {pluralize(len(search['seeds']), 'seed')} each" if len(search["seeds"]) > 1 else ""
    return f"{trials} of at most {rounds}{seeds}"


def write_stages(searches: Sequence[SearchRecord]) -> str:
    """How many trials were scored after how many rounds."""
    arms: dict[str, list[str]] = {}
    for search in searches:
        arms.setdefault(_describe_stages(search), []).append(search["arm"])
    if len(arms) == 1:
        (stages,) = arms
        return f"In every arm, {stages}." if len(searches) > 1 else f"{stages[0].upper()}{stages[1:]}."
    return f"{'; '.join(f'{join_words(names)}: {stages}' for stages, names in arms.items())}."


def _describe_stages(search: SearchRecord) -> str:
    counts = Counter(after for scores in stage_scores(search).values() for after in scores)
    if not counts:
        return "no trial was scored yet"
    if list(counts) == [search["rounds"]]:
        every = f"all {counts.total()} trials" if counts.total() > 1 else "the only trial"
        return f"{every} ran all {pluralize(search['rounds'], 'round')}"
    (after, count), *later = sorted(counts.items())
    parts = [f"{pluralize(count, 'trial')} {'was' if count == 1 else 'were'} scored after {pluralize(after, 'round')}"]
    return join_words([*parts, *(f"{count} after {pluralize(after, 'round')}" for after, count in later)])


def write_choice(search: SearchRecord) -> str:
    """What was chosen in an arm, and how it scored against the recipe itself."""
    summary, metric = summarize_search(search), metric_of_search(search)
    if summary.score is None:
        return f"Nothing is chosen for {summary.arm}."
    value = metric.format(summary.score)
    if summary.chosen_trial == 0:
        return f"{summary.arm} scored best with the recipe's own settings: {value}."
    return f"{summary.arm} scored best with {summary.settings}: {value} (the recipe itself: {summary.own})."


def write_choices(searches: Sequence[SearchRecord]) -> str:
    """In which arms other settings than the recipe's scored best; of a single arm, which ones."""
    if len(searches) == 1:
        return write_choice(searches[0])
    arms: dict[str, list[str]] = {}
    for search in searches:
        trial = summarize_search(search).chosen_trial
        outcome = "nothing is chosen" if trial is None else "other settings than the recipe's scored best"
        arms.setdefault("the recipe itself scored best" if trial == 0 else outcome, []).append(search["arm"])
    text = "; ".join(f"{outcome} for {join_words(names)}" for outcome, names in arms.items())
    return f"{text[0].upper()}{text[1:]}."


def search_sentence(search: SearchRecord) -> str:
    """What was searched in an arm, on what, and what was chosen."""
    begun = (
        f"{search['arm']}: {pluralize(len(search['tried']), 'trial')} of {join_words(list(search['space']))} on "
        f"{pluralize(search['validation_examples'], 'validation example')}"
    )
    choice = search["choice"]
    if choice is None:
        return f"{begun}; nothing chosen yet"
    settings = join_words([f"{key} {format_setting(value)}" for key, value in choice["settings"].items()])
    return f"{begun}; chosen {settings} ({metric_of_search(search).format(choice['score'])})"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings in words, by the short names of their keys."""
    return join_words([f"{short_key(key)} {format_setting(value)}" for key, value in settings.items()])


def short_key(key: str) -> str:
    """The key of a setting as tables and charts show it."""
    return key.removeprefix("training.").removeprefix("optimizer.")


def format_setting(value: Any) -> str:
    """A value of a setting in words: of a table its kind; numbers with three digits that count."""
    if isinstance(value, Mapping):
        return str(value.get("kind", value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)

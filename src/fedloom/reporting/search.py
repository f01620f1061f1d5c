"""The record of a search for settings, as `fedloom tune` keeps it: what tables and reports read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..wording import join_words, pluralize
from .paired_stats import ComparedMetric

SEARCH_FILE, SEARCH_FORMAT, SEARCH_FOLDER = "search.json", "fedloom search 1", "tune"


def read_searches(home: Path) -> list[dict[str, Any]]:
    """The records of all arms in the folder of a search, or of a comparison with one; none if there was no search."""
    folder = home / SEARCH_FOLDER if (home / SEARCH_FOLDER).is_dir() else home
    paths = sorted(folder.glob(f"*/{SEARCH_FILE}"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def trial_records(search: Mapping[str, Any]) -> list[dict[str, Any]]:
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


def _mean(scores: Mapping[str, float | None]) -> float | None:
    values = [score for score in scores.values() if score is not None]
    return sum(values) / len(values) if values and len(values) == len(scores) else None


def search_sentence(search: Mapping[str, Any]) -> str:
    """What was searched in an arm, on what, and what was chosen."""
    metric = ComparedMetric(search["metric"], search["unit"], higher_is_better=search["higher_is_better"])
    begun = (
        f"{search['arm']}: {pluralize(len(search['tried']), 'trial')} of {join_words(list(search['space']))} on "
        f"{pluralize(search['validation_examples'], 'validation example')}"
    )
    choice = search["choice"]
    if choice is None:
        return f"{begun}; nothing chosen yet"
    settings = join_words([f"{key} {format_setting(value)}" for key, value in choice["settings"].items()])
    return f"{begun}; chosen {settings} ({metric.format(choice['score'])})"


def format_setting(value: Any) -> str:
    """A value of a setting in words: of a table its kind."""
    if isinstance(value, Mapping):
        return str(value.get("kind", value))
    return f"{value:g}" if isinstance(value, float) else str(value)

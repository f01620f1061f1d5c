"""A run as its folder tells it, be it finished or still going on: everything a report is made of."""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..evaluation import Row
from .journal import MANIFEST, read_manifest

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Story:
    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return read_manifest(self.folder)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "recipe.toml").read_text(encoding="utf-8"))

    @cached_property
    def fleet(self) -> dict[str, Any]:
        """Who takes part; runs of older releases do not say."""
        known: dict[str, Any] = _document(self.folder / "fleet.json") or {}
        tiers = [{"name": one["name"], "share": one["share"], "trained": True} for one in self.recipe["tiers"]]
        method = {"name": self.recipe["method"]["name"]}
        return {"tiers": tiers, "method": method, "rings": [], "devices": [], "device_tiers": None, **known}

    @cached_property
    def rows(self) -> list[Row]:
        return [
            Row(**{**line, "value": math.nan if line["value"] is None else line["value"]})
            for line in _lines(self.folder / "rows.jsonl")
        ]

    @cached_property
    def events(self) -> list[Line]:
        return list(_lines(self.folder / "events.jsonl"))

    @cached_property
    def attendance(self) -> list[Line]:
        return list(_lines(self.folder / "attendance.jsonl"))

    @cached_property
    def timings(self) -> list[Line]:
        return list(_lines(self.folder / "timings.jsonl"))

    @cached_property
    def subnets(self) -> list[Line]:
        """Sub-nets that were judged after the run, if any were."""
        return list(_lines(self.folder / "subnets.jsonl"))

    @cached_property
    def likeness(self) -> list[dict[str, Any]]:
        return _document(self.folder / "likeness.json") or []

    @property
    def method(self) -> str:
        return str(self.recipe["method"]["name"])

    @property
    def seed(self) -> int:
        return int(self.recipe["seed"])

    @property
    def rounds(self) -> int:
        """That are over."""
        return max((row.round for row in self.rows), default=0)

    @property
    def under_way(self) -> bool:
        return self.manifest.get("status") == "running"

    @cached_property
    def tier_of(self) -> dict[str, str]:
        """Of every device, where it keeps its tier."""
        kept = self.fleet["device_tiers"]
        return dict(zip(self.fleet["devices"], kept, strict=True)) if kept else {}

    @cached_property
    def voided(self) -> frozenset[int]:
        """Rounds that did not count, because too few devices were heard."""
        return frozenset(event["round"] for event in self.events if event["code"] == "QUORUM")


def is_run(folder: Path) -> bool:
    return (folder / MANIFEST).is_file() and (folder / "recipe.toml").is_file()


def _document(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A line that is just being written is left for the next look."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue

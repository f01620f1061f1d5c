"""Model sizes in HeteroFL's tables, which `fedloom reproduce` compares without a run."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedloom.models import Cost, compute_cost
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.runs.build import build
from fedloom.runs.data import read_data_spec
from fedloom.studies.published import PublishedRow, read_published
from fedloom.studies.reproduce import ReproduceContext, row_numbers

ROWS = {name: row for name, row in read_published(Path("recipes")).items() if name.startswith("heterofl_costs")}
TABLES = ("heterofl_costs_table7", "heterofl_costs_table8", "heterofl_costs_table9")


def costs_of_levels(row: PublishedRow, folder: Path) -> dict[str, Cost]:
    loaded = load(row.recipe, Registries(), list(row.changes))
    fleet, _ = build(loaded, Registries(), read_data_spec(loaded, Registries(), folder))
    return {tier.name: compute_cost(tier.model) for tier in fleet.tiers}


def as_printed(number: float) -> Any:
    """To one decimal of its unit, be it thousands, millions or billions."""
    return pytest.approx(number, abs=0.051 * 1000 ** math.floor(math.log(number, 1000)))


@pytest.mark.parametrize("table", TABLES)
def test_published_mean_over_levels_is_as_printed(table: str, tmp_path: Path) -> None:
    levels = costs_of_levels(ROWS[f"{table}_a-b-c-d-e"], tmp_path)
    modes = {name.rpartition("_")[2]: row for name, row in ROWS.items() if name.startswith(table)}
    assert len(modes) == 31
    for mode, row in modes.items():
        letters = mode.split("-")
        for number, printed in row.numbers:
            mean = sum(getattr(levels[letter], number.metric) for letter in letters) / len(letters)
            assert mean == as_printed(printed or math.nan), (mode, number.metric)


def test_published_cost_row_needs_no_run(tmp_path: Path) -> None:
    row = ROWS["heterofl_costs_table7_a-e"]
    context = ReproduceContext(Registries(), tmp_path, 1, lambda experiment, registries, data, folder: experiment)
    found = row_numbers(row, load(row.recipe, Registries(), list(row.changes)), tmp_path, context)
    assert [one["what"] for one in found] == ["all devices parameters", "all devices published_flops"]
    assert [one["measured"] for one in found] == [(1_556_874 + 6_594) / 2, (80_504_320 + 400_480) / 2]
    assert all(one["measured"] == as_printed(one["published"]) for one in found)

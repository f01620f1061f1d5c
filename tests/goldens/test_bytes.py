"""Bytes transferred in a round of the papers' recipes, compared with formulas worked out by hand."""

import math
from pathlib import Path

import pytest

from fedloom.analysis.costs import TierCost, tier_costs
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries

PAPERS = Path(__file__).parents[2] / "recipes" / "papers"
PAIR = 4 * (64 * 16 * 16 + 1024)  # input and output of FedIN's intermediate layers
ENDS = 4 * (1_920 + 10_250)
IMAGES = 5_000 * 3 * 32 * 32  # as bytes


def costs(recipe: str, folder: Path) -> dict[str, TierCost]:
    registries = Registries()
    return {one.name: one for one in tier_costs(load(PAPERS / f"{recipe}.toml", registries), registries, folder)}


@pytest.mark.parametrize(
    ("recipe", "labels"),
    [
        ("heterofl_mnist", 10),
        pytest.param("heterofl_cifar10", 10, marks=pytest.mark.slow),
        pytest.param("heterofl_wikitext2", 33_279, marks=pytest.mark.slow),
    ],
)
def test_heterofl_traffic_is_slice_and_label_set(recipe: str, labels: int, tmp_path: Path) -> None:
    for one in costs(recipe, tmp_path).values():
        assert one.bytes_down == 4 * one.parameters
        assert one.bytes_up == 4 * one.parameters + math.ceil(labels / 8)


@pytest.mark.slow
def test_fedhen_traffic_of_ten_devices_is_475_megabytes(tmp_path: Path) -> None:
    found = costs("fedhen_cifar10", tmp_path)
    assert (found["simple"].bytes_down, found["complex"].bytes_down) == (2_781_484, 44_766_548)
    both_ways = sum(5 * (one.bytes_down + one.bytes_up) for one in found.values())
    assert f"{both_ways / 1e6:.1f}" == "475.5"


def test_fedsup_traffic_is_supernet_for_every_tier(tmp_path: Path) -> None:
    found = costs("fedsup_cifar100", tmp_path)
    assert {(one.bytes_down, one.bytes_up) for one in found.values()} == {(4 * 1_951_076, 4 * 1_951_076)}


@pytest.mark.slow
def test_fedin_traffic_is_ends_and_pairs(tmp_path: Path) -> None:
    assert (ENDS, PAIR) == (48_680, 69_632)
    found = costs("fedin_cifar10", tmp_path)
    assert {(one.bytes_down, one.bytes_up) for one in found.values()} == {(ENDS + 512 * PAIR, ENDS + 128 * PAIR)}


def test_fedhenn_traffic_includes_public_images_and_strength(tmp_path: Path) -> None:
    (one,) = costs("fedhenn_table1", tmp_path).values()
    assert one.bytes_down == 4 * one.parameters + IMAGES + 4
    assert one.bytes_up == 4 * one.parameters


def test_fedhen_cohort_rarely_lacks_complex_devices() -> None:
    assert math.comb(50, 10) / math.comb(100, 10) == pytest.approx(5.93e-4, abs=1e-6)

"""Which device belongs to which tier, who takes part, and how tiers lie in the global model."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.fleet import Fleet, InvalidTier, draw_cohort, make_nested_tiers
from fedloom.models import Model, build_model
from fedloom.seeds import generator


def sized(hidden: int, depth: int = 1) -> nn.Module:
    body = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(depth - 1)))
    return nn.Sequential(OrderedDict({"stem": nn.Linear(3, hidden), "body": body, "classifier": nn.Linear(hidden, 2)}))


def size(hidden: int, **more: Any) -> Model:
    return build_model("sized", sized, {"hidden": hidden, **more}, (3,), 2)


def fleet_of(shares: tuple[float, ...], devices: int, **changes: Any) -> Fleet:
    """Tiers a, b, …, from large to small."""
    models = [(name, size(8 - number)) for number, name in enumerate("abcdef"[: len(shares)])]
    return replace(Fleet(make_nested_tiers(models), shares, devices, seed=3), **changes)


def tiers_of(fleet: Fleet, round_number: int = 1) -> str:
    return "".join(device.tier for device in fleet.devices(round_number))


def test_fleet_two_equal_shares_split_by_index() -> None:
    assert tiers_of(fleet_of((0.5, 0.5), 100)) == "a" * 50 + "b" * 50


@pytest.mark.parametrize(
    ("shares", "devices", "expected"),
    [
        ((0.5, 0.5), 5, "aabbb"),  # 2 each, and the one left over takes the last tier
        ((1 / 3, 1 / 3, 1 / 3), 10, "aaabbbcccc"),
        ((0.1, 0.9), 10, "a" + "b" * 9),
        ((0.3, 0.7), 10, "aaabbbbbbb"),  # 0.7 * 10 is a little below 7 in floating point
        ((0.29, 0.71), 100, "a" * 29 + "b" * 71),
        ((1.0,), 3, "aaa"),
        ((0.2, 0.2, 0.2, 0.2, 0.2), 100, "a" * 20 + "b" * 20 + "c" * 20 + "d" * 20 + "e" * 20),
        ((0.05, 0.95), 10, "b" * 10),
    ],
)
def test_fleet_fixed_assignment_fills_tiers_in_order(shares: tuple[float, ...], devices: int, expected: str) -> None:
    assert tiers_of(fleet_of(shares, devices)) == expected


@given(devices=st.integers(1, 60), weights=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_fleet_fixed_assignment_respects_shares(devices: int, weights: list[int]) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    found = tiers_of(fleet_of(shares, devices))
    assert len(found) == devices
    assert list(found) == sorted(found)
    for name, weight in zip("abcdef", weights[:-1], strict=False):
        assert found.count(name) == weight * devices // sum(weights)


def test_fleet_fixed_assignment_is_constant_over_rounds() -> None:
    fleet = fleet_of((0.5, 0.5), 8)
    assert tiers_of(fleet, 1) == tiers_of(fleet, 2) == tiers_of(fleet, 77)


def test_fleet_redrawn_tiers_have_expected_shares() -> None:
    """Within four standard deviations of 6000 draws, and independent from round to round."""
    shares = (0.5, 0.3, 0.2)
    fleet = fleet_of(shares, 300, assignment="redrawn")
    rounds = [tiers_of(fleet, number) for number in range(1, 21)]
    found = Counter("".join(rounds))
    for name, share in zip("abc", shares, strict=True):
        assert abs(found[name] - 6000 * share) < 4 * (6000 * share * (1 - share)) ** 0.5
    assert len(set(rounds)) == 20
    same = sum(before == after for before, after in zip(rounds[0], rounds[1], strict=True))
    chance = sum(share**2 for share in shares)
    assert abs(same - 300 * chance) < 4 * (300 * chance * (1 - chance)) ** 0.5


def test_fleet_redrawn_tiers_are_reproducible() -> None:
    fleet = fleet_of((0.5, 0.5), 30, assignment="redrawn")
    later = fleet.device(7, 4).tier
    assert tiers_of(fleet, 4)[7] == later
    assert tiers_of(replace(fleet, seed=4), 4) != tiers_of(fleet, 4)


@pytest.mark.parametrize("devices", [1, 2, 10, 11, 100, 101, 1000])
def test_device_name_any_size_sorts_like_numbers(devices: int) -> None:
    fleet = fleet_of((1.0,), devices)
    names = [fleet.name(index) for index in range(devices)]
    assert names == sorted(names)
    assert len(set(names)) == devices
    assert [int(name) for name in names] == list(range(devices))


@pytest.mark.parametrize(
    ("devices", "participation", "expected"),
    [(100, 0.1, 10), (100, 0.101, 11), (10, 1.0, 10), (7, 0.5, 4), (10, 0.3, 3), (100, 0.07, 7), (3, 0.01, 1)],
)
def test_draw_cohort_size_is_ceil_of_the_share(devices: int, participation: float, expected: int) -> None:
    """0.07 * 100 is a little above 7 in floating point, but 8 devices are not meant."""
    cohort = draw_cohort(fleet_of((1.0,), devices), participation, 1)
    names = [device.name for device in cohort]
    assert len(cohort) == expected
    assert names == sorted(set(names))


def test_draw_cohort_rounds_differ_and_reach_every_device() -> None:
    fleet = fleet_of((1.0,), 20)
    found = Counter(device.name for number in range(1, 401) for device in draw_cohort(fleet, 0.25, number))
    assert len(found) == 20
    assert all(abs(count - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5 for count in found.values())


def cohort_names(fleet: Fleet, number: int = 5) -> list[str]:
    return [device.name for device in draw_cohort(fleet, 0.4, number)]


def test_draw_cohort_is_independent_of_other_draws() -> None:
    """The same devices whichever tiers there are, however they are assigned, and whatever was drawn before."""
    plain = fleet_of((1.0,), 20)
    first = cohort_names(plain)
    generator(3, "cohort", 5).random(100)
    torch.rand(3)
    assert cohort_names(fleet_of((0.5, 0.5), 20)) == first
    assert cohort_names(fleet_of((0.5, 0.5), 20, assignment="redrawn")) == first
    assert cohort_names(replace(plain, seed=4)) != first


def test_draw_cohort_devices_have_their_tier_of_the_round() -> None:
    fleet = fleet_of((0.5, 0.5), 20, assignment="redrawn")
    for number in (1, 2):
        for device in draw_cohort(fleet, 0.5, number):
            assert device.tier == fleet.device(int(device.name), number).tier


@pytest.mark.parametrize("assignment", ["fixed", "redrawn"])
def test_draw_cohort_eligible_tiers_restrict_devices(assignment: Any) -> None:
    fleet = fleet_of((0.5, 0.5), 20, assignment=assignment, eligible_tiers=("b",))
    able = [device.name for device in fleet.devices(3) if device.tier == "b"]
    assert [device.name for device in draw_cohort(fleet, 1.0, 3)] == able
    half = draw_cohort(fleet, 0.5, 3)
    assert len(half) == -(-len(able) // 2)
    assert {device.tier for device in half} == {"b"}


def test_draw_cohort_no_eligible_device_is_empty() -> None:
    assert draw_cohort(fleet_of((1.0,), 5, eligible_tiers=("z",)), 1.0, 1) == []


def test_fleet_global_model_is_that_of_the_largest_tier() -> None:
    fleet = Fleet(
        make_nested_tiers([("small", size(2)), ("large", size(8)), ("middle", size(4))]), (0.3, 0.3, 0.4), 10, seed=0
    )
    assert (fleet.largest.name, fleet.smallest.name) == ("large", "small")
    assert fleet.global_model == size(8)


def test_pooled_device_share_takes_the_first_devices() -> None:
    fleet = fleet_of((1.0,), 12)
    assert fleet.pooled_device(fleet.largest).pooled_from == tuple(f"{index:02d}" for index in range(12))
    assert fleet.pooled_device(fleet.largest, 0.25).pooled_from == ("00", "01", "02")
    assert fleet.pooled_device(fleet.largest, 0.001).pooled_from == ("00",)


def test_make_nested_tiers_footprints_come_from_shapes() -> None:
    small, large = make_nested_tiers([("s", size(2)), ("l", size(8))])
    weights = size(8).initial_weights(0)
    assert {name: tensor.shape for name, tensor in small.footprint.read(weights).items()} == dict(size(2).shapes())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in large.footprint.read(weights).items())


def test_make_nested_tiers_shallower_net_covers_fewer_names() -> None:
    short, _ = make_nested_tiers([("short", size(4, depth=2)), ("long", size(4, depth=3))])
    assert set(short.footprint.blocks) == set(size(4, depth=3).shapes()) - {"body.1.weight", "body.1.bias"}


def uneven(left: int, right: int) -> nn.Module:
    made = nn.Module()
    made.left, made.right, made.classifier = nn.Linear(3, left), nn.Linear(3, right), nn.Linear(left, 2)
    return made


def test_make_nested_tiers_larger_layer_is_refused_by_name() -> None:
    models = [
        ("big", build_model("uneven", uneven, {"left": 9, "right": 2}, (3,), 2)),
        ("odd", build_model("uneven", uneven, {"left": 2, "right": 4}, (3,), 2)),
    ]
    with pytest.raises(InvalidTier, match=r"tier 'odd': right\.weight has shape \(4, 3\).*\(2, 3\)"):
        make_nested_tiers(models)


class Recurrent(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(4, hidden, batch_first=True), nn.Linear(hidden, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Attentive(nn.Module):
    def __init__(self, size: int, heads: int):
        super().__init__()
        self.stem, self.classifier = nn.Linear(4, size), nn.Linear(size, 2)
        self.attention = nn.MultiheadAttention(size, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.classifier(self.attention(x, x, x)[0].mean(1))  # type: ignore[no-any-return]


def recurrent(hidden: int) -> nn.Module:
    return Recurrent(hidden)


def attentive(size: int, heads: int) -> nn.Module:
    return Attentive(size, heads)


def models_of(build: Callable[..., nn.Module], *settings: dict[str, int]) -> list[tuple[str, Model]]:
    return [(f"t{number}", build_model(build.__name__, build, one, (5, 4), 2)) for number, one in enumerate(settings)]


def test_make_nested_tiers_lstm_keeps_part_of_every_gate() -> None:
    _, small = make_nested_tiers(models_of(recurrent, {"hidden": 4}, {"hidden": 2}))
    rows, columns = small.footprint.blocks["lstm.weight_hh_l0"]
    assert isinstance(rows, Tensor) and rows.tolist() == [0, 1, 4, 5, 8, 9, 12, 13]
    assert columns == slice(0, 2)


def test_make_nested_tiers_smaller_heads_keep_part_of_every_head() -> None:
    _, small = make_nested_tiers(models_of(attentive, {"size": 8, "heads": 2}, {"size": 4, "heads": 2}))
    rows, _ = small.footprint.blocks["attention.in_proj_weight"]
    assert isinstance(rows, Tensor) and rows.tolist() == [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21]


def test_make_nested_tiers_fewer_heads_are_the_first_ones() -> None:
    _, small = make_nested_tiers(models_of(attentive, {"size": 8, "heads": 4}, {"size": 4, "heads": 2}))
    assert small.footprint.blocks["attention.out_proj.weight"] == (slice(0, 4), slice(0, 4))


def test_make_nested_tiers_more_heads_in_smaller_tier_are_refused() -> None:
    models = models_of(attentive, {"size": 8, "heads": 2}, {"size": 4, "heads": 4})
    message = r"tier 't1': axis 0 of attention.in_proj_weight stacks 3 x 4 x 1, which does not lie in 3 x 2 x 4"
    with pytest.raises(InvalidTier, match=message):
        make_nested_tiers(models)


def test_make_nested_tiers_other_heads_of_same_size_are_refused() -> None:
    models = models_of(attentive, {"size": 8, "heads": 2}, {"size": 8, "heads": 4})
    with pytest.raises(InvalidTier, match=r"stacks 3 x 4 x 2, which does not lie in 3 x 2 x 4"):
        make_nested_tiers(models)

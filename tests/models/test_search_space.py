"""Search spaces: sampling, counting and cost budgets."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.footprints import is_submodel
from fedloom.models import Model, SearchSpace, build_model, compute_cost, make_space, space_from_models
from fedloom.seeds import generator


def anything(**settings: Any) -> nn.Module:
    return nn.Linear(1, 1)


def blank(**settings: Any) -> Model:
    return build_model("anything", anything, settings, (1,), 1)


sizes = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True).map(tuple)
tables = st.dictionaries(
    st.sampled_from(["width", "depths", "kernels", "widths"]),
    sizes | st.lists(sizes, min_size=1, max_size=3).map(tuple),
    max_size=3,
)


def by_place(choices: Any) -> bool:
    return isinstance(choices[0], tuple)


def enumerated(table: dict[str, Any]) -> set[tuple[Any, ...]]:
    """All combinations of settings, by brute force."""
    each = [list(product(*table[name])) if by_place(table[name]) else list(table[name]) for name in sorted(table)]
    return set(product(*each))


def settings_in(net: Model, table: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(dict(net.settings)[name] for name in sorted(table))


@given(table=tables)
def test_search_space_count_matches_enumeration(table: dict[str, Any]) -> None:
    assert make_space(table).count() == len(enumerated(table))


@given(table=tables, seed=st.integers(0, 10**6))
def test_search_space_sample_is_among_choices(table: dict[str, Any], seed: int) -> None:
    net = make_space(table).sample(blank(other=7), generator(seed, "test"))
    assert settings_in(net, table) in enumerated(table)
    assert dict(net.settings)["other"] == 7


@given(table=tables)
def test_search_space_smallest_and_largest_are_extreme_in_every_position(table: dict[str, Any]) -> None:
    listed = enumerated(table)
    for net, pick in ((make_space(table).smallest(blank()), min), (make_space(table).largest(blank()), max)):
        actual = settings_in(net, table)
        assert actual in listed
        for index, name in enumerate(sorted(table)):
            here = [one[index] for one in listed]
            best = tuple(map(pick, zip(*here, strict=True))) if by_place(table[name]) else pick(here)
            assert actual[index] == best


@given(table=tables)
def test_make_space_ignores_order_of_choices(table: dict[str, Any]) -> None:
    def backwards(choices: Any) -> Any:
        return tuple(one[::-1] for one in choices) if by_place(choices) else choices[::-1]

    assert make_space({name: backwards(table[name]) for name in reversed(table)}) == make_space(table)


def test_search_space_sample_reaches_every_subnet() -> None:
    table = {"depths": ((1,), (1, 2)), "width": (0.25, 0.5, 1.0)}
    draw = generator(0, "test")
    drawn = {settings_in(make_space(table).sample(blank(), draw), table) for _ in range(200)}
    assert drawn == enumerated(table)


def test_make_space_without_choices_is_model_itself() -> None:
    assert make_space({}).count() == 1
    assert make_space({}).sample(blank(width=3), generator(0, "test")) == blank(width=3)


def test_make_space_none_is_largest() -> None:
    result = make_space({"stages": (None, 3, 1)})
    assert dict(result.smallest(blank()).settings)["stages"] == 1
    assert dict(result.largest(blank()).settings)["stages"] is None


tiers = st.lists(
    st.fixed_dictionaries(
        {
            "width": st.sampled_from([0.25, 0.5, 1.0]),
            "depths": st.tuples(st.integers(1, 3), st.integers(1, 3)),
            "stages": st.none() | st.integers(1, 2),
            "same": st.just(5),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(tiers=tiers, seed=st.integers(0, 10**6))
def test_space_from_models_combines_differing_settings(tiers: list[dict[str, Any]], seed: int) -> None:
    models = [blank(**tier) for tier in tiers]
    result = space_from_models(models)
    names = {name for name, _ in result.choices}
    assert names == {name for name in tiers[0] if len({tier[name] for tier in tiers}) > 1}
    table = dict(result.choices)
    for tier in tiers:  # every tier is one of the subnets
        assert tuple(tier[name] for name in sorted(names)) in enumerated(table)
    actual = dict(result.sample(models[0], generator(seed, "test")).settings)
    for name in names - {"depths"}:
        assert actual[name] in {tier[name] for tier in tiers}
    if "depths" in names:
        assert all(actual["depths"][n] in {tier["depths"][n] for tier in tiers} for n in (0, 1))


@pytest.fixture
def supernet(tiny_model: Callable[..., Model]) -> tuple[Model, SearchSpace]:
    whole = tiny_model("mobilenet", widths=(4, 6), depths=(1, 2), kernels=(5, 5))
    return whole, make_space({"widths": ((2, 4), (3, 6)), "depths": ((1,), (1, 2)), "kernels": ((3, 5), (3, 5))})


def test_sample_within_never_exceeds_budget(supernet: tuple[Model, SearchSpace]) -> None:
    whole, result = supernet
    least, most = compute_cost(result.smallest(whole)).macs, compute_cost(whole).macs
    drawn = set()
    for seed in range(60):
        budget = least + (most - least) * seed / 59
        net = result.sample_within(whole, generator(seed, "test"), budget)
        assert compute_cost(net).macs <= budget
        drawn.add(net)
    assert len(drawn) > 10


def test_sample_within_extreme_budgets_leave_smallest_or_all(
    supernet: tuple[Model, SearchSpace],
) -> None:
    whole, result = supernet
    assert result.sample_within(
        whole, generator(0, "test"), compute_cost(result.smallest(whole)).macs
    ) == result.smallest(whole)
    draw = generator(0, "test")
    assert {result.sample_within(whole, draw, compute_cost(whole).macs) for _ in range(400)} == {
        whole.with_settings(**dict(zip(("depths", "kernels", "widths"), one, strict=True)))
        for one in enumerated(dict(result.choices))
    }


def test_sample_within_is_uniform(supernet: tuple[Model, SearchSpace]) -> None:
    """Sampled again, not shrunk: no subnet within the budget is twice as frequent as expected."""
    whole, result = supernet
    budget = float(
        np.quantile([compute_cost(result.sample(whole, generator(seed, "cost"))).macs for seed in range(50)], 0.3)
    )
    count: dict[Model, int] = {}
    for seed in range(1500):
        net = result.sample_within(whole, generator(seed, "test"), budget)
        count[net] = count.get(net, 0) + 1
    expected = 1500 / len(count)
    assert len(count) > 6
    assert all(0.5 * expected < times < 1.7 * expected for times in count.values())


def test_search_space_larger_choice_costs_more_and_contains_smaller(supernet: tuple[Model, SearchSpace]) -> None:
    whole, result = supernet
    for seed in range(20):
        net = result.sample(whole, generator(seed, "test"))
        for name, choices in result.choices:
            for index, values in enumerate(choices):
                before = dict(net.settings)[name]
                grown = [(*before[:index], value, *before[index + 1 :]) for value in values]
                nets = [net.with_settings(**{name: one}) for one in grown]
                macs = [compute_cost(one).macs for one in nets]
                assert macs == sorted(set(macs))
                assert all(is_submodel(one.shapes(), nets[-1].shapes()) for one in nets)
                assert is_submodel(nets[-1].shapes(), whole.shapes())

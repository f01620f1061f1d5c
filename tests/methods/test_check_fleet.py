"""Settings that a method must refuse, because it would silently run another experiment."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from fedloom.client import merge_plans
from fedloom.fleet import Fleet, Request, make_nested_tiers
from fedloom.methods import fleet_problem
from fedloom.methods.efedsup import EFedSup
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.fedrolex import FedRolex
from fedloom.methods.fedsup import FedSup
from fedloom.methods.fjord import FjORD
from fedloom.models import MODELS, Model, build_model, space_from_models

SHAPE, CLASSES = (1, 8, 8), 4


def net(family: str = "convnet", **settings: Any) -> Model:
    sizes = {
        "convnet": {"hidden": (4, 8)},
        "preactresnet": {"hidden": (4, 8), "blocks": (1, 1), "exit_after": 1},
        "mobilenet": {"stem": 4, "widths": (4, 8), "depths": (1, 1), "kernels": (5, 5)},
    }
    return build_model(family, MODELS[family], {**sizes[family], **settings}, SHAPE, CLASSES)


def fleet(small: Model, large: Model, shares: tuple[float, float] = (0.5, 0.5), size: int = 4) -> Fleet:
    return Fleet(make_nested_tiers([("small", small), ("large", large)]), shares, size, seed=0)


@pytest.mark.parametrize("turned", [False, True])
def test_space_from_models_includes_default_settings(turned: bool) -> None:
    sizes = [net(width=0.5), net()]
    assert space_from_models(sizes[::-1] if turned else sizes).choices == (("width", (0.5, 1.0)),)


def test_space_from_models_keeps_order_of_block_choices() -> None:
    sizes = [net("mobilenet", depths=(1, 2), kernels=(5, kernels)) for kernels in ((5, 5), (5, 3))]
    assert space_from_models(sizes).choices == (("kernels", ((5,), ((5, 3), (5, 5)))),)


def test_space_from_models_lists_of_different_length_are_not_mixed() -> None:
    small = net(hidden=(4,))
    with pytest.raises(ValueError, match="hidden is a list of different length"):
        space_from_models([small, net()])


@pytest.mark.parametrize("space", [{"classes": (2, 4)}, {"normalization": ("none", "batch")}, {"nothing": (1, 2)}])
def test_fedsup_space_of_invalid_sizes_is_refused(space: Any) -> None:
    assert fleet_problem(FedSup(space=space), fleet(net(width=0.5), net())) is not None


def test_efedsup_unknown_or_too_small_budget_is_refused() -> None:
    tiers = fleet(net(width=0.5), net())
    assert fleet_problem(EFedSup(), tiers) is None
    assert "'smal', which is no tier" in str(fleet_problem(EFedSup(budgets={"smal": 0.3}), tiers))
    assert "no subnet within the budget of 'small'" in str(fleet_problem(EFedSup(budgets={"small": 0.0001}), tiers))


def test_fedhen_report_on_empty_tier_is_refused() -> None:
    tiers = fleet(net("preactresnet", stages=1), net("preactresnet"), shares=(0.1, 0.9))
    assert "'small', which has no device" in str(fleet_problem(FedHeN(report=True), tiers))
    assert fleet_problem(FedHeN(), tiers) is None


def test_fedrolex_layer_after_flattened_map_is_refused() -> None:
    """The 4 x 4 features of each channel would have to roll together."""
    four, pooled = (
        fleet(net("preactresnet", width=0.5, exit_pool=pool), net("preactresnet", exit_pool=pool))
        for pool in ("four", "global")
    )
    assert "exit.classifier.weight" in str(fleet_problem(FedRolex(), four))
    assert fleet_problem(FedRolex(), pooled) is None


def test_fjord_widths_without_width_setting_are_refused() -> None:
    def plain(size: int = 4) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, size), nn.Linear(size, CLASSES))

    small, large = (build_model("plain", plain, {"size": size}, SHAPE, CLASSES) for size in (2, 4))
    assert "no setting `width`" in str(fleet_problem(FjORD(widths=(0.5,)), fleet(small, large)))
    assert fleet_problem(FjORD(), fleet(small, large)) is None


def test_fjord_duplicate_sizes_count_once(world: Callable[..., Any], client_for: Callable[..., Any]) -> None:
    sim = world(widths=(1.0, 0.5), sizes=(8, 8))
    whole = sim.fleet.global_model
    plan = merge_plans([sim.engine(FjORD()).plan(Request(FjORD().train, {}, 1), sim.fleet.devices(1)[0])])
    half = whole.with_settings(width=0.5)
    client = client_for(
        whole, sim.dataset.train, plan, tier_models={"a": whole, "b": half, "c": half.with_settings(widest=1.0)}
    )
    assert len(FjORD()._subnets(client)) == 2
    assert len(FjORD(widths=(0.5, 1.0))._subnets(client)) == 2

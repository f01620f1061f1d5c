"""DepthFL, ScaleFL, InclusiveFL and FIARSE: what they reduce to, what travels, and which fleets they refuse."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.client import Like, Schedule, Sgd
from fedloom.engines.compression import Compression, TopK
from fedloom.fleet import Fleet, make_nested_tiers
from fedloom.methods import Method, fleet_problem
from fedloom.methods.depthfl import DepthFL
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedhen import FedHeN
from fedloom.methods.fiarse import FIARSE, KEPT, _largest
from fedloom.methods.heterofl import HeteroFL
from fedloom.methods.inclusivefl import InclusiveFL
from fedloom.methods.noside import NoSide
from fedloom.methods.scalefl import ScaleFL
from fedloom.models import Model
from fedloom.settings import FrozenDict
from fedloom.tensors import payload_bytes
from fedloom.testing import METHOD_CHECKS, TinyWorld, tiny_model

SIZES = (8, 5, 9, 8, 12)
EXITS = {"hidden": (4, 6, 8), "blocks": (1, 1, 1), "exit_after": "every", "exit_pool": "global"}


def residual(stages: int = 3, **settings: Any) -> Model:
    return tiny_model("preactresnet", **{**EXITS, **settings}, stages=stages)


def three_depths(sizes: tuple[int, ...] = SIZES) -> TinyWorld:
    return TinyWorld.make(models=[("a", residual()), ("b", residual(2)), ("c", residual(1))], sizes=sizes)


def equal_layers(depth: int | None = None, **settings: Any) -> Model:
    return tiny_model("convnet", hidden=(5, 5, 5), exit_after="every", depth=depth, **settings)


def two_depths() -> TinyWorld:
    return TinyWorld.make(models=[("a", equal_layers()), ("b", equal_layers(2))], sizes=(8, 8, 8, 8))


def played(method: Method, sim: TinyWorld) -> Any:
    return sim.play(method, sim.engine(method), rounds=3, participation=0.8)


def test_depthfl_without_distillation_is_fedhen(parcels_equal: Callable[..., bool]) -> None:
    """To the bit: FedHeN has one exit, DepthFL several, and both train all of them on the labels."""
    sim = three_depths()
    found = played(DepthFL(distillation=0.0), sim)
    assert parcels_equal(found, played(FedHeN(), sim))
    assert not parcels_equal(found, played(DepthFL(ramp_up=0), sim))


@pytest.mark.parametrize("method", [DepthFL(), ScaleFL(), InclusiveFL()], ids=repr)
def test_methods_with_exits_on_one_shallow_net_are_fedavg(method: Method, parcels_equal: Callable[..., bool]) -> None:
    """To the bit: a net with a single exit has nothing to distill, and one depth no deeper one to follow."""
    sim = TinyWorld.make(models=[("a", residual(1)), ("b", residual(1))], sizes=SIZES)
    fedavg = FedAvg("examples" if isinstance(method, InclusiveFL) else "uniform")
    assert parcels_equal(played(method, sim), played(fedavg, sim))


def test_scalefl_of_widths_without_exits_is_heterofl(parcels_equal: Callable[..., bool]) -> None:
    sim = TinyWorld.make("convnet", widths=(1.0, 0.5), sizes=SIZES)
    plain = HeteroFL(mask_unseen_labels=False, only_seen_rows=False)
    assert parcels_equal(played(ScaleFL(), sim), played(plain, sim))


def test_scalefl_teacher_gets_no_gradient(bits_equal: Callable[..., bool]) -> None:
    """After one step from equal weights, distillation has changed earlier heads but not the last one."""
    sim = TinyWorld.make(
        models=[("a", residual())], sizes=(8,), schedule=Schedule(1000, 1), optimizer=Sgd(0.1), test_sizes=(2,)
    )
    without, taught = (
        sim.play(one, sim.engine(one), rounds=1)["weights"] for one in (ScaleFL(distillation=0.0), ScaleFL())
    )
    for name in (name for name in taught if name.startswith("exits.") and "classifier.weight" in name):
        assert bits_equal(taught[name], without[name]) == name.startswith("exits.2.")


def test_fiarse_with_all_weights_is_fedavg(parcels_equal: Callable[..., bool]) -> None:
    model = tiny_model("convnet")
    sim = TinyWorld.make(models=[("a", model), ("b", model)], sizes=SIZES)
    found = played(FIARSE(FrozenDict(a=1.0, b=1.0)), sim)
    assert parcels_equal({"weights": found["weights"]}, played(FedAvg("uniform"), sim))
    smaller = played(FIARSE(), sim)  # all and a quarter
    assert not parcels_equal({"weights": smaller["weights"]}, {"weights": found["weights"]})


def test_inclusivefl_one_depth_without_momentum_is_noside(parcels_equal: Callable[..., bool]) -> None:
    """Devices of equal size, so that weights by examples are equal too."""
    sim = TinyWorld.make(models=[("a", equal_layers())], sizes=(8, 8, 8))
    assert parcels_equal(played(InclusiveFL(), sim), played(NoSide("trained_only"), sim))


def test_inclusivefl_full_momentum_moves_top_by_deeper_devices_alone() -> None:
    sim, method = two_depths(), InclusiveFL(momentum=1.0)
    engine, server = sim.engine(method), method.start(sim.fleet, 0)
    first = method.round(server, sim.context(engine, 1))
    second = method.round(first, sim.context(engine, 2))
    for name, top in server["top:2"].items():
        assert torch.equal(first["top:2"][name], top)  # nothing to follow yet
        assert torch.equal(second["top:2"][name], top + first["momentum:2"][name])
        assert bool(first["momentum:2"][name].any())


def test_inclusivefl_depth_without_reply_keeps_its_top() -> None:
    sim, method = two_depths(), InclusiveFL()
    context = sim.context(sim.engine(method))
    deep = replace(context, cohort=[device for device in context.cohort if device.tier == "a"])
    server = method.start(sim.fleet, 0)
    made = method.round(server, deep)
    assert all(torch.equal(made["top:2"][name], top) for name, top in server["top:2"].items())
    assert torch.equal(made["weights"]["exits.1.weight"], server["weights"]["exits.1.weight"])


@pytest.mark.parametrize("check", ["check_blocks_train_alike", "check_redrawn_tiers", "check_resume", "check_learning"])
def test_inclusivefl_with_two_depths_of_convnet_passes(check: str) -> None:
    METHOD_CHECKS[check](InclusiveFL(), two_depths())


@pytest.mark.parametrize("check", ["check_blocks_train_alike", "check_lost_reply", "check_resume", "check_compression"])
def test_depthfl_with_feddyn_passes(check: str) -> None:
    METHOD_CHECKS[check](DepthFL(ramp_up=0, feddyn=0.1), three_depths())


def test_depthfl_strength_grows_to_its_value() -> None:
    method = DepthFL(distillation=2.0, ramp_up=4)
    found = [method.strength_at(number) for number in (1, 3, 5, 99)]
    assert found == pytest.approx([2 * math.exp(-5), 2 * math.exp(-5 / 4), 2.0, 2.0])
    assert DepthFL(ramp_up=0).strength_at(1) == 1.0


MIXED_CHECKS = [
    "check_uploads", "check_blocks_train_alike", "check_redrawn_tiers", "check_resume", "check_compression",
    "check_messages", "check_lost_reply", "check_evaluation", "check_learning",
]  # fmt: skip


@pytest.mark.parametrize("check", MIXED_CHECKS)
def test_fiarse_with_whole_and_masked_devices_passes(check: str) -> None:
    model = tiny_model("mlp")
    sim = TinyWorld.make(models=[("a", model), ("b", model)], sizes=SIZES)
    METHOD_CHECKS[check](FIARSE(FrozenDict(a=1.0, b=0.25)), sim)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_fiarse_bytes_are_those_of_kept_entries_and_a_bit_each(share: float) -> None:
    model = tiny_model("convnet")
    sim = TinyWorld.make(models=[("a", model), ("b", model)], sizes=(8, 8))
    method = FIARSE(FrozenDict(a=1.0, b=share))
    context = sim.context(sim.engine(method))
    method.round(method.start(sim.fleet, 0), context)
    entries = sum(shape.numel() for shape in model.shapes().values() if len(shape) > 1)
    vectors = sum(shape.numel() for shape in model.shapes().values() if len(shape) == 1)
    full, part = 4 * (entries + vectors), 4 * (int(share * entries) + vectors)
    assert context.traffic.bytes_up == full + part
    assert context.traffic.bytes_down == full + part + -(-entries // 8)


def test_fiarse_device_trains_entries_of_its_mask_alone() -> None:
    model = tiny_model("mlp")
    sim = TinyWorld.make(models=[("a", model), ("b", model)], shares=(0.0, 1.0), sizes=(8, 8))
    method = FIARSE(FrozenDict(a=1.0, b=0.2))
    server = method.start(sim.fleet, 0)
    made = method.round(server, sim.context(sim.engine(method)))
    old, new = (
        torch.cat([parcel["weights"][name].flatten() for name, shape in model.shapes().items() if len(shape) > 1])
        for parcel in (server, made)
    )
    largest = old.abs().sort(descending=True).indices[: int(0.2 * len(old))]
    outside = torch.ones(len(old), dtype=torch.bool)
    outside[largest] = False
    assert torch.equal(new[outside], old[outside])
    assert float((new != old)[largest].float().mean()) > 0.5
    evaluated = method.eval_targets(made)["server"].weights(sim.fleet.tiers[1])  # type: ignore[union-attr, call-arg]
    assert sum(int((w != 0).sum()) for name, w in evaluated.items() if w.dim() > 1) == int(0.2 * len(old))


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.data())
def test_fiarse_larger_masks_contain_smaller_ones(values: list[int], data: st.DataObject) -> None:
    entries = torch.tensor(values, dtype=torch.float64)
    small, large = sorted(data.draw(st.tuples(*[st.integers(1, len(values))] * 2)))
    inner, outer = (set(_largest(entries, torch.tensor(count)).tolist()) for count in (small, large))
    assert inner <= outer
    assert (len(inner), len(outer)) == (small, large)
    left_out = set(range(len(values))) - inner
    assert not left_out or max(abs(values[n]) for n in left_out) <= min(abs(values[n]) for n in inner)


def test_compression_keeps_no_residual_of_entries_that_change() -> None:
    compression, method = Compression(TopK(0.1)), FIARSE()
    upload = {"weights": {KEPT: torch.arange(100.0).view(1, 100)}}
    inbox = {"weights": {KEPT: torch.zeros(1, 100)}}
    assert method.train.sends["weights"] == Like("weights", same_entries=False)
    assert compression.encode_up(method.train, inbox, upload, {})[1] == {}
    assert compression.encode_up(DepthFL().train, inbox, upload, {})[1] != {}
    assert payload_bytes(compression.encode_up(method.train, inbox, upload, {})[0]) < payload_bytes(upload)


def fleet_of(*models: Model, assignment: Any = "fixed") -> Fleet:
    tiers = make_nested_tiers(list(zip("abc", models, strict=False)))
    return Fleet(tiers, (1 / len(models),) * len(models), 6, seed=0, assignment=assignment)


@pytest.mark.parametrize(
    ("method", "fleet", "message"),
    [
        (DepthFL(), fleet_of(tiny_model("mlp")), "is about early exits"),
        (ScaleFL(), fleet_of(tiny_model("convnet")), "is about early exits"),
        (DepthFL(feddyn=0.1), fleet_of(residual(), residual(1), assignment="redrawn"), "fleet.assignment"),
        (InclusiveFL(), fleet_of(residual(), residual(1)), "set method.momentum = 0"),
        (InclusiveFL(), fleet_of(equal_layers(), equal_layers(width=0.5)), "has a part of"),
        (InclusiveFL(), fleet_of(tiny_model("unet")), "names no list of them"),
        (FIARSE(FrozenDict(a=1.0)), fleet_of(tiny_model("mlp"), tiny_model("mlp")), "none for tier 'b'"),
        (FIARSE(), fleet_of(tiny_model("mlp"), tiny_model("mlp", width=0.5)), "the same model"),
    ],
)  # fmt: skip
def test_fleet_that_does_not_fit_is_refused_with_reason(method: Method, fleet: Fleet, message: str) -> None:
    assert message in str(fleet_problem(method, fleet))


def test_inclusivefl_without_momentum_takes_layers_of_unequal_shape() -> None:
    assert fleet_problem(InclusiveFL(momentum=0.0), fleet_of(residual(), residual(1))) is None

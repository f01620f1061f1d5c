"""Parameters with requires_grad=False: nothing trains, sends, keeps or aggregates them, whatever the method."""

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import Schedule, Sgd
from fedloom.engines import BytesTransport, Compression, Refusal
from fedloom.engines.compression import TopK
from fedloom.engines.protocol import Expected, decode_reply, encode_reply, model_spec
from fedloom.evaluation.test_set import exit_names
from fedloom.exporting.module import build_export_module
from fedloom.fleet import Fleet, Reply, ServerModel, find_nesting_problem, make_tiers
from fedloom.footprints import find_footprint, find_foreign_frozen, subnet_footprint
from fedloom.methods import METHODS, Method, fleet_problem
from fedloom.methods.fjord import FjORD
from fedloom.models import MODELS, Family, Model, StepSeeds, build_model, chain_models
from fedloom.models.structure import as_outputs, part_of
from fedloom.tensors import Parcel, Tensors, payload_bytes
from fedloom.testing import CheckFailed, InterceptingEngine, TinyWorld, check_model
from fedloom.testing.doubles import committed_states, with_compression, with_transports
from fedloom.testing.methods import DEVICE_LABELS, DEVICE_SIZES
from fedloom.testing.world import home_family
from tests.conftest import build_method

HEAVY = Sgd(0.1, momentum=0.9, weight_decay=0.1)  # would move every weight that it touches
SAME_SIZE = ("fedrolex",)  # methods that refuse frozen weights of which tiers have parts


def freeze_some(name: str, same_size: bool) -> Family:
    """A built-in family in which the first layer is frozen: or one whose size is the same in every tier."""
    build = MODELS[name]

    @wraps(build)
    def frozen(**settings: Any) -> nn.Module:
        module = build(**settings)
        chosen = [weight for _, weight in module.named_parameters()]
        (chosen[-1] if same_size else chosen[0]).requires_grad_(False)
        return module

    return frozen


def frozen_world(name: str, method: Method) -> TinyWorld:
    family = freeze_some(home_family(method), name in SAME_SIZE)
    return TinyWorld.for_method(method, family, sizes=DEVICE_SIZES, labels=DEVICE_LABELS, optimizer=HEAVY)


def names_in(parcel: Parcel | None) -> set[str]:
    return {name for bundle in (parcel or {}).values() for name in bundle}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_on_partly_frozen_model_neither_sends_nor_keeps_frozen_weights(name: str) -> None:
    method = build_method(name)
    world = frozen_world(name, method)
    frozen = {key for tier in world.fleet.tiers for key in tier.model.frozen_shapes()}
    engine = world.engine(method)
    listening = InterceptingEngine(engine)
    server = world.play(method, listening, rounds=2)
    assert frozen
    assert not world.refusals
    assert not frozen & names_in(server)
    assert not frozen & {key for reply in listening.delivered for key in names_in(reply.upload)}
    assert not frozen & {key for ask in listening.requests for inbox in ask.inboxes.values() for key in names_in(inbox)}
    assert not frozen & {key for state in committed_states(engine).values() for key in names_in(state)}
    assert world.evaluate(method, server, engine)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_method_on_partly_frozen_model_serves_frozen_weights_unchanged(name: str) -> None:
    """The exported module computes what torch does with the base of the largest model, or with its part of that."""
    method = build_method(name)
    world = frozen_world(name, method)
    server = world.play(method, world.engine(method), rounds=2)
    large = world.fleet.global_model
    torch.manual_seed(0)
    base = {key: w.detach() for key, w in large.build(**dict(large.settings)).named_parameters() if not w.requires_grad}
    for target in method.eval_targets(server).values():
        for tier in world.fleet.active_tiers if isinstance(target, ServerModel) else ():
            model, weights = tier.model, dict(target.weights(tier))
            weights |= {key: torch.ones(shape) for key, shape in model.statistics().items()}
            shapes = {key: weight.shape for key, weight in base.items()}
            frozen = find_footprint(model.frozen_shapes(), shapes).read(base)
            torch.manual_seed(5)
            plain = model.build(**dict(model.settings)).eval()
            assert not plain.load_state_dict({**weights, **frozen}, strict=False).unexpected_keys
            exported = build_export_module(model, weights)
            x = model.random_inputs(torch.Generator().manual_seed(0), 4)
            torch.testing.assert_close(exported(x), as_outputs(plain(x)).logits, rtol=1e-4, atol=1e-4)
    assert find_nesting_problem(world.fleet) is None or method.info.heterogeneity != "nested"


# -- a frozen base and adapters of unequal rank ------------------------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer and a trained pair of thin matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.mT @ self.up.mT  # type: ignore[no-any-return]


class Adapted(nn.Module):
    def __init__(self, pixels: int, classes: int, rank: int) -> None:
        super().__init__()
        self.first, self.second = LowRank(pixels, 16, rank), LowRank(16, 16, rank)
        self.classifier = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.second(F.relu(self.first(x.flatten(1))))))  # type: ignore[no-any-return]


def lora(*, input_shape: tuple[int, ...], classes: int, rank: int = 16) -> nn.Module:
    return Adapted(torch.Size(input_shape).numel(), classes, rank)


RANKS = {"large": 16, "middle": 4, "small": 1}
BASE = {"first.base.weight", "first.base.bias", "second.base.weight", "second.base.bias"}


def lora_model(rank: int) -> Model:
    return build_model("lora", lora, {"rank": rank}, (1, 6, 6), 4)


def lora_world() -> TinyWorld:
    models = [(name, lora_model(rank)) for name, rank in RANKS.items()]
    return TinyWorld.make(models=models, sizes=DEVICE_SIZES, labels=DEVICE_LABELS, optimizer=HEAVY)


def test_lora_tiers_nest_by_rank() -> None:
    fleet = lora_world().fleet
    assert find_nesting_problem(fleet) is None
    assert fleet.largest.name == "large"
    for tier in fleet.tiers:
        assert set(tier.model.frozen_shapes()) == BASE
        assert not BASE & set(tier.model.shapes())
        assert tier.footprint.read(fleet.global_model.initial_weights(0))["second.down"].shape == (RANKS[tier.name], 16)


def test_lora_tiers_share_one_base() -> None:
    """Each rank draws other numbers after its first adapter; the base of the largest counts."""
    fleet = lora_world().fleet
    drawn = [dict(lora_model(rank).module().named_parameters())["second.base.weight"] for rank in RANKS.values()]
    assert not torch.equal(drawn[0], drawn[1])
    for tier in fleet.tiers:
        assert torch.equal(tier.model.frozen_weights()["second.base.weight"], drawn[0])
        assert torch.equal(tier.model.module(7).get_parameter("second.base.weight"), drawn[0])
        assert tier.model.frozen_sha256() == fleet.global_model.frozen_sha256() != ""


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedrolex", "decouple", "fedsup", "standalone", "fedhenn"])
def test_lora_only_adapters_travel(name: str) -> None:
    method, world = build_method(name), lora_world()
    assert fleet_problem(method, world.fleet) is None
    engine = InterceptingEngine(world.engine(method))
    server = world.play(method, engine, rounds=2)
    assert not world.refusals
    assert not BASE & names_in(server)
    for reply in engine.delivered:
        if "weights" in reply.upload:
            rank = 16 if name == "fedsup" else RANKS[reply.device.tier]  # it trains subnets of the whole
            sent = payload_bytes({"weights": reply.upload["weights"]})
            assert sent <= 4 * (rank * (36 + 16) + rank * (16 + 16) + 4 * 16 + 4)


@given(rank=st.integers(1, 16), seed=st.integers(0, 3))
def test_lora_of_any_rank_is_part_of_largest(rank: int, seed: int) -> None:
    """The smaller adapters in the larger ones, with zeros for the rest, compute the same."""
    large = lora_model(16)
    small, x = large.with_settings(rank=rank), torch.randn(1, 3, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
    draw = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=draw) for name, shape in small.shapes().items()}
    zeros = {name: torch.zeros(shape) for name, shape in large.shapes().items()}
    whole = subnet_footprint(small, large).write(zeros, weights)
    outputs = [model(add_axis(each), x).logits for model, each in ((small, weights), (large, whole))]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def add_axis(weights: Tensors, devices: int = 1) -> dict[str, Tensor]:
    return {name: weight.expand(devices, *weight.shape) for name, weight in weights.items()}


def test_compression_ignores_frozen_weights() -> None:
    method, world = build_method("heterofl"), lora_world()
    engine = with_compression(world.engine(method), Compression(TopK(0.5), None))
    server = world.play(method, engine, rounds=2)
    assert not world.refusals
    assert not BASE & names_in(server)


# -- training ----------------------------------------------------------------------------------------------------------


def test_training_beside_frozen_weights_is_that_of_torch() -> None:
    """One device, one epoch: torch's own optimizer on the parameters that require a gradient."""
    method = METHODS["fedavg"]()
    world = TinyWorld.make(
        models=[("a", lora_model(4))], sizes=(8,), optimizer=HEAVY, schedule=Schedule(8, 3), test_sizes=(2,)
    )
    server = world.play(method, world.engine(method), rounds=1)
    model = world.fleet.global_model
    module = model.module().train()
    module.load_state_dict(model.initial_weights(0), strict=False)
    optimizer = torch.optim.SGD(
        [w for w in module.parameters() if w.requires_grad], 0.1, momentum=0.9, weight_decay=0.1
    )
    x, y = world.dataset.preparation(world.dataset.train.x), world.dataset.train.y
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    expected = {name: w.detach() for name, w in module.named_parameters() if w.requires_grad}
    assert set(expected) == set(server["weights"])
    for name, weight in server["weights"].items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["convnet", "preresnet", "lstm", "transformer"])
def test_block_of_partly_frozen_models_computes_what_each_computes_alone(family: str) -> None:
    world = TinyWorld.make(freeze_some(family, same_size=False), widths=(1.0,))
    model = world.fleet.global_model
    x = model.random_inputs(torch.Generator().manual_seed(0), 3, 4)
    draw = torch.Generator().manual_seed(1)
    block = {name: torch.randn(3, *shape, generator=draw) * 0.3 for name, shape in model.shapes().items()}
    together = model(block, x, StepSeeds((1, 2, 3))).logits
    for number in range(3):
        alone = {name: weight[number : number + 1] for name, weight in block.items()}
        found = model(alone, x[number : number + 1], StepSeeds((number + 1,))).logits[0]
        torch.testing.assert_close(together[number], found, rtol=1e-3, atol=1e-4)


def test_checks_of_models_pass_for_partly_frozen_ones() -> None:
    report = check_model(stem)
    assert "check_model_trains" in report.passed
    assert not report.notes


# -- width slices, and what is refused ---------------------------------------------------------------------------------


def stem(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0, frozen: bool = True) -> nn.Module:
    channels = int(8 * width)
    first = nn.Conv2d(input_shape[0], channels, 3).requires_grad_(not frozen)
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(channels * 16, classes))


def fleet_of(*models: Model) -> Fleet:
    tiers = make_tiers([(name, model) for name, model in zip("abc", models, strict=False)])
    return Fleet(tiers, (1 / len(tiers),) * len(tiers), len(tiers), seed=0)


def stem_model(build: Family = stem, **settings: Any) -> Model:
    return build_model("stem", build, settings, (1, 6, 6), 4)


def test_narrow_frozen_stem_is_slice_of_wide_one() -> None:
    wide, narrow = (tier.model for tier in fleet_of(stem_model(), stem_model(width=0.5)).tiers)
    for name, weight in narrow.frozen_weights().items():
        assert torch.equal(weight, wide.frozen_weights()[name][: len(weight)])
    assert not torch.equal(stem_model(width=0.5).frozen_weights()["0.bias"], narrow.frozen_weights()["0.bias"])
    assert torch.equal(narrow.module(3).get_parameter("0.weight"), narrow.frozen_weights()["0.weight"])


def test_frozen_weights_first_used_in_evaluation_can_be_trained_on() -> None:
    """They outlive the evaluation, and autograd takes no tensors that inference mode made."""

    def middle(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> nn.Module:
        size = int(8 * width)
        frozen = nn.Linear(size, size).requires_grad_(False)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, size), frozen, nn.Linear(size, classes))

    narrow = fleet_of(stem_model(middle), stem_model(middle, width=0.5)).tiers[1].model
    weights = {name: torch.rand(1, *shape) for name, shape in narrow.shapes().items()}
    x = torch.rand(1, 4, 1, 6, 6)
    with torch.inference_mode():
        narrow(weights, x)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    narrow(leaves, x, StepSeeds((0,))).logits.sum().backward()
    assert all(weight.grad is not None for weight in leaves.values())


def test_subnet_and_its_subnet_have_slices_of_the_same_stem() -> None:
    wide = stem_model()
    half, quarter = wide.with_settings(width=0.5), wide.with_settings(width=0.5).with_settings(width=0.25)
    assert quarter.frozen_from == wide == quarter.with_settings(width=1.0).frozen_from or wide
    assert find_foreign_frozen(half, wide) is None
    assert find_foreign_frozen(quarter, half) is None


def base_values(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0, sliced: bool = True) -> nn.Module:
    """Loads its frozen weights, as from a file: the first channels of one base, or a base of each width."""
    module = stem(input_shape=input_shape, classes=classes, width=width)
    with torch.no_grad():
        for weight in module[0].parameters():
            values = torch.arange(weight.numel(), dtype=torch.float32).reshape(weight.shape) / 100
            weight.copy_(values if sliced else values + width)
    return module


def test_loaded_base_that_is_sliced_alike_is_taken() -> None:
    fleet = fleet_of(stem_model(base_values), stem_model(base_values, width=0.5))
    assert find_nesting_problem(fleet) is None


def test_loaded_base_of_other_values_is_refused_by_nested_methods() -> None:
    fleet = fleet_of(stem_model(base_values, sliced=False), stem_model(base_values, width=0.5, sliced=False))
    problem = find_nesting_problem(fleet)
    assert problem is not None
    assert "'b'" in problem
    assert "0.weight is frozen at other values" in problem
    own = dict(fleet.tiers[1].model.build(**dict(fleet.tiers[1].model.settings)).named_parameters())
    assert torch.equal(fleet.tiers[1].model.frozen_weights()["0.weight"], own["0.weight"])
    assert fleet_problem(METHODS["standalone"](), fleet) is None
    with pytest.raises(ValueError, match=r"frozen 0\.weight of the smaller size"):
        subnet_footprint(fleet.tiers[1].model, fleet.tiers[0].model)


@pytest.mark.parametrize(("large", "small", "words"), [
    (False, True, "0.weight is frozen, but trained in the global model"),
    (True, False, "0.weight is trained, but frozen in the global model"),
])  # fmt: skip
def test_weight_frozen_in_one_tier_only_is_refused(large: bool, small: bool, words: str) -> None:
    tiers = stem_model(frozen=large), stem_model(frozen=small, width=0.125 if large else 1.0)
    problem = find_nesting_problem(fleet_of(*tiers))
    assert problem is not None
    assert words in problem


def test_fedrolex_refuses_sliced_frozen_stem() -> None:
    fleet = fleet_of(stem_model(), stem_model(width=0.5))
    assert fleet_problem(METHODS["fedrolex"](), fleet) == (
        "fedrolex cannot roll 0.weight, which is frozen: give every tier the same size of this layer"
    )


def test_fjord_refuses_width_with_base_of_its_own() -> None:
    fleet = fleet_of(stem_model(base_values, sliced=False))
    problem = fleet_problem(FjORD(widths=(0.5,)), fleet)
    assert problem is not None
    assert "its frozen 0.weight has other values" in problem
    assert fleet_problem(FjORD(widths=(0.5,)), fleet_of(stem_model(base_values))) is None


def all_frozen(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    return stem(input_shape=input_shape, classes=classes).requires_grad_(False)


def test_model_without_trained_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        stem_model(all_frozen).check_output_size()


def test_reply_of_device_with_another_base_is_refused() -> None:
    """Shapes and settings agree; only the values of the base differ."""
    same, other = stem_model(base_values), stem_model(base_values)

    def shifted(**settings: Any) -> nn.Module:
        module = base_values(**settings)
        with torch.no_grad():
            module[0].weight += 1
        return module

    assert model_spec(same) == model_spec(other) != model_spec(replace(same, build=shifted))


# -- what looks at a model ---------------------------------------------------------------------------------------------


def test_initial_weights_without_frozen_ones_are_those_of_module() -> None:
    model = stem_model()
    assert set(model.initial_weights(0)) == set(model.shapes()) == {"3.weight", "3.bias"}
    assert set(model.frozen_weights()) == {"0.weight", "0.bias"}
    assert [
        model.frozen_sha256() == model.with_settings(width=1.0).frozen_sha256(),
        stem_model(frozen=False).frozen_sha256(),
    ] == [True, ""]


def test_frozen_weights_do_not_depend_on_seed() -> None:
    model = stem_model()
    modules = [model.module(seed) for seed in (0, 1, 2)]
    assert all(torch.equal(one.get_parameter("0.weight"), modules[0].get_parameter("0.weight")) for one in modules)
    assert not torch.equal(modules[0].get_parameter("3.weight"), modules[1].get_parameter("3.weight"))


def test_frozen_head_is_no_head() -> None:
    def head(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Linear(5, classes).requires_grad_(False))

    model = stem_model(head)
    assert (model.label_rows(), model.head(), set(model.last_exit_weights())) == ((), (), {"1.weight", "1.bias"})
    assert exit_names(model) == ("logits",)
    assert model.feature_width() == 5


def test_submodel_and_chain_keep_frozen_weights() -> None:
    fleet = lora_world().fleet
    small = fleet.tiers[2].model
    part = small.submodel("second")
    assert set(part.frozen_shapes()) == {"base.weight", "base.bias"}
    assert torch.equal(part.frozen_weights()["base.weight"], small.frozen_weights()["second.base.weight"])
    chain = chain_models(small.submodel("second"), small.submodel("classifier"))
    assert torch.equal(chain.frozen_weights()["first.base.weight"], small.frozen_weights()["second.base.weight"])


def test_messages_of_partly_frozen_models_pass_as_bytes() -> None:
    method, world = build_method("heterofl"), lora_world()
    engine = with_transports(world.engine(method), BytesTransport())
    in_memory = world.play(method, world.engine(method), rounds=2)
    as_bytes = world.play(method, engine, rounds=2)
    assert not world.refusals
    assert all(torch.equal(weight, as_bytes["weights"][name]) for name, weight in in_memory["weights"].items())


def test_base_that_is_drawn_elsewhere_is_refused() -> None:
    draw = np.random.default_rng(0)

    def careless(*, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        module = stem(input_shape=input_shape, classes=classes)
        with torch.no_grad():
            module[0].weight.copy_(torch.from_numpy(draw.normal(size=tuple(module[0].weight.shape))))
        return module

    with pytest.raises(ValueError, match=r"the frozen 0\.weight has other values every time"):
        stem_model(careless).check_output_size()


def test_all_frozen_module_fails_check_of_models() -> None:
    with pytest.raises(CheckFailed, match="all of them are frozen"):
        check_model(all_frozen)


def test_message_from_device_with_another_base_is_refused() -> None:
    def shifted(**settings: Any) -> nn.Module:
        module = base_values(**settings)
        with torch.no_grad():
            module[0].weight += 1
        return module

    server, device = (fleet_of(replace(stem_model(), build=build)).device(0, 1) for build in (base_values, shifted))
    inbox = {"weights": server.model.initial_weights(0)}
    asked, answered = (Expected("run", 1, 0, METHODS["fedavg"]().train, one, inbox) for one in (server, device))
    honest, other = (decode_reply(encode_reply(one.header(3), inbox), asked) for one in (asked, answered))
    assert isinstance(honest, Reply)
    assert isinstance(other, Refusal)
    assert other.code == "TIER_MISMATCH"
    assert "frozen weights differ" in other.reason


SIDES = st.tuples(st.integers(1, 6), st.integers(0, 4))


@given(sides=st.lists(SIDES, min_size=1, max_size=4))
def test_part_of_frozen_weight_lies_where_footprint_of_trained_one_does(sides: list[tuple[int, int]]) -> None:
    """Trained weights are cut by the footprint; what is frozen beside them must be cut at the same place."""
    small, large = (torch.Size(each) for each in ([a for a, _ in sides], [a + b for a, b in sides]))
    whole = torch.arange(large.numel()).reshape(large)
    expected = find_footprint({"w": small}, {"w": large}).read({"w": whole})["w"]
    assert torch.equal(part_of(whole, torch.empty(small)), expected)


def test_part_of_smaller_weight_is_left_out() -> None:
    own = torch.ones(3, 2)
    for other in (None, torch.ones(2, 2), torch.ones(3), torch.ones(3, 2, 1)):
        assert part_of(other, own) is own

"""HeteroFL's invariants: aggregation compared with a loop over every weight, the width scaler and the mask."""

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.client import Batch, Schedule, Sgd, gradient, mask_logits, supervised_loss
from fedloom.evaluation import BatchNormStatistics
from fedloom.fleet import Device, Fleet, Reply, Request, RoundContext, make_nested_tiers
from fedloom.methods import fleet_problem
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.tensors import Parcel

WIDTHS = {"a": 1.0, "b": 0.5, "c": 0.25}
CLASSES = 4

devices_in_round = st.lists(
    st.tuples(st.sampled_from(sorted(WIDTHS)), st.sets(st.integers(0, CLASSES - 1))), min_size=1, max_size=5
)


IMAGES = sorted(name for name, build in MODELS.items() if "tokens" not in inspect.signature(build).parameters)
QUICK = ("convnet", "mobilenet", "preresnet")
SCALED = [  # text models have no batch norm that could undo a scale
    name
    for name, build in MODELS.items()
    if "scaler" in (named := inspect.signature(build).parameters) and "tokens" not in named
]


def fleet_of(tiny_model: Callable[..., Model], family: str, devices: int) -> Fleet:
    models = [(name, tiny_model(family, width=width)) for name, width in WIDTHS.items()]
    return Fleet(make_nested_tiers(models), (0.4, 0.3, 0.3), devices, seed=0)


def random_replies(
    tiny_model: Callable[..., Model], family: str, round_of: list[tuple[str, set[int]]], seed: int
) -> tuple[Fleet, dict[str, Tensor], list[Reply]]:
    """A fleet, a global model, and replies with random weights from devices of these tiers and labels."""
    fleet, draw = fleet_of(tiny_model, family, len(round_of)), torch.Generator().manual_seed(seed)
    old = {name: torch.randn(shape, generator=draw) for name, shape in fleet.global_model.shapes().items()}
    tiers = {tier.name: tier for tier in fleet.tiers}
    replies = []
    for number, (name, labels) in enumerate(round_of):
        tier = tiers[name]
        device = Device(fleet.name(number), name, tier.model, tier.footprint)
        weights = {key: torch.randn(shape, generator=draw) for key, shape in tier.model.shapes().items()}
        seen = torch.tensor([label in labels for label in range(CLASSES)])
        replies.append(Reply(device, 1, {"weights": weights, "labels": {"seen": seen}}))
    return fleet, old, replies


def play(
    scripted: Callable[..., Any],
    fleet: Fleet,
    old: dict[str, Tensor],
    replies: list[Reply],
    method: HeteroFL | None = None,
) -> dict[str, Tensor]:
    answers = {reply.device: reply for reply in replies}
    context = RoundContext(1, list(answers), fleet, scripted(lambda device, inbox: answers[device]))
    return dict((method or HeteroFL()).round({"weights": old}, context)["weights"])


def mean_of_holders(
    name: str, index: tuple[int, ...], old: Tensor, replies: list[Reply], rows: tuple[str, ...], masked: bool
) -> Tensor:
    """One weight: the mean over devices whose slice has it, except classifier rows of absent labels."""
    total, holders = 0.0, 0
    for reply in replies:
        sent = reply.upload["weights"][name]
        held = all(at < size for at, size in zip(index, sent.shape, strict=True))
        absent = masked and name in rows and not bool(reply.upload["labels"]["seen"][index[0]])
        if held and not absent:
            total += float(sent[index])
            holders += 1
    return torch.tensor(total / holders, dtype=torch.float64).to(old.dtype) if holders else old[index]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("net", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in IMAGES])
@given(round_of=devices_in_round, seed=st.integers(0, 1000))
def test_heterofl_aggregate_is_mean_over_holders(
    round_of: list[tuple[str, set[int]]],
    seed: int,
    masked: bool,
    net: str,
    tiny_model: Callable[..., Model],
    scripted: Callable[..., Any],
) -> None:
    fleet, old, replies = random_replies(tiny_model, net, round_of, seed)
    made = play(scripted, fleet, old, replies, HeteroFL(only_seen_rows=masked))
    assert made.keys() == old.keys()
    for name, tensor in old.items():
        for index in torch.ones(tensor.shape).nonzero().tolist():
            at = tuple(index)
            expected = mean_of_holders(name, at, tensor, replies, fleet.global_model.label_rows(), masked)
            assert float(made[name][at]) == float(expected), (name, at)


@given(round_of=devices_in_round, seed=st.integers(0, 1000), shuffle=st.randoms(use_true_random=False))
def test_heterofl_reply_order_does_not_matter(
    round_of: list[tuple[str, set[int]]],
    seed: int,
    shuffle: random.Random,
    tiny_model: Callable[..., Model],
    scripted: Callable[..., Any],
) -> None:
    fleet, old, replies = random_replies(tiny_model, "convnet", round_of, seed)
    shuffled = shuffle.sample(replies, len(replies))
    made, again = play(scripted, fleet, old, replies), play(scripted, fleet, old, shuffled)
    assert all(torch.equal(made[name], again[name]) for name in old)


def test_heterofl_small_cohort_keeps_other_weights(
    family: str, tiny_model: Callable[..., Model], scripted: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    fleet, old, replies = random_replies(tiny_model, family, [("c", set(range(CLASSES)))] * 2, 5)
    made = play(scripted, fleet, old, replies)
    for name, tensor in old.items():
        outside = torch.ones(tensor.shape, dtype=torch.bool)
        outside[tuple(slice(0, size) for size in replies[0].upload["weights"][name].shape)] = False
        assert bits_equal(made[name][outside], tensor[outside])
        assert not bool((made[name][~outside] == tensor[~outside]).any())


def test_heterofl_unchanged_uploads_change_nothing(
    family: str, tiny_model: Callable[..., Model], scripted: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """Every device returns its slice unchanged: the old model, to the bit, for any cohort."""
    round_of = [(name, set(range(number))) for number, name in enumerate("abcabcab", start=1)]
    fleet, old, replies = random_replies(tiny_model, family, round_of[:7], 2)
    same = [replace(reply, upload={**reply.upload, "weights": reply.device.footprint.read(old)}) for reply in replies]
    made = play(scripted, fleet, old, same)
    assert all(bits_equal(made[name], tensor) for name, tensor in old.items())


def test_heterofl_inbox_is_slice_of_tier(
    family: str, tiny_model: Callable[..., Model], scripted: Callable[..., Any]
) -> None:
    fleet, old, replies = random_replies(tiny_model, family, [("a", {0}), ("b", {1}), ("c", {2})], 3)
    answers = {reply.device: reply for reply in replies}
    engine = scripted(lambda device, inbox: answers[device])
    HeteroFL().round({"weights": old}, RoundContext(1, list(answers), fleet, engine))
    ((task, inboxes),) = engine.asked
    assert task == "train"
    for device, inbox in inboxes.items():
        assert {name: tensor.shape for name, tensor in inbox["weights"].items()} == dict(device.model.shapes())
        for name, tensor in inbox["weights"].items():
            assert torch.equal(tensor, old[name][tuple(slice(0, size) for size in tensor.shape)])


def test_footprint_write_then_read_is_identity(family: str, tiny_model: Callable[..., Model]) -> None:
    fleet = fleet_of(tiny_model, family, 3)
    old = fleet.global_model.initial_weights(0)
    for tier in fleet.tiers:
        small = {name: tensor + 1 for name, tensor in tier.footprint.read(old).items()}
        whole = {name: tensor.clone() for name, tensor in old.items()}
        for name, tensor in tier.footprint.read(whole).items():
            tensor.copy_(small[name])
        assert all(torch.equal(tensor, small[name]) for name, tensor in tier.footprint.read(whole).items())


def test_heterofl_one_tier_with_all_labels_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=(8, 8, 5, 9))
    made = [sim.play(method, sim.engine(method), rounds=3) for method in (HeteroFL(), FedAvg("uniform"))]
    assert parcels_equal(*made)


@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize("width", [0.5, 0.25])
def test_scaler_is_off_in_evaluation(
    family: str, width: float, tiny_model: Callable[..., Model], block_weights: Callable[..., Any]
) -> None:
    scaled, plain = (tiny_model(family, width=width, scaler=scaler) for scaler in (True, False))
    block = block_weights(scaled, 2)
    block |= {name: torch.rand(2, *shape).double() + 0.5 for name, shape in scaled.statistics().items()}
    x = torch.randn(2, 3, *scaled.input_shape, dtype=torch.float64)
    assert torch.equal(scaled(block, x).logits, plain(block, x).logits)
    for name, tensor in scaled.batch_statistics(block, x).items():
        assert torch.equal(tensor, plain.batch_statistics(block, x)[name])


@pytest.mark.parametrize("width", [0.5, 0.25])
@pytest.mark.parametrize("widest", [1.0, 0.5])
def test_scaler_without_norm_scales_by_width(
    width: float, widest: float, tiny_model: Callable[..., Model], block_weights: Callable[..., Any]
) -> None:
    """The scale is relative to the global model, not to the full-width model."""
    net = tiny_model("convnet", width=width, widest=widest, hidden=(8,), normalization="none")
    block, x = block_weights(net, 2), torch.randn(2, 3, 1, 6, 6, dtype=torch.float64)
    trained, evaluated = net(block, x, StepSeeds((0, 0))).taps["features"], net(block, x).taps["features"]
    assert torch.allclose(trained, evaluated / (width / widest), rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", SCALED)
@pytest.mark.parametrize("width", [0.5, 0.0625])
def test_scaler_before_batch_norm_has_no_effect(family: str, width: float, tiny_model: Callable[..., Model]) -> None:
    wide = {"mobilenet": {"stem": 32, "widths": (32, 32)}, "splitnet": {"channels": 32}}
    hidden = wide.get(family, {"hidden": (32, 32)})
    scaled, plain = (tiny_model(family, width=width, scaler=scaler, **hidden) for scaler in (True, False))
    block = {name: tensor[None].double() for name, tensor in scaled.initial_weights(0).items()}
    x = torch.randn(1, 20, *scaled.input_shape, dtype=torch.float64)
    with_scaler, without = (net(block, x, StepSeeds((0,))).logits for net in (scaled, plain))
    assert float((with_scaler - without).norm() / without.norm()) < 1e-3
    assert not torch.equal(with_scaler, without)  # not exactly equal, as epsilon is not scaled


def merged(sim: Any, query: BatchNormStatistics, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    engine, fleet = sim.engine(HeteroFL()), sim.fleet
    tier = fleet.largest
    filled = query.fill({tier: weights}, fleet, lambda task, boxes: engine.ask(Request(task, boxes, 1)), 1)[tier]
    return {name: filled[name] for name in fleet.global_model.statistics()}


@given(sizes=st.lists(st.integers(2, 11), min_size=1, max_size=4))
def test_static_batch_norm_is_cumulative_average_over_devices(sizes: list[int], world: Callable[..., Any]) -> None:
    """Batch by batch through torch's batch norm with momentum None, device by device."""
    sim = world(sizes=sizes)
    weights = sim.fleet.global_model.initial_weights(0)
    found = merged(sim, BatchNormStatistics("per_device", 3), weights)
    batches: list[Tensor] = []

    def listen(client: Any, inbox: Parcel) -> Any:
        for step in client.plan:
            batches.extend(client.batch(step).x[k] for k in range(len(step.rows)) if step.active[k])
        return original(client, inbox)

    task = BatchNormStatistics("per_device", 3).collect
    original = task.run
    engine = sim.engine(HeteroFL(), devices_per_block=1)  # without padding to a block of two
    recording = replace(task, run=listen, schedule=Schedule(3))
    list(engine.ask(Request(recording, {device: {"weights": weights} for device in sim.fleet.devices(1)}, 1)))
    module = sim.fleet.global_model.module().eval()
    module.load_state_dict(weights, strict=False)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None
            part.reset_running_stats()
            part.train()
    with torch.no_grad():
        for x in batches:
            module(x)
    assert len(batches) == sum(-(-size // 3) for size in sizes)
    for name, tensor in found.items():
        assert torch.allclose(tensor, module.state_dict()[name], atol=1e-5)


def random_batch() -> tuple[Tensor, Batch]:
    logits = torch.randn(2, 6, CLASSES, dtype=torch.float64)
    return logits, Batch(torch.zeros(2, 6), torch.randint(0, CLASSES, (2, 6)))


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_mask_logits_all_labels_is_plain_cross_entropy(fill: float) -> None:
    logits, batch = random_batch()
    everything = torch.ones(2, CLASSES, dtype=torch.bool)
    assert torch.equal(supervised_loss(mask_logits(logits, everything, fill), batch), supervised_loss(logits, batch))


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_mask_logits_absent_labels_have_zero_gradient(
    family: str, fill: float, tiny_model: Callable[..., Model], block_weights: Callable[..., Any]
) -> None:
    net = tiny_model(family)
    seen = torch.tensor([[True, False, True, False], [False, True, True, True]])
    positions = net.target_shape or ()
    y = torch.tensor([[0, 2, 0, 2], [1, 2, 3, 1]]).view(2, 4, *[1] * len(positions)).expand(2, 4, *positions)
    x = torch.randn(2, 4, *net.input_shape, dtype=torch.float64)

    def loss(weights: Any, batch: Batch) -> Tensor:
        logits = net(weights, batch.x, StepSeeds((0, 0))).logits
        return supervised_loss(mask_logits(logits, seen, fill), batch)

    slopes = gradient(loss, block_weights(net, 2), Batch(x, y))
    for device in range(2):
        for label in range(CLASSES):
            for name in set(net.label_rows()) & set(net.last_exit_weights()):
                row = slopes[name][device, label]
                assert bool((row != 0).any()) is bool(seen[device, label])


@pytest.mark.parametrize("fill", [0.0, float("-inf")])
def test_heterofl_training_leaves_rows_of_absent_labels(
    fill: float, world: Callable[..., Any], meddling: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    """Without momentum and weight decay a row without gradient stays; with decay it moves, so it is not averaged."""
    labels = [[0, 2], [1, 2]]
    sim = world(sizes=(8, 8), labels=labels)
    method = HeteroFL(unseen_logit=fill)
    old = method.start(sim.fleet, 0)
    for optimizer, stays in ((Sgd(0.1), True), (Sgd(0.1, weight_decay=0.1), False)):
        engine = meddling(sim.engine(method, optimizer=optimizer), lambda replies: replies)
        new = method.round(old, sim.context(engine))["weights"]["classifier.weight"]
        for reply in engine.delivered:
            own = labels[int(reply.device.name)]
            for label in range(CLASSES):
                before = old["weights"]["classifier.weight"][label]
                row = reply.upload["weights"]["classifier.weight"][label]
                assert bits_equal(row, before) is (stays and label not in own)
        assert bits_equal(new[3], old["weights"]["classifier.weight"][3])  # no device has label 3


def test_heterofl_without_mask_and_rows_ignores_labels(
    world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=(8, 8), labels=[[0, 1], [2, 3]])
    methods = (HeteroFL(mask_unseen_labels=False, only_seen_rows=False), FedAvg("uniform"), HeteroFL())
    unmasked, plain, masked = (sim.play(method, sim.engine(method)) for method in methods)
    assert parcels_equal(unmasked, plain)
    assert not parcels_equal(masked, plain)


def test_heterofl_only_seen_rows_keeps_unseen_rows(world: Callable[..., Any]) -> None:
    """No device has label 3, so none updates its row; the mask affects the loss alone."""
    sim = world(sizes=(8, 8), labels=[[0, 1], [1, 2]])
    for masked in (True, False):
        method = HeteroFL(mask_unseen_labels=masked)
        before, after = method.start(sim.fleet, 0)["weights"], sim.play(method, sim.engine(method))["weights"]
        for name in ("classifier.weight", "classifier.bias"):
            assert torch.equal(before[name][3], after[name][3])
            assert not torch.equal(before[name][:3], after[name][:3])


def test_heterofl_uploads_seen_labels(world: Callable[..., Any], meddling: Callable[..., Any]) -> None:
    labels = [[0, 2], [1], [1, 3]]
    sim, method = world(sizes=(8, 8, 8), labels=labels), HeteroFL()
    engine = meddling(sim.engine(method), lambda replies: replies)
    method.round(method.start(sim.fleet, 0), sim.context(engine))
    found = {
        reply.device.name: reply.upload["labels"]["seen"].nonzero().flatten().tolist() for reply in engine.delivered
    }
    assert found == {"0": [0, 2], "1": [1], "2": [1, 3]}


def test_heterofl_defaults_are_as_published() -> None:
    assert HeteroFL() == HeteroFL(mask_unseen_labels=True, unseen_logit=0.0, weighting="uniform")


@pytest.mark.parametrize(("masked", "fill"), [(True, 0.0), (False, None)])
def test_heterofl_local_evaluation_masks_like_training(
    masked: bool, fill: float | None, tiny_model: Callable[..., Model]
) -> None:
    fleet = fleet_of(tiny_model, "convnet", 3)
    candidate = HeteroFL(mask_unseen_labels=masked).eval_targets({"weights": fleet.global_model.initial_weights(0)})[
        "server"
    ]
    assert candidate.unseen_logit == fill


def headless() -> nn.Module:
    made = nn.Module()
    made.classifier, made.body = nn.Linear(5, 4), nn.Linear(6, 5)
    return made


def test_heterofl_unknown_classifier_is_refused() -> None:
    fleet = Fleet(make_nested_tiers([("a", build_model("headless", headless, {}, (6,), 4))]), (1.0,), 2, seed=0)
    refusal = fleet_problem(HeteroFL(), fleet)
    assert refusal is not None
    assert "headless" in refusal
    assert "label_rows" in refusal
    assert fleet_problem(HeteroFL(only_seen_rows=False), fleet) is None

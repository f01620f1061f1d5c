"""FedHeNN: its special cases, the target of the alignment, what is uploaded, and that representations align."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import Schedule, Sgd, Step, alignment_loss
from fedloom.fleet import Device, Engine, Reply, Request, draw_cohort
from fedloom.methods import _alignment, fleet_problem
from fedloom.methods._last_uploads import upload_key
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedhenn import FedHeNN
from fedloom.methods.standalone import Standalone
from fedloom.models import Model, StepSeeds
from fedloom.tensors import Parcel, payload_bytes

World = Any
UNEQUAL = (8, 8, 5, 9, 12)
KERNELS = ["linear", "rbf", "procrustes"]
ALIGNED = FedHeNN(strength=2.0, growth="none", probe_size=8)
AT_HOME = replace(ALIGNED, kernels_on="devices")
ONE_MODEL = replace(ALIGNED, share="weights")


@dataclass
class RecordingEngine:
    """An engine that records everything sent and received."""

    engine: Engine
    asked: list[tuple[str, Mapping[Device, Parcel]]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    def ask(self, request: Request) -> list[Reply]:
        self.asked.append((request.task.name, request.inboxes))
        replies = list(self.engine.ask(request))
        self.replies += replies
        return replies

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()

    def inboxes(self, task: str) -> list[Parcel]:
        return [inbox for name, inboxes in self.asked if name == task for inbox in inboxes.values()]


@pytest.fixture
def families(world: Callable[..., Any], tiny_model: Callable[..., Model]) -> World:
    """Unrelated models, with representations of 6, 3 and 5 features."""
    models = [("a", tiny_model("convnet")), ("b", tiny_model("lenet", hidden=(3,))), ("c", tiny_model("mlp"))]
    return world(models=models, sizes=(8, 8, 5, 9, 12, 7))


def device_states(sim: World, method: FedHeNN | Standalone, engine: Any) -> dict[str, Parcel]:
    """The state of every device, asked or not."""
    kept = engine.client_states.committed
    return {d.name: kept.get(d.name) or method.init_client(d, sim.seed) for d in sim.fleet.devices(1)}


def train(sim: World, method: FedHeNN | Standalone, rounds: int = 2, participation: float = 1.0) -> Any:
    engine = sim.engine(method)
    sim.play(method, engine, rounds, participation)
    assert sim.refusals == []
    return device_states(sim, method, engine)


def states_equal(left: Mapping[str, Parcel], right: Mapping[str, Parcel], compare: Callable[..., bool]) -> bool:
    return left.keys() == right.keys() and all(compare(one, right[name]) for name, one in left.items())


def largest_difference(
    left: Mapping[str, Parcel], right: Mapping[str, Parcel], difference: Callable[..., float]
) -> float:
    return max(difference(one, right[name]) for name, one in left.items())


def test_fedhenn_zero_strength_sharing_weights_is_fedavg(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    """Blocks of one device, because devices with and without state never share a block."""
    sim, method = world(family, sizes=UNEQUAL), FedHeNN(strength=0, share="weights")
    assert not method.needs_public_data
    ours, theirs = (
        sim.play(one, sim.engine(one, devices_per_block=1), rounds=3, participation=0.6) for one in (method, FedAvg())
    )
    assert parcels_equal(ours, theirs)


@pytest.mark.parametrize("kernels_on", ["server", "devices"])
def test_fedhenn_zero_strength_sharing_kernels_is_standalone(
    kernels_on: Any, family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=UNEQUAL)
    method = FedHeNN(strength=0, kernels_on=kernels_on)
    ours, theirs = (train(sim, one, 3, 0.6) for one in (method, Standalone()))
    assert states_equal(ours, theirs, parcels_equal)


def test_fedhenn_zero_strength_unrelated_models_is_standalone(
    families: World, parcels_equal: Callable[..., bool]
) -> None:
    ours, theirs = (train(families, one, 3, 0.6) for one in (FedHeNN(strength=0), Standalone()))
    assert states_equal(ours, theirs, parcels_equal)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", [ALIGNED, AT_HOME], ids=["server", "devices"])
def test_describe_does_not_change_training_batches(
    method: FedHeNN, families: World, difference: Callable[..., float]
) -> None:
    """Everything runs as with alignment, but its strength is zero."""
    ours, theirs = (train(families, one, 3, 0.6) for one in (replace(method, strength=1e-30), Standalone()))
    assert largest_difference(ours, theirs, difference) <= 1e-12


@pytest.mark.parametrize("share", ["kernels", "weights"])
@pytest.mark.parametrize("growth", ["root", "linear"])
def test_fedhenn_first_round_has_no_alignment(
    share: Any, growth: Any, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=UNEQUAL)
    method = FedHeNN(strength=1.0, growth=growth, share=share, probe_size=8)
    engine = RecordingEngine(sim.engine(method))
    made = sim.play(method, engine, rounds=1)
    assert {name for name, _ in engine.asked} == {"train"}
    assert not any("public" in inbox or "target" in inbox for inbox in engine.inboxes("train"))
    plain = replace(method, strength=0)
    assert parcels_equal(made, sim.play(plain, sim.engine(plain), rounds=1))


@pytest.mark.parametrize("share", ["kernels", "weights"])
def test_fedhenn_second_round_has_alignment(
    share: Any, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim, method = world(sizes=UNEQUAL), FedHeNN(strength=1.0, share=share, probe_size=8)
    engine, plain = RecordingEngine(sim.engine(method)), replace(method, strength=0)
    made = sim.play(method, engine, rounds=2)
    assert all("public" in inbox for inbox in engine.inboxes("train")[len(UNEQUAL) :])
    assert not parcels_equal(made, sim.play(plain, sim.engine(plain), rounds=2))


@pytest.mark.parametrize("method", [ALIGNED, AT_HOME, ONE_MODEL], ids=["server", "devices", "weights"])
def test_fedhenn_unasked_device_keeps_state(
    method: FedHeNN, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=UNEQUAL)
    engine = sim.engine(method)
    server = sim.play(method, engine, rounds=2)
    before = device_states(sim, method, engine)
    context = sim.context(engine, 3, 0.4)
    method.round(server, context)
    engine.commit(3)
    after, asked = device_states(sim, method, engine), {device.name for device in context.cohort}
    assert {name for name in before if not parcels_equal(before[name], after[name])} == asked


@pytest.mark.parametrize("probe_size", [4, 8], ids=["kernels", "features"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("method", [ALIGNED, AT_HOME], ids=["server", "devices"])
def test_fedhenn_unrelated_models_are_aligned(
    method: FedHeNN, kernel: Any, probe_size: int, families: World, difference: Callable[..., float]
) -> None:
    method = replace(method, kernel=kernel, probe_size=probe_size)
    assert fleet_problem(method, families.fleet) is None
    drawn, alone = (train(families, one) for one in (method, Standalone()))
    assert all(difference(drawn[name], alone[name]) > 1e-4 for name in alone)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fedhenn_one_model_trains_with_every_kernel(
    kernel: Any, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    sim, method = world(sizes=UNEQUAL), replace(ONE_MODEL, kernel=kernel)
    drawn, plain = (sim.play(one, sim.engine(one)) for one in (method, FedAvg()))
    assert sim.refusals == []
    assert difference(drawn, plain) > 1e-4


def test_fedhenn_kernels_on_devices_uploads_no_weights(families: World) -> None:
    engine = RecordingEngine(families.engine(AT_HOME))
    server = families.play(AT_HOME, engine, rounds=3, participation=0.6)
    assert server == {}
    assert {name for reply in engine.replies for name in reply.upload} == {"kernel"}
    kernels = [reply.upload["kernel"] for reply in engine.replies if reply.upload]
    assert {tuple(tensor.shape) for one in kernels for tensor in one.values()} == {(8, 6), (8, 3), (8, 5)}


def test_fedhenn_auto_on_deployed_devices_uploads_no_weights(
    families: World, parcels_equal: Callable[..., bool]
) -> None:
    engine = RecordingEngine(families.engine(ALIGNED))
    server = ALIGNED.start(families.fleet, families.seed)
    after = ALIGNED.round(server, replace(families.context(engine, 2), deployed=True))
    assert not any("weights" in reply.upload for reply in engine.replies)
    assert {name for name, _ in engine.asked} == {"describe", "train"}
    assert parcels_equal(after, server)


def test_fedhenn_kernels_on_server_are_computed_on_server(families: World) -> None:
    method = replace(ALIGNED, kernels_on="server")
    engine = RecordingEngine(families.engine(method))
    method.round(method.start(families.fleet, 0), replace(families.context(engine), deployed=True))
    asked = [(name, device.is_server) for name, inboxes in engine.asked for device in inboxes]
    assert set(asked) == {("describe", True), ("train", False)}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kernel", KERNELS)
def test_fedhenn_kernels_on_server_or_devices_give_same_result(
    kernel: Any, families: World, difference: Callable[..., float]
) -> None:
    on_devices = replace(AT_HOME, kernel=kernel)
    on_server = replace(on_devices, kernels_on="server", target="participants")
    ours, theirs = (train(families, one, 3, 0.6) for one in (on_devices, on_server))
    assert largest_difference(ours, theirs, difference) <= 1e-10


def test_fedhenn_server_state_matches_device_models(families: World, parcels_equal: Callable[..., bool]) -> None:
    engine = families.engine(ALIGNED)
    server = families.play(ALIGNED, engine, 3, 0.6)
    kept = device_states(families, ALIGNED, engine)
    held = {d.name: {"weights": server[upload_key(d.tier, d.name)]} for d in families.fleet.devices(1)}
    assert len(server) == len(held)
    assert states_equal(held, kept, parcels_equal)


def kernel_by_hand(sim: World, method: FedHeNN, server: Parcel, devices: list[Device], x: Tensor) -> Tensor:
    """The mean kernel, computed model by model."""
    kernels = []
    for device in devices:
        weights = {name: one.unsqueeze(0) for name, one in server[upload_key(device.tier, device.name)].items()}
        features = device.model.features(weights, sim.dataset.preparation(x).unsqueeze(0))[0]
        kernel = features @ features.T
        if method.equally_loud:
            centring = torch.eye(len(x)) - 1 / len(x)
            kernel = kernel / (centring @ kernel @ centring).norm()
        kernels.append(kernel)
    return torch.stack(kernels).mean(0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("equally_loud", [False, True])
@pytest.mark.parametrize("target", ["all", "participants"])
@pytest.mark.parametrize("probe_size", [4, 12])
def test_fedhenn_target_is_mean_kernel_of_previous_models(
    target: Any, probe_size: int, equally_loud: bool, families: World
) -> None:
    method = replace(ALIGNED, target=target, probe_size=probe_size, equally_loud=equally_loud)
    engine = RecordingEngine(families.engine(method))
    server = families.play(method, engine, rounds=2)
    engine.asked.clear()
    context = families.context(engine, 3, 0.5)
    method.round(server, context)
    inbox, *others = engine.inboxes("train")
    assert all(other["target"] is inbox["target"] or other["target"] == inbox["target"] for other in others)
    counted = context.cohort if target == "participants" else families.fleet.devices(3)
    expected = kernel_by_hand(families, method, server, counted, inbox["public"]["x"])
    sent = inbox["target"]
    found = sent["kernel"] if "kernel" in sent else sent["features"] @ sent["features"].T
    assert len(counted) == (3 if target == "participants" else 6)
    assert torch.allclose(found, expected, atol=1e-10)


def test_fedhenn_full_participation_makes_both_targets_equal(
    families: World, parcels_equal: Callable[..., bool]
) -> None:
    methods = ALIGNED, replace(ALIGNED, target="participants")
    assert states_equal(*(train(families, one) for one in methods), parcels_equal)
    assert not states_equal(*(train(families, one, 2, 0.5) for one in methods), parcels_equal)


def test_fedhenn_sharing_weights_targets_global_models_kernel(world: Callable[..., Any]) -> None:
    """So the alignment keeps devices close to it."""
    sim = world(sizes=UNEQUAL, optimizer=Sgd(0.1), schedule=Schedule(batch_size=4, epochs=6))
    x = sim.dataset.preparation(sim.public).unsqueeze(0)

    def moved(method: FedHeNN) -> float:
        engine = sim.engine(method)
        server = sim.play(method, engine, rounds=1)
        assert server.keys() == {"weights"}
        first = {name: one.unsqueeze(0) for name, one in method.start(sim.fleet, 0)["weights"].items()}
        target = {"features": sim.fleet.global_model.features(first, x)}
        after = [
            {n: w.unsqueeze(0) for n, w in one["weights"].items()} for one in engine.client_states.committed.values()
        ]
        apart = alignment_loss(target, "linear")
        return sum(float(apart(sim.fleet.global_model.features(weights, x))) for weights in after)

    assert moved(replace(ONE_MODEL, strength=0.5, probe_size=12)) < 0.5 * moved(replace(ONE_MODEL, strength=0))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kernel", KERNELS)
def test_alignment_gradient_at_own_target_is_zero(
    kernel: Any, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    for epochs in (1, 2):
        sim = world(sizes=UNEQUAL, schedule=Schedule(batch_size=100, epochs=epochs))
        method = replace(ONE_MODEL, kernel=kernel)
        drawn, plain = (sim.play(one, sim.engine(one, devices_per_block=1), rounds=1) for one in (method, FedAvg()))
        assert (difference(drawn, plain) <= 1e-7) == (epochs == 1)


@pytest.mark.parametrize("method", [ALIGNED, ONE_MODEL, AT_HOME], ids=["server", "weights", "devices"])
def test_public_examples_travel_as_stored(method: FedHeNN, world: Callable[..., Any]) -> None:
    sim = world(sizes=UNEQUAL)
    engine = RecordingEngine(sim.engine(method))
    context = sim.context(engine, 2)
    method.round(method.start(sim.fleet, 0), context)
    public = [inbox["public"]["x"] for _, inboxes in engine.asked for inbox in inboxes.values()]
    assert all(x.dtype == torch.uint8 and x.shape == (8, 1, 6, 6) for x in public)
    sent_down = [inbox for _, boxes in engine.asked for device, inbox in boxes.items() if not device.is_server]
    public_bytes, target, model = (
        8 * 36 + 4,
        8 * 8 * 4,
        payload_bytes({"weights": sim.fleet.global_model.initial_weights(0)}),
    )
    expected = public_bytes + {"kernels": target, "weights": model}[method.share]
    first_question = public_bytes if method.kernels_on == "devices" else 0
    assert (
        context.traffic.bytes_down == sum(map(payload_bytes, sent_down)) == len(UNEQUAL) * (expected + first_question)
    )
    assert context.traffic.bytes_up == len(UNEQUAL) * (8 * 6 * 4 if method.kernels_on == "devices" else model)


def test_public_batch_changes_by_round_and_is_shared(world: Callable[..., Any]) -> None:
    sim = world(sizes=UNEQUAL)
    engine = RecordingEngine(sim.engine(ALIGNED))
    sim.play(ALIGNED, engine, rounds=2)
    public = [[inbox["public"]["x"] for inbox in boxes.values()] for name, boxes in engine.asked if name == "train"]
    assert all(torch.equal(x, xs[0]) for xs in public for x in xs)
    assert not torch.equal(public[0][0], public[1][0])


def test_probe_batch_limits_examples_per_step(world: Callable[..., Any], difference: Callable[..., float]) -> None:
    some, none, more = (train(world(sizes=UNEQUAL), replace(ALIGNED, probe_batch=size)) for size in (3, None, 8))
    assert largest_difference(none, more, difference) == 0
    assert largest_difference(none, some, difference) > 1e-4


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("kernel", ["linear", "procrustes"])
def test_probe_batch_ignores_other_examples(
    kernel: Any, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """The first four of eight equal four alone; batch norm would mix them."""
    sim = world(sizes=UNEQUAL, normalization="none", schedule=Schedule(batch_size=100))
    some = replace(ALIGNED, kernel=kernel, probe_size=8, probe_batch=4)
    few = replace(ALIGNED, kernel=kernel, probe_size=4)
    assert largest_difference(train(sim, some, 1), train(sim, few, 1), difference) <= 1e-10


def test_probe_batch_steps_cycle_through_examples(world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    plain = _alignment.select_examples
    monkeypatch.setattr(
        _alignment, "select_examples", lambda target, rows: seen.append(rows.tolist()) or plain(target, rows)
    )
    sim, method = world(sizes=(12,)), replace(ALIGNED, probe_batch=3)
    sim.play(method, sim.engine(method), rounds=1)
    assert seen == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]


def mean_misalignment(sim: World, kept: Mapping[str, Parcel]) -> float:
    x = sim.dataset.preparation(sim.public).unsqueeze(0)
    seen = [
        device.model.features({n: w.unsqueeze(0) for n, w in kept[device.name]["weights"].items()}, x)
        for device in sim.fleet.devices(1)
    ]
    pairs = [float(alignment_loss({"features": other}, "linear")(one)) for one, other in combinations(seen, 2)]
    return sum(pairs) / len(pairs)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fedhenn_training_raises_similarity(kernel: Any, families: World) -> None:
    strong = replace(AT_HOME, strength=20.0, probe_size=12, kernel=kernel)
    drawn = [mean_misalignment(families, train(families, strong, rounds)) for rounds in (0, 2, 6)]
    alone = mean_misalignment(families, train(families, Standalone(), 6))
    assert drawn[0] > 2 * drawn[1] > 2 * drawn[2]
    assert alone > 0.8 * drawn[0]


@pytest.mark.parametrize("method", [ALIGNED, AT_HOME], ids=["server", "devices"])
def test_fedhenn_without_kernels_trains_unaligned(
    method: FedHeNN, families: World, meddling: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    engine = families.engine(method)
    lossy = meddling(engine, lambda replies: [reply for reply in replies if "kernel" not in reply.upload])
    families.play(method, lossy, rounds=2)
    assert states_equal(device_states(families, method, engine), train(families, Standalone()), parcels_equal)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fedhenn_diverged_device_is_refused_and_round_continues(kernel: Any, world: Callable[..., Any]) -> None:
    sim = world(sizes=UNEQUAL, optimizer=Sgd(1e30))
    method = replace(ALIGNED, kernel=kernel)
    engine = sim.engine(method)
    sim.play(method, engine, rounds=2)
    assert {refusal.code for refusal in sim.refusals} == {"NONFINITE"}
    assert dict(engine.client_states.committed) == {}


def test_fedhenn_sharing_weights_of_different_models_is_refused(families: World) -> None:
    refused = fleet_problem(ONE_MODEL, families.fleet)
    assert refused is not None
    assert 'share = "weights"' in refused
    assert fleet_problem(ALIGNED, families.fleet) is None


@pytest.mark.parametrize("method", [ALIGNED, ONE_MODEL], ids=["kernels", "weights"])
def test_fedhenn_redrawn_tiers_are_refused(method: FedHeNN, world: Callable[..., Any]) -> None:
    refused = fleet_problem(method, replace(world().fleet, assignment="redrawn"))
    assert refused is not None
    assert "fixed" in refused


@pytest.mark.parametrize("method", [ALIGNED, AT_HOME, ONE_MODEL], ids=["server", "devices", "weights"])
def test_fedhenn_last_round_asks_all_devices(
    method: FedHeNN, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(sizes=UNEQUAL)
    engine = sim.engine(method)
    server = sim.play(method, engine, 2, 0.6)
    before = device_states(sim, method, engine)
    ended = method.finish(server, sim.context(engine, 3))
    engine.commit(3)
    assert ended is not None
    after = device_states(sim, method, engine)
    assert not any(parcels_equal(before[name], after[name]) for name in before)
    again = sim.engine(method)
    again.client_states.committed = {name: one for name, one in before.items() if one}
    assert parcels_equal(ended, method.round(server, sim.context(again, 3)))


def test_fedhenn_last_round_can_be_disabled(world: Callable[..., Any]) -> None:
    sim, method = world(), replace(ALIGNED, last_round=False)
    engine = RecordingEngine(sim.engine(method))
    assert method.finish(method.start(sim.fleet, 0), sim.context(engine)) is None
    assert engine.asked == []


def test_fedhenn_untrained_device_is_evaluated_with_global_model(
    world: Callable[..., Any], client_for: Callable[..., Any]
) -> None:
    sim = world(sizes=UNEQUAL)
    engine = sim.engine(ONE_MODEL)
    server = sim.play(ONE_MODEL, engine, 1, 0.4)
    trained = {device.name for device in draw_cohort(sim.fleet, 0.4, 1)}
    assert set(engine.client_states.committed) == trained
    candidates = ONE_MODEL.eval_targets(server)
    assert candidates.keys() == {"personal", "server"}
    rows = sim.evaluator().rows(candidates, sim.fleet, sim.context(engine, 2).ask, 1, per_device=True)
    shares = {
        (row.candidate, row.device): row.value
        for row in rows
        if row.device and row.test == "local" and row.metric == "accuracy"
    }
    untrained = {device.name for device in sim.fleet.devices(1)} - trained
    assert all(shares["personal", name] == shares["server", name] for name in untrained)
    personal = candidates["personal"]
    for device in sim.fleet.devices(1):
        state = engine.client_states.read(device)
        _, weights = personal.load(  # type: ignore[union-attr]
            replace(_client(sim, client_for), state=state),
            personal.inbox(device),  # type: ignore[union-attr]
        )
        assert (weights is server["weights"]) == (device.name in untrained)


def _client(sim: World, client_for: Callable[..., Any]) -> Any:
    step = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    return client_for(sim.fleet.global_model, sim.dataset.train, [step])


@pytest.mark.parametrize("method", [ALIGNED, AT_HOME, ONE_MODEL], ids=["server", "devices", "weights"])
def test_fedhenn_without_public_data_is_refused(method: FedHeNN, world: Callable[..., Any]) -> None:
    sim = world()
    bare = replace(sim.context(sim.engine(method)), public=None)
    assert method.needs_public_data
    with pytest.raises(ValueError, match=r"data\.public"):
        method.round(method.start(sim.fleet, 0), bare)
    plain = replace(method, strength=0)
    plain.round(plain.start(sim.fleet, 0), bare)


def test_fedhenn_warm_start_matches_on_devices_and_server(
    world: Callable[..., Any], bits_equal: Callable[..., bool]
) -> None:
    sim = world(widths=(1.0, 0.5))
    warm = {name: torch.randn(shape) for name, shape in sim.fleet.global_model.shapes().items()}
    server = ALIGNED.start(sim.fleet, 0, warm)
    for device in sim.fleet.devices(1):
        held, own = server[upload_key(device.tier, device.name)], ALIGNED.init_client(device, 0, warm)["weights"]
        expected = device.footprint.read(warm)
        assert all(bits_equal(held[n], w) and bits_equal(own[n], w) for n, w in expected.items())

"""FedGKT: transfer batches, distillation on devices and server, and the logits sent back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import Adam, Client, Schedule, Sgd, Step, with_batchnorm_statistics
from fedloom.data import Examples
from fedloom.engines import WorkerContext, WorkerPool
from fedloom.fleet import DeviceModel, Request
from fedloom.methods import fleet_problem
from fedloom.methods._server_training import server_client
from fedloom.methods.fedgkt import FedGKT
from fedloom.methods.standalone import Standalone
from fedloom.models import Model, StepSeeds, build_model, chain_models
from fedloom.tensors import Parcel, fingerprint, payload_bytes

SIZES = (8, 5, 9)
SMALL = FedGKT(server_epochs=1, server_batch=8, server_planes=(2,), server_blocks=(1,))


@dataclass
class RecordingEngine:
    """An engine that records its inboxes and replies."""

    engine: Any
    inboxes: list[tuple[str, Mapping[Any, Parcel]]] = field(default_factory=list)
    replies: list[Any] = field(default_factory=list)

    def ask(self, request: Request) -> list[Any]:
        self.inboxes.append((request.task.name, request.inboxes))
        self.replies.append(list(self.engine.ask(request)))
        return self.replies[-1]

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)


@pytest.fixture
def sim(world: Callable[..., Any]) -> Any:
    return world("bottleneck", sizes=SIZES)


def random_logits(sim: Any) -> dict[str, Tensor]:
    """Random logits for every example of every device."""
    sizes = (len(rows) for rows in sim.partition.train)
    return {one.name: 3 * torch.randn(size, 4) for one, size in zip(sim.fleet.devices(1), sizes, strict=True)}


def soft(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    answers = F.softmax(teacher / temperature, -1) + 1e-7
    apart = answers * (answers.log() - F.log_softmax(logits / temperature, -1))
    return temperature**2 * apart.sum(-1).mean()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("last", ["keep", "wrap"])
def test_distillation_batch_uses_matching_server_logits(
    last: Any, world: Callable[..., Any], difference: Callable[..., float]
) -> None:
    """By hand over shuffled epochs, looking up rows of the data set: positions within the batch would be wrong."""
    sim = world("bottleneck", sizes=SIZES, schedule=Schedule(4, 3, last), optimizer=Sgd(0.1), normalization="group")
    method = replace(SMALL, weight=0.7, temperature=2.0)
    engine = sim.engine(method)
    server = {**method.start(sim.fleet, 0), "answers": random_logits(sim)}
    method.round(server, sim.context(engine))
    engine.commit(1)
    for device, held in zip(sim.fleet.devices(1), sim.partition.train, strict=True):
        answer = {int(row): server["answers"][device.name][place_] for place_, row in enumerate(held)}
        plan = engine.plan(Request(method.train, {}, 1), device)
        batches = plan.rows.split(plan.sizes)
        by_hand = trained(sim, batches, [torch.stack([answer[int(row)] for row in rows]) for rows in batches])
        assert difference(engine.client_states.committed[device.name], {"weights": by_hand}) <= 1e-9
        in_order = server["answers"][device.name]
        by_batch = [in_order[(torch.arange(len(rows)) + 4 * n) % len(held)] for n, rows in enumerate(batches)]
        assert difference({"weights": by_hand}, {"weights": trained(sim, batches, by_batch)}) > 1e-3


def trained(sim: Any, batches: Any, teachers: list[Tensor]) -> dict[str, Tensor]:
    module = sim.fleet.global_model.module().train()
    module.load_state_dict(sim.fleet.global_model.initial_weights(0))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for rows, teacher in zip(batches, teachers, strict=True):
        logits = module(sim.dataset.preparation(sim.dataset.train.x[rows])).logits
        optimizer.zero_grad()
        (F.cross_entropy(logits, sim.dataset.train.y[rows]) + 0.7 * soft(logits, teacher, 2.0)).backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in module.named_parameters()}


def test_transfer_batch_is_in_device_order(sim: Any) -> None:
    engine = RecordingEngine(sim.engine(SMALL))
    SMALL.round(SMALL.start(sim.fleet, 0), sim.context(engine))
    for reply in engine.replies[0]:
        held = torch.from_numpy(sim.partition.train[int(reply.device.name)])
        transfer = reply.upload["transfer"]
        assert torch.equal(transfer["labels"], sim.dataset.train.y[held])
        assert {name: len(one) for name, one in transfer.items()} == dict.fromkeys(transfer, len(held))


@pytest.mark.usefixtures("double")
def test_transfer_batch_holds_outputs_of_trained_model(world: Callable[..., Any]) -> None:
    sim = world("bottleneck", sizes=SIZES, normalization="group")
    engine = RecordingEngine(sim.engine(SMALL))
    SMALL.round(SMALL.start(sim.fleet, 0), sim.context(engine))
    engine.commit(1)
    for reply in engine.replies[0]:
        weights = engine.engine.client_states.committed[reply.device.name]["weights"]
        x = sim.dataset.preparation(sim.dataset.train.x[sim.partition.train[int(reply.device.name)]])
        made = sim.fleet.global_model({name: one[None] for name, one in weights.items()}, x[None])
        assert torch.allclose(reply.upload["transfer"]["features"], made.taps["extractor"][0], atol=1e-12)
        assert torch.allclose(reply.upload["transfer"]["logits"], made.logits[0], atol=1e-12)


def test_fedgkt_first_round_trains_on_labels_only(sim: Any, parcels_equal: Callable[..., bool]) -> None:
    engines = [sim.engine(method, devices_per_block=1) for method in (SMALL, Standalone())]  # they form other blocks
    for method, engine in zip((SMALL, Standalone()), engines, strict=True):
        sim.play(method, engine, rounds=1)
    ours, theirs = (engine.client_states.committed for engine in engines)
    assert len(ours) == 3
    assert all(parcels_equal(ours[name], theirs[name]) for name in theirs)


def test_fedgkt_later_round_also_distills(sim: Any, difference: Callable[..., float]) -> None:
    engine, alone = RecordingEngine(sim.engine(SMALL)), sim.engine(Standalone())
    server = sim.play(SMALL, engine, rounds=1)
    SMALL.round(server, sim.context(engine, 2))
    engine.commit(2)
    sim.play(Standalone(), alone)
    assert [name for name, _ in engine.inboxes] == ["train", "teach", "train", "teach"]
    assert all(box == {} for box in engine.inboxes[0][1].values())
    for device, box in engine.inboxes[2][1].items():
        assert box["teacher"].keys() == {"logits"}
        assert torch.equal(box["teacher"]["logits"], server["answers"][device.name])
        assert (
            difference(engine.engine.client_states.committed[device.name], alone.client_states.committed[device.name])
            > 1e-5
        )


def transfer_inbox(sim: Any, labels: Tensor | None = None, logits: Tensor | None = None) -> Parcel:
    shape, draw = (12, *SMALL.server_model(sim.fleet.global_model).input_shape), torch.Generator().manual_seed(3)
    return {
        "weights": SMALL.start(sim.fleet, 0)["weights"],
        "transfer": {
            "features": torch.randn(shape, generator=draw),
            "logits": torch.randn(12, 4, generator=draw) if logits is None else logits,
            "labels": torch.arange(12) % 4 if labels is None else labels,
        },
        "draw": {"seed": torch.tensor(5)},
    }


def run_teach(sim: Any, method: FedGKT, box: Parcel) -> Parcel:
    context = sim.context(sim.engine(method))
    (reply,) = context.compute(method.teach, {context.cohort[0]: box})
    sent: Parcel = reply.upload
    return sent


def train_devices(sim: Any, method: FedGKT, answers: Mapping[str, Tensor]) -> Parcel:
    engine = sim.engine(method)
    method.round({**method.start(sim.fleet, 0), "answers": answers}, sim.context(engine))
    engine.commit(1)
    memory: Parcel = engine.client_states.committed["0"]
    return memory


def test_weight_scales_distillation_on_devices_and_labels_on_server(sim: Any) -> None:
    """With weight 0, devices ignore the server's logits, and the server ignores the labels."""
    answers = random_logits(sim), random_logits(sim)
    boxes = [transfer_inbox(sim, labels=labels) for labels in (torch.arange(12) % 4, torch.arange(12) // 3)]
    others = [transfer_inbox(sim, logits=logits) for logits in (torch.zeros(12, 4), 5 * torch.eye(4).repeat(3, 1))]
    for weight in (0.0, 0.5):
        method = replace(SMALL, weight=weight)
        assert len({fingerprint(train_devices(sim, method, one)) for one in answers}) == (1 if weight == 0 else 2)
        assert len({fingerprint(run_teach(sim, method, box)) for box in boxes}) == (1 if weight == 0 else 2)
        assert len({fingerprint(run_teach(sim, method, box)) for box in others}) == 2


@pytest.mark.usefixtures("double")
def test_teach_one_step_matches_manual_computation(sim: Any) -> None:
    """One full batch: Adam with the weight decay of the paper's code, on logits and weighted labels."""
    method, box = replace(SMALL, weight=0.3, server_batch=100, server_rate=0.01), transfer_inbox(sim)
    large = method.server_model(sim.fleet.global_model)
    module = large.module().train()
    module.load_state_dict(dict(box["weights"]), strict=False)
    optimizer = torch.optim.Adam(module.parameters(), 0.01, weight_decay=1e-4)
    logits = module(box["transfer"]["features"]).logits
    loss = soft(logits, box["transfer"]["logits"], 3.0) + 0.3 * F.cross_entropy(logits, box["transfer"]["labels"])
    loss.backward()
    optimizer.step()
    made = run_teach(sim, method, box)
    for name, weight in module.named_parameters():
        assert torch.allclose(made["weights"][name], weight.detach(), atol=1e-10)


@pytest.mark.usefixtures("double")
def test_teach_logits_follow_example_order(sim: Any) -> None:
    box = transfer_inbox(sim)
    made, large = run_teach(sim, SMALL, box), SMALL.server_model(sim.fleet.global_model)
    examples = Examples(box["transfer"]["features"], box["transfer"]["labels"])
    server = server_client(large, Adam(), examples, Schedule(SMALL.server_batch), 5, large.classes)
    ready = with_batchnorm_statistics(server, {name: one[None] for name, one in made["weights"].items()})
    expected = large(ready, examples.x[None]).logits[0]
    assert torch.allclose(made["answers"]["logits"], expected, atol=1e-10)


def test_fedgkt_round_gathers_all_uploads_and_scatters_logits(sim: Any) -> None:
    engine = RecordingEngine(sim.engine(SMALL))
    server = sim.play(SMALL, engine, rounds=1)
    (box,) = engine.inboxes[1][1].values()
    sent = [reply.upload["transfer"] for reply in sorted(engine.replies[0], key=lambda reply: reply.device.name)]
    for name, tensor in box["transfer"].items():
        assert torch.equal(tensor, torch.cat([transfer[name] for transfer in sent]))
    (reply,) = engine.replies[1]
    assert torch.equal(torch.cat([server["answers"][name] for name in "012"]), reply.upload["answers"]["logits"])
    assert [len(server["answers"][name]) for name in "012"] == list(SIZES)
    assert fingerprint({"weights": server["weights"]}) == fingerprint({"weights": reply.upload["weights"]})


def test_fedgkt_lost_reply_keeps_old_logits(sim: Any, meddling: Callable[..., Any]) -> None:
    engine = sim.engine(SMALL)
    before = sim.play(SMALL, engine, rounds=1)
    lossy = meddling(engine, lambda replies: [reply for reply in replies if reply.device.name != "1"])
    after = SMALL.round(before, sim.context(lossy, 2))
    assert torch.equal(after["answers"]["1"], before["answers"]["1"])
    assert not any(torch.equal(after["answers"][name], before["answers"][name]) for name in "02")


def test_fedgkt_unasked_device_has_no_logits(sim: Any) -> None:
    engine = RecordingEngine(sim.engine(SMALL))
    context = sim.context(engine)
    server = SMALL.round(SMALL.start(sim.fleet, 0), replace(context, cohort=context.cohort[:2]))
    engine.commit(1)
    assert [len(server["answers"][name]) for name in "012"] == [8, 5, 0]
    SMALL.round(server, sim.context(engine, 2))
    boxes = {device.name: box for device, box in engine.inboxes[2][1].items()}
    assert [sorted(boxes[name]) for name in "012"] == [["teacher"], ["teacher"], []]


def test_fedgkt_server_training_is_not_counted_as_traffic(sim: Any) -> None:
    engine = RecordingEngine(sim.engine(SMALL))
    server, moved = SMALL.start(sim.fleet, 0), []
    for number in (1, 2):
        context = sim.context(engine, number)
        server = SMALL.round(server, context)
        moved.append(context.traffic)
    assert [traffic.bytes_down for traffic in moved] == [0, sum(SIZES) * 4 * 4]
    uploaded = sum(payload_bytes(reply.upload) for reply in engine.replies[0])
    assert [traffic.bytes_up for traffic in moved] == [uploaded, uploaded]
    assert uploaded == sum(SIZES) * (4 * 4 * 6 * 6 + 4 * 4 + 8)
    assert [(one.asked, one.replied) for one in moved] == [(3, 3), (3, 3)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", ["bottleneck", "splitnet"])
def test_extended_model_chains_extractor_and_server_model(
    family: str, world: Callable[..., Any], client_for: Callable[..., Client], block_weights: Callable[..., Any]
) -> None:
    sim = world(family, sizes=SIZES)
    small, large = sim.fleet.global_model, SMALL.server_model(sim.fleet.global_model)
    own, servers, x = block_weights(small, 2), block_weights(large, 2, seed=1), torch.randn(2, 3, 1, 6, 6)
    step = Step(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2), {}, StepSeeds((0, 0)))
    client = client_for(small, sim.dataset.train, [step], state={"weights": own})
    whole, weights = SMALL.extended_model(client, {"weights": servers})
    assert weights.keys() == whole.shapes().keys()
    features = small.submodel("extractor")(small.submodel_weights("extractor", own), x, StepSeeds((0, 0))).logits
    expected = large(servers, features, StepSeeds((0, 0))).logits
    assert torch.allclose(whole(weights, x, StepSeeds((0, 0))).logits, expected, atol=1e-12)
    ready = {**weights, **whole.batch_statistics(weights, x)}
    first, second = ({n.removeprefix(p): w for n, w in ready.items() if n.startswith(p)} for p in ("first.", "second."))
    evaluated = large(second, small.submodel("extractor")(first, x).logits).logits
    assert torch.allclose(whole(ready, x).logits, evaluated, atol=1e-12)


def test_chain_models_is_hashable_and_keeps_names(tiny_model: Callable[..., Model]) -> None:
    first = tiny_model("bottleneck").submodel("extractor")
    second = SMALL.server_model(tiny_model("bottleneck"))
    whole = chain_models(first, second)
    assert whole == chain_models(first, second) and hash(whole) == hash(chain_models(first, second))
    assert whole != chain_models(first, replace(second, classes=5))
    assert (whole.input_shape, whole.classes) == (first.input_shape, second.classes)
    expected = {f"first.{name}": shape for name, shape in first.shapes().items()}
    assert whole.shapes() == expected | {f"second.{name}": shape for name, shape in second.shapes().items()}


def test_fedgkt_eval_targets_are_clients_and_server(sim: Any) -> None:
    engine = sim.engine(SMALL)
    candidates = SMALL.eval_targets(sim.play(SMALL, engine))
    assert all(isinstance(one, DeviceModel) for one in candidates.values())
    rows = sim.evaluator().rows(candidates, sim.fleet, lambda task, boxes: engine.ask(Request(task, boxes, 2)), 2, True)
    assert {row.candidate for row in rows} == {"clients", "server"}
    for name in ("clients", "server"):
        local = [row for row in rows if (row.candidate, row.test) == (name, "local")]
        assert {row.device for row in local} == {"", "0", "1", "2"}


@pytest.mark.parametrize("family", ["bottleneck", "splitnet"])
def test_fedgkt_two_processes_give_same_bits(
    family: str, world: Callable[..., Any], parcels_equal: Callable[..., bool]
) -> None:
    sim = world(family, sizes=(8, 5, 9, 8))
    pool = WorkerPool(2)
    alone = sim.engine(SMALL, devices_per_block=2)
    pooled = sim.engine(SMALL, devices_per_block=2, executor=pool)
    pool.register(WorkerContext(pooled, sim.fleet, lambda ref: SMALL.find(*ref)))
    try:
        servers = [sim.play(SMALL, engine) for engine in (alone, pooled)]
    finally:
        pool.close()
    assert sim.refusals == []
    assert parcels_equal(*servers)
    device_states = [dict(engine.client_states.committed) for engine in (alone, pooled)]
    assert device_states[0].keys() == device_states[1].keys() == set("0123")
    assert all(parcels_equal(device_states[0][name], device_states[1][name]) for name in "0123")


def test_fedgkt_different_models_with_same_feature_shape_train(
    world: Callable[..., Any], tiny_model: Callable[..., Model]
) -> None:
    nets = [("a", tiny_model("bottleneck")), ("b", tiny_model("bottleneck", planes=(5,), blocks=(1,)))]
    sim = world(models=nets, sizes=(8, 5, 9, 8))
    assert fleet_problem(SMALL, sim.fleet) is None
    server = sim.play(SMALL, sim.engine(SMALL))
    assert sim.refusals == []
    assert [len(server["answers"][name]) for name in "0123"] == [8, 5, 9, 8]


def test_fedgkt_unequal_feature_shapes_are_refused(world: Callable[..., Any], tiny_model: Callable[..., Model]) -> None:
    nets = [("a", tiny_model("bottleneck")), ("b", tiny_model("bottleneck", stem=3))]
    assert "features of one shape; tier 'b' has [(3, 6, 6)]" in str(fleet_problem(SMALL, world(models=nets).fleet))
    assert "needs nets with children named extractor" in str(fleet_problem(SMALL, world("convnet").fleet))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(36, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(self.extractor(x))
        return made


def test_fedgkt_flat_features_are_refused(world: Callable[..., Any]) -> None:
    sim = world(models=[("a", build_model("flat", Flat, {}, (1, 6, 6), 4))])
    assert fleet_problem(SMALL, sim.fleet) == "fedgkt's server convolves feature maps; those of flat have shape (8,)"

"""FD, FedProto, FML, FedKD, FedGH and FedTGP: special cases in which they are other methods, and what they refuse."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedloom.client import Sgd
from fedloom.data import TASKS
from fedloom.engines import Compression
from fedloom.engines.compression import LowRank
from fedloom.fleet import Reply, count_parameters
from fedloom.methods import METHODS, Method, fleet_problem, training_macs
from fedloom.methods._prototypes import find_head, nearest_prototype
from fedloom.methods.fd import FD
from fedloom.methods.fedavg import FedAvg
from fedloom.methods.fedgh import FedGH
from fedloom.methods.fedkd import FedKD, truncate
from fedloom.methods.fedproto import FedProto
from fedloom.methods.fedtgp import FedTGP, largest_margin
from fedloom.methods.fml import FML
from fedloom.methods.standalone import Standalone
from fedloom.models import build_model, compute_cost
from fedloom.testing import TinyWorld, check_method, largest_difference, same_parcel, tiny_model
from fedloom.testing.doubles import committed_states, with_compression
from fedloom.testing.report import METHOD_CHECKS, default_dtype

FOREIGN = ("fd", "fedproto", "fml", "fedkd", "fedgh", "fedtgp")
LABELS = [[0, 1], [1, 2], [0, 1, 3], [1, 2]]


def foreign_world(**changes: Any) -> TinyWorld:
    """Two architectures with features of one length."""
    nets = [("a", tiny_model("convnet", hidden=(4, 5))), ("b", tiny_model("mlp", hidden=(6, 5)))]
    return TinyWorld.make(models=nets, **{"sizes": (8, 5, 6, 7), "labels": LABELS, **changes})


@dataclass
class FixedUploads:
    """Devices that all upload the same; what the server computes itself is computed."""

    engine: Any
    upload: Any

    def ask(self, request: Any) -> Any:
        if any(device.is_server for device in request.inboxes):
            return self.engine.ask(request)
        return [Reply(device, 6, self.upload) for device in request.inboxes]

    def commit(self, round_number: int) -> None:
        self.engine.commit(round_number)

    def close(self) -> None:
        self.engine.close()


def states_of(method: Method, world: TinyWorld, rounds: int = 3, participation: float = 0.8) -> dict[str, Any]:
    engine = world.engine(method)
    world.play(method, engine, rounds, participation)
    assert world.refusals == []
    return {name: {"weights": state["weights"]} for name, state in committed_states(engine).items()}


@pytest.mark.parametrize(
    "method",
    [
        FD(strength=0.0), FedProto(strength=0.0), FedTGP(strength=0.0, server_epochs=2), FML(alpha=1.0),
        FedKD(distillation=0.0, hidden=0.0),
    ],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_method_of_strength_zero_is_standalone_bit_for_bit(method: Method) -> None:
    world = foreign_world()
    found, alone = states_of(method, world), states_of(Standalone(), world)
    assert found.keys() == alone.keys() and len(alone) == 4
    assert all(same_parcel(found[name], alone[name]) for name in alone)


@pytest.mark.parametrize("method", [FD(), FedProto()], ids=lambda method: type(method).__name__)
def test_method_in_its_first_round_is_standalone_bit_for_bit(method: Method) -> None:
    """There is nothing to learn from yet."""
    world = foreign_world()
    found, alone = states_of(method, world, 1), states_of(Standalone(), world, 1)
    assert all(same_parcel(found[name], alone[name]) for name in alone)
    later, alone = states_of(method, world, 2), states_of(Standalone(), world, 2)
    assert not all(same_parcel(later[name], alone[name]) for name in alone)


def test_fd_with_one_device_is_standalone_bit_for_bit() -> None:
    """A device does not learn from its own outputs."""
    world = TinyWorld.make("mlp", sizes=(9,))
    found, alone = states_of(FD(), world), states_of(Standalone(), world)
    assert same_parcel(found["0"], alone["0"])


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_shared_net_that_learns_from_labels_alone_is_fedavg(weighting: Any) -> None:
    """FML's to the bit, whatever the own nets learn; FedKD's but for the rounding of its decomposition."""
    world = foreign_world(sizes=(8, 8, 8, 8))
    alone = TinyWorld.make(models=[("b", tiny_model("mlp", hidden=(6, 5)))], sizes=(8, 8, 8, 8), labels=LABELS)
    changed = world.play(FML(beta=1.0, shared_tier="b", weighting=weighting), world.engine(FML()))
    assert same_parcel(changed, alone.play(FedAvg(weighting), alone.engine(FedAvg())))
    kd = FedKD(0.0, 0.0, energy_start=1.0, energy_end=1.0, shared_tier="b", weighting=weighting)
    with default_dtype(torch.float64):
        found = world.play(kd, world.engine(kd))
        expected = alone.play(FedAvg(weighting), alone.engine(FedAvg()))
    assert largest_difference(found, expected) <= 1e-12


@pytest.mark.parametrize("method", [FML(), FedKD(energy_start=1.0, energy_end=1.0)], ids=["fml", "fedkd"])
def test_shared_net_of_equal_nets_trains_as_the_own_one(method: Method) -> None:
    """One device, one architecture: what starts equal and has the same losses stays equal."""
    world = TinyWorld.make("mlp", sizes=(9,), optimizer=Sgd(0.1, momentum=0.9))
    engine = world.engine(method)
    server = world.play(method, engine, rounds=1)
    assert largest_difference(server, {"weights": committed_states(engine)["0"]["weights"]}) <= 1e-6
    assert largest_difference(server, method.start(world.fleet, world.seed)) > 1e-3


def test_fedgh_with_a_tiny_server_rate_shares_the_initial_header() -> None:
    world, method = foreign_world(), FedGH(server_rate=1e-30)
    server = world.play(method, world.engine(method))
    assert largest_difference(server, method.start(world.fleet, world.seed)) <= 1e-25
    changed = foreign_world().play(FedGH(), world.engine(FedGH()))
    assert largest_difference(server, changed) > 1e-4


def test_fedgh_server_takes_one_step_for_every_device_and_class() -> None:
    """In the order of the round's draw: by hand for one device with two classes, in either order."""
    world = TinyWorld.make("mlp", sizes=(6,), labels=[[1, 3]])
    mean = torch.arange(20, dtype=torch.float32).reshape(4, 5) / 10
    upload = {"prototypes": {"mean": mean, "seen": torch.tensor([False, True, False, True])}}
    method = FedGH(server_rate=0.5)
    start = method.start(world.fleet, 0)
    found = method.round(start, world.context(FixedUploads(world.engine(method), upload)))["header"]
    candidates = []
    for order in ((1, 3), (3, 1)):
        weight, bias = start["header"]["weight"].clone(), start["header"]["bias"].clone()
        for label in order:
            error = (weight @ mean[label] + bias).softmax(0) - nn.functional.one_hot(torch.tensor(label), 4)
            weight, bias = weight - 0.5 * error[:, None] * mean[label], bias - 0.5 * error
        candidates.append(float((found["weight"] - weight).abs().max() + (found["bias"] - bias).abs().max()))
    assert min(candidates) <= 1e-6 < 1e-3 < max(candidates)


@pytest.mark.parametrize("name", ["fedgh", "fedtgp"])
@pytest.mark.parametrize(("value", "seen", "settings"), [(0.0, False, {}), (1e17, True, {"server_rate": 1e30})])
def test_server_without_any_class_or_with_diverged_training_keeps_its_state(
    name: str, value: float, seen: bool, settings: dict[str, float]
) -> None:
    """Uploads that the gate admits and no honest device sends."""
    world, method = TinyWorld.make("mlp", sizes=(6, 6)), METHODS[name](**settings)
    upload = {"prototypes": {"mean": torch.full((4, 5), value), "seen": torch.full((4,), seen)}}
    first = method.start(world.fleet, 0)
    after = method.round(first, world.context(FixedUploads(world.engine(method), upload)))
    trained = "header" if name == "fedgh" else "generator"
    assert same_parcel({trained: after[trained]}, {trained: first[trained]})


@given(
    rows=st.integers(2, 6), columns=st.integers(2, 6), rank=st.integers(1, 4), energy=st.floats(0.1, 1.0),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_truncate_keeps_the_fewest_singular_values_above_the_energy(
    rows: int, columns: int, rank: int, energy: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    old, left, right = (
        torch.randn(1, *shape, generator=draw, dtype=torch.float64)
        for shape in ((rows, columns), (rows, rank), (rank, columns))
    )
    change = left @ right
    made = truncate({"w": old + change, "b": old[:, 0] + 1}, {"w": old, "b": old[:, 0]}, torch.tensor([energy]))
    values, kept = (torch.linalg.svdvals(one[0]) for one in (change, made["w"] - old))
    count = int((kept > 1e-9 * values[0]).sum())
    torch.testing.assert_close(kept[:count], values[:count])
    squares = values.square()
    assert squares[:count].sum() >= (energy - 1e-6) * squares.sum()
    assert squares[: count - 1].sum() <= (energy + 1e-6) * squares.sum()
    torch.testing.assert_close(made["b"], old[:, 0] + 1)  # vectors are sent as they are


def test_truncate_of_no_change_is_no_change() -> None:
    old = {"w": torch.randn(2, 3, 4, 3, 3)}
    assert same_parcel({"w": truncate(old, old, torch.tensor([0.95, 0.5]))}, {"w": old})


@pytest.mark.usefixtures("double")
def test_fedkd_factors_of_enough_rank_arrive_as_updates_were_cut() -> None:
    """With `low_rank` the devices' factors travel, and are what is counted: by hand, in both directions."""
    world, method = foreign_world(), FedKD(energy_start=0.4, energy_end=0.4)
    compression = Compression(LowRank(0.5, error_feedback=False))
    plain, engine = world.engine(method), with_compression(world.engine(method), compression)
    expected = found = method.start(world.fleet, world.seed)
    for number in (1, 2, 3):
        expected = method.round(expected, world.context(plain, number))
        context = replace(world.context(engine, number), wire=compression)
        found = method.round(found, context)
        for one in (plain, engine):
            one.commit(number)
    assert world.refusals == []
    assert largest_difference(found, expected) <= 1e-12
    factors = entries = 0
    for shape in method.shared_model(world.fleet.tier_models).shapes().values():
        rows, columns = shape[0], shape[1:].numel()
        rank = -(-min(rows, columns) // 2)
        factors += min(rank * (rows + columns), rows * columns) if len(shape) > 1 else rows
        entries += rows * columns
    assert factors < entries
    traffic = context.traffic
    assert (traffic.compressed_bytes_up, traffic.bytes_up) == (4 * 8 * factors, 4 * 8 * entries)
    assert traffic.compressed_bytes_down == traffic.bytes_down == 4 * 8 * (entries + 1)  # the energy is sent too


def test_fedkd_energy_rises_over_the_schedule_and_stays() -> None:
    method = FedKD(energy_rounds=10)
    assert [round(method.energy(number), 4) for number in (1, 5, 10, 20)] == [0.953, 0.965, 0.98, 0.98]


def test_largest_margin_is_between_means_of_classes() -> None:
    prototypes, labels = torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0], [5.0, 0.0]]), torch.tensor([0, 0, 2, 3])
    assert float(largest_margin(prototypes, labels, 5)) == pytest.approx(5.0)  # of classes 2 and 3: sqrt(4² + 3²)
    assert float(largest_margin(prototypes[:2], labels[:2], 5)) == 0.0


@pytest.mark.parametrize("family", ["mlp", "convnet", "lenet", "preresnet"])
def test_nearest_prototype_classifies_by_the_smallest_distance(family: str) -> None:
    model = tiny_model(family, normalization="none")
    draw = torch.Generator().manual_seed(0)
    width, x = model.feature_width(), model.random_inputs(draw, 2, 30)
    weights = {n: torch.randn(2, *s, generator=draw) for n, s in model.shapes().items()}
    mean = torch.randn(2, 4, width, generator=draw)
    count = torch.tensor([[1.0, 0.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    features = model(weights, x).taps["features"].flatten(2)
    distances = torch.cdist(features, mean)
    distances[0, :, 1] = torch.inf  # a class without a prototype
    outputs = model(nearest_prototype(model, weights, {"mean": mean, "count": count}), x).logits
    assert torch.equal(outputs[0].argmax(-1), distances[0].argmin(-1))
    assert torch.equal(outputs[1], model(weights, x).logits[1])  # none is known: its own last layer


class WithoutBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.classifier = (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.ReLU()),
            nn.Linear(5, 4, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.classifier(self.body(x))
        return made


def test_last_layer_without_bias_is_refused_where_it_is_replaced() -> None:
    fleet = TinyWorld.make(models=[("a", build_model("bare", WithoutBias, {}, (1, 6, 6), 4))]).fleet
    assert find_head(fleet.global_model) == {}
    for method in (FedProto(), FedTGP()):
        assert "bare has another; set method.nearest = false" in str(fleet_problem(method, fleet))
        assert fleet_problem(replace(method, nearest=False), fleet) is None
    assert "fedgh shares a last layer that is linear, with a bias" in str(fleet_problem(FedGH(), fleet))
    assert fleet_problem(FML(), fleet) is None


@pytest.mark.parametrize("name", ["fedproto", "fedgh", "fedtgp"])
def test_features_of_two_lengths_are_refused_with_a_hint(name: str) -> None:
    problem = str(fleet_problem(METHODS[name](), TinyWorld.make("mlp", widths=(1.0, 0.5)).fleet))
    assert problem.startswith(f"{name} needs features of the same length in all tiers, and they have: ")
    assert "give the last hidden layers the same width" in problem


@pytest.mark.parametrize("name", ["fd", "fedproto", "fedkd", "fedgh", "fedtgp"])
@pytest.mark.parametrize("family", ["transformer", "unet"])
def test_nets_that_predict_tokens_or_pixels_are_refused_by_name(name: str, family: str) -> None:
    problem = str(fleet_problem(METHODS[name](), TinyWorld.make(family).fleet))
    assert problem.startswith(f"{name} needs one prediction for every example, and {family} predicts each")


@pytest.mark.parametrize("name", FOREIGN)
def test_task_without_class_labels_is_refused_by_name_or_trained(name: str) -> None:
    problems = {task: METHODS[name]().check_task(TASKS[task]) for task in ("multi_label", "regression")}
    if name == "fml":
        assert set(problems.values()) == {None}
    else:
        assert all(str(one).startswith(f"{name} needs one class label for every example") for one in problems.values())


def test_unknown_shared_tier_is_refused_with_those_there_are() -> None:
    for method in (FML(shared_tier="c"), FedKD(shared_tier="c")):
        assert "'c', which is no tier that takes part: a, b" in str(fleet_problem(method, foreign_world().fleet))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_nets_and_redrawn_tiers_are_trained_and_refused(name: str) -> None:
    fleet = foreign_world().fleet
    assert fleet_problem(METHODS[name](), fleet) is None
    assert "cannot be of another tier" in str(fleet_problem(METHODS[name](), replace(fleet, assignment="redrawn")))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedproto", "fedgh", "fedtgp"])
def test_check_method_on_nets_with_features_of_one_length_passes(name: str) -> None:
    """The built-in families change the length of their features with their width."""
    settings = {"server_epochs": 2} if name == "fedtgp" else {}
    report = check_method(METHODS[name], model=same_features, settings=settings)
    assert report.passed == tuple(METHOD_CHECKS)
    assert "two widths" in report.notes["check_fleets"]


def same_features(*, input_shape: tuple[int, ...], classes: int, width: float = 1.0) -> nn.Module:
    hidden = max(1, round(8 * width))
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, hidden), nn.ReLU(), nn.Linear(hidden, 6), nn.ReLU(), nn.Linear(6, classes)
    )


@pytest.mark.parametrize("name", FOREIGN)
def test_training_macs_add_the_shared_net(name: str) -> None:
    models = foreign_world().fleet.tier_models
    macs = {tier: 3.0 * compute_cost(model).macs * 10 for tier, model in models.items()}
    smallest = min(models, key=lambda tier: count_parameters(models[tier].shapes()))
    expected = macs["a"] + (macs[smallest] if name in ("fml", "fedkd") else 0)
    assert training_macs(METHODS[name](), models["a"], models, 10, 2) == expected

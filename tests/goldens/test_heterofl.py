"""HeteroFL compared with values worked out by hand: aggregation, evaluation and batch norm statistics."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Constant, Milestones, Schedule, Sgd, mask_logits, optimizer_at, supervised_loss
from fedloom.data import Dataset, Examples, Partition, Preparation
from fedloom.engines import ClientStateStore, InProcess, build_client_data
from fedloom.evaluation import BatchNormStatistics, Evaluator
from fedloom.fleet import Device, Fleet, Reply, Request, RoundContext, make_nested_tiers, tier_slices
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import build_model
from fedloom.tensors import Parcel


def two_layers(size: int) -> nn.Module:
    """A hidden matrix that is sliced on both axes, and a classifier that is sliced on its columns."""
    return nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, 3))


def fleet_of(*sizes: int) -> Fleet:
    """One device per size; device and tier have the same index."""
    models = [(f"tier{size}", build_model("two_layers", two_layers, {"size": size}, (size,), 3)) for size in sizes]
    return Fleet(make_nested_tiers(models), tuple(1 / len(sizes) for _ in sizes), len(sizes), seed=0)


def one_round(
    scripted: Callable[..., Any],
    fleet: Fleet,
    server: Mapping[str, Tensor],
    uploads: Mapping[str, tuple[Mapping[str, Tensor], list[int]]],
    cohort: list[Device] | None = None,
) -> Mapping[str, Tensor]:
    """A round with scripted uploads: tier -> (weights, labels); weights that are not given stay as received."""

    def answer(device: Device, inbox: Parcel) -> Reply:
        weights, labels = uploads[device.tier]
        seen = torch.tensor([label in labels for label in range(3)])
        return Reply(device, 1, {"weights": {**inbox["weights"], **weights}, "labels": {"seen": seen}})

    context = RoundContext(1, cohort or fleet.devices(1), fleet, scripted(answer))
    return HeteroFL().round({"weights": server}, context)["weights"]


def old_weights(hidden: list[list[float]], rows: float) -> dict[str, Tensor]:
    return {"0.weight": torch.tensor(hidden), "1.weight": torch.full((3, 2), rows), "1.bias": torch.full((3,), rows)}


def test_heterofl_nested_average_matches_hand_value(scripted: Callable[..., Any]) -> None:
    uploads = {
        "tier2": ({"0.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, [0, 1, 2]),
        "tier1": ({"0.weight": torch.tensor([[5.0]])}, [0, 1, 2]),
    }
    made = one_round(scripted, fleet_of(2, 1), old_weights([[0.0, 0.0], [0.0, 0.0]], 0.0), uploads)
    assert made["0.weight"].tolist() == [[3.0, 2.0], [3.0, 4.0]]


def test_heterofl_classifier_rows_match_hand_value(scripted: Callable[..., Any]) -> None:
    uploads = {
        "tier2": (
            {
                "1.weight": torch.tensor([[1.0, 1.0], [2.0, 2.0], [9.0, 9.0]]),
                "1.bias": torch.tensor([1.0, 2.0, 9.0]),
            },
            [0, 1],
        ),
        "tier1": ({"1.weight": torch.tensor([[7.0], [4.0], [6.0]]), "1.bias": torch.tensor([7.0, 4.0, 6.0])}, [1, 2]),
    }
    made = one_round(scripted, fleet_of(2, 1), old_weights([[-1.0, -1.0], [-1.0, -1.0]], -1.0), uploads)
    assert made["1.weight"].tolist() == [[1.0, 1.0], [3.0, 2.0], [6.0, -1.0]]
    assert made["1.bias"].tolist() == [1.0, 3.0, 6.0]  # a bias row is skipped like its weight row


def test_heterofl_rows_of_absent_labels_are_unchanged(scripted: Callable[..., Any]) -> None:
    new = {"1.weight": torch.full((3, 2), 5.0), "1.bias": torch.full((3,), 5.0)}
    uploads = {"tier2": (new, [0]), "tier1": ({"1.weight": torch.full((3, 1), 7.0)}, [0])}
    made = one_round(scripted, fleet_of(2, 1), old_weights([[0.0, 0.0], [0.0, 0.0]], -1.0), uploads)
    assert made["1.weight"].tolist() == [[6.0, 5.0], [-1.0, -1.0], [-1.0, -1.0]]


def test_heterofl_small_device_alone_matches_hand_value(scripted: Callable[..., Any]) -> None:
    fleet = fleet_of(2, 1)
    small = [device for device in fleet.devices(1) if device.tier == "tier1"]
    uploads = {"tier1": ({"0.weight": torch.tensor([[8.0]])}, [0, 1, 2])}
    made = one_round(scripted, fleet, old_weights([[0.0, 1.0], [2.0, 3.0]], 0.0), uploads, small)
    assert made["0.weight"].tolist() == [[8.0, 1.0], [2.0, 3.0]]


def test_heterofl_example_weighting_matches_hand_value(scripted: Callable[..., Any]) -> None:
    fleet = fleet_of(2, 1)
    values, counts = {"tier2": 1.0, "tier1": 5.0}, {"tier2": 10, "tier1": 30}

    def answer(device: Device, inbox: Parcel) -> Reply:
        weights = {name: torch.full_like(old, values[device.tier]) for name, old in inbox["weights"].items()}
        sent = {"weights": weights, "labels": {"seen": torch.ones(3, dtype=torch.bool)}}
        return Reply(device, counts[device.tier], sent)

    context = RoundContext(1, fleet.devices(1), fleet, scripted(answer))
    server = {"weights": old_weights([[0.0, 0.0], [0.0, 0.0]], 0.0)}
    made = HeteroFL(weighting="examples").round(server, context)["weights"]
    assert made["0.weight"].tolist() == [[4.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("fill", "expected"),
    [(0.0, math.log(math.e**2 + 1 + math.exp(-1)) - 2), (-math.inf, math.log(math.e**2 + math.exp(-1)) - 2)],
)
def test_masked_cross_entropy_matches_hand_value(fill: float, expected: float) -> None:
    logits = torch.tensor([[[2.0, 5.0, -1.0]]], dtype=torch.float64)
    seen = torch.tensor([[True, False, True]])
    batch = Batch(torch.zeros(1, 1, 1), torch.tensor([[0]]))
    loss = supervised_loss(mask_logits(logits, seen, fill), batch)
    assert loss.tolist() == pytest.approx([expected], abs=1e-12)
    assert round(float(loss[0]), 6) == {0.0: 0.169846, -math.inf: 0.048587}[fill]


def constant_logits() -> nn.Module:
    return nn.Linear(1, 3)


@pytest.mark.parametrize(("fill", "accuracy"), [(0.0, 0.0), (-math.inf, 100.0)])
def test_local_evaluation_masked_prediction_matches_hand_value(fill: float, accuracy: float) -> None:
    """Logits (-1, 5, -2), labels {0, 2}, truth 0: filled with 0 class 1 wins, filled with -inf class 0."""
    tiers = make_nested_tiers([("a", build_model("constant_logits", constant_logits, {}, (1,), 3))])
    examples = Examples(torch.zeros(1, 1), torch.tensor([0]))
    evaluator = Evaluator(
        Dataset("one", examples, examples, 3, Preparation()),
        local_tests=[torch.tensor([0])],
        seen_labels=torch.tensor([[True, False, True]]),
        statistics=BatchNormStatistics(),
    )
    weights = {"weight": torch.zeros(3, 1), "bias": torch.tensor([-1.0, 5.0, -2.0])}
    fleet = Fleet(tiers, (1.0,), 1, seed=0)
    held = build_client_data(evaluator.dataset, Partition((np.array([0]),), (np.array([0]),)), fleet)
    engine = InProcess(held, ClientStateStore(lambda device: {}), Schedule(), Sgd(), Constant(), seed=0)
    rows = evaluator.rows(
        {"server": tier_slices(weights, fill)},
        fleet,
        lambda task, boxes: engine.ask(Request(task, boxes, 1)),
        1,
        per_device=False,
    )
    found = {(row.test, row.metric): row.value for row in rows}
    assert found["local", "accuracy"] == accuracy
    assert found["global", "accuracy"] == 0.0  # global evaluation is not masked: 5 is the largest logit


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))


@pytest.mark.parametrize(
    ("query", "batch_size", "mean", "variance"),
    # pooled into one batch: 92.8 / 4 around the common mean
    [("per_device", 3, 5.5, 9.0), ("pooled", 5, 6.2, 23.2)],
)
def test_static_batch_norm_matches_hand_value(query: Any, batch_size: int, mean: float, variance: float) -> None:
    """One device holds (1, 3), the other (5, 9, 13)."""
    examples = Examples(torch.tensor([[1.0], [3.0], [5.0], [9.0], [13.0]]), torch.zeros(5, dtype=torch.int64))
    data = Dataset("five", examples, examples, 2, Preparation())
    partition = Partition((np.array([0, 1]), np.array([2, 3, 4])), (np.array([0]), np.array([1])))
    fleet = Fleet(make_nested_tiers([("a", build_model("normed", normed, {}, (1,), 2))]), (1.0,), 2, seed=0)
    engine = InProcess(
        build_client_data(data, partition, fleet),
        ClientStateStore(lambda device: {}),
        Schedule(),
        Sgd(),
        Constant(),
        seed=0,
    )
    asked = BatchNormStatistics(query, batch_size)
    weights = fleet.global_model.initial_weights(0)
    tier = fleet.largest
    filled = asked.fill({tier: weights}, fleet, lambda task, inboxes: engine.ask(Request(task, inboxes, 1)), 1)[tier]
    assert filled["0.running_mean"].tolist() == pytest.approx([mean], abs=1e-6)
    assert filled["0.running_var"].tolist() == pytest.approx([variance], abs=1e-5)
    assert all(torch.equal(filled[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(("round_number", "rate"), [(1, 0.1), (150, 0.1), (151, 0.01), (250, 0.01), (251, 0.001)])
def test_lr_schedule_of_cifar10_is_as_published(round_number: int, rate: float) -> None:
    assert optimizer_at(Sgd(0.1), Milestones((150, 250)), round_number).lr == pytest.approx(rate, rel=1e-12)

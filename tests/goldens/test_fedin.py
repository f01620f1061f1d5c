"""FedIN compared with values worked out by hand, on models of three weights."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Batch, Client, Sgd, Step, gradient
from fedloom.data import Examples
from fedloom.fleet import Fleet, Reply, RoundContext, make_tiers
from fedloom.methods.fedin import FedIN, features_loss
from fedloom.models import Model, StepSeeds, build_model


class Times(nn.Module):
    """Multiplies by its weight and sums."""

    def __init__(self, size: int, offset: float = 0.0):
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(size)), offset

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.offset


class Parts(nn.Module):
    """The logit is too large by `offset`."""

    def __init__(self, size: int, offset: float):
        super().__init__()
        self.extractor, self.intermediate, self.classifier = Times(size), Times(size), Times(size, offset)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.classifier(self.intermediate(self.extractor(x)))
        return made


def net(size: int = 1, offset: float = 0.0) -> Model:
    return build_model("parts", Parts, {"size": size, "offset": offset}, (size,), size)


def half_a_square(logits: Tensor, batch: Batch) -> Tensor:
    return logits.square().sum(-1).mean(1) / 2


def client_of(whole: Model, client_for: Callable[..., Client], **changes: Any) -> Client:
    """One device, one example of ones, one step."""
    size = whole.input_shape[0]
    one = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    return client_for(whole, Examples(torch.ones(1, size), torch.zeros(1, dtype=torch.int64)), [one], **changes)


CASES = [
    ((2.0, 0.0), (-1.0, 3.0), (0.0, 3.0), (1.0, 3.0)),
    ((1.0, 2.0), (3.0, -1.0), (3.0, -1.0), (4.0, 1.0)),
    ((1.0, 0.0), (-1.0, 1.0), (0.0, 1.0), (0.0, 1.0)),
]


@pytest.mark.parametrize(("own", "other", "exact", "summed"), CASES)
def test_combine_gradients_matches_hand_values(own: Any, other: Any, exact: Any, summed: Any) -> None:
    given = {"w": torch.tensor([own])}, {"w": torch.tensor([other])}
    for middle, expected in (("project", exact), ("project_all", exact), ("sum", summed)):
        assert FedIN(middle=middle).combine_gradients(*given)["w"].tolist() == [list(expected)]  # type: ignore[arg-type]


def test_project_by_tensor_or_over_all_matches_hand_values() -> None:
    """One of two tensors opposes the labels, but by less than the other agrees."""
    own = {"a": torch.tensor([[2.0, 0.0]]), "b": torch.tensor([[1.0, 2.0]])}
    other = {"a": torch.tensor([[-1.0, 3.0]]), "b": torch.tensor([[3.0, 2.0]])}
    apart, together = (FedIN(middle=middle).combine_gradients(own, other) for middle in ("project", "project_all"))  # type: ignore[arg-type]
    assert (apart["a"].tolist(), apart["b"].tolist()) == ([[0.0, 3.0]], [[3.0, 2.0]])
    assert (together["a"].tolist(), together["b"].tolist()) == ([[-1.0, 3.0]], [[3.0, 2.0]])


def test_fedin_ends_are_averaged_for_any_sizes(scripted: Callable[..., Any]) -> None:
    whole, method = net(2), FedIN()
    fleet = Fleet(make_tiers([("a", whole)]), (1.0,), 2, seed=0)
    uploads = {"0": ((1.0, 3.0), 1), "1": ((3.0, 5.0), 99)}

    def answer(device: Any, inbox: Any) -> Reply:
        numbers, examples = uploads[device.name]
        sent = {"extractor.weight": torch.zeros(2), "classifier.weight": torch.tensor(numbers)}
        return Reply(
            device, examples, {"weights": sent, "pairs": {"enter": torch.zeros(0, 2), "leave": torch.ones(0, 2)}}
        )

    server = method.round(method.start(fleet, 0), RoundContext(1, fleet.devices(1), fleet, scripted(answer)))
    assert server["weights"]["classifier.weight"].tolist() == [2.0, 4.0]


def test_features_loss_is_mean_over_all_entries(client_for: Callable[..., Client]) -> None:
    """For an input of ones the output is the weight, (1, 2), so its gradient is that of the output."""
    client = client_of(net(2), client_for)
    loss = features_loss(client, {"enter": torch.ones(1, 1, 2), "leave": torch.tensor([[[0.0, 4.0]]])})
    weights, batch = {"intermediate.weight": torch.tensor([[1.0, 2.0]])}, client.batch(client.plan[0])
    assert loss(weights, batch).tolist() == [2.5]
    assert gradient(loss, weights, batch)["intermediate.weight"].tolist() == [[1.0, -2.0]]


@pytest.mark.parametrize(
    ("middle", "weight"), [("project", 2.0), ("project_all", 2.0), ("sum", 1.8), ("sequential", 1.08)]
)
def test_fedin_step_on_one_weight_matches_hand_value(
    middle: Any, weight: float, client_for: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The labels' gradient is -4, the features' 6: 0 projected, 2 summed. Sequentially: 2.4, where it is 13.2."""
    monkeypatch.setattr(import_module("fedloom.client.losses"), "supervised_loss", half_a_square)
    memory = {"weights": {"intermediate.weight": torch.tensor([[2.0]])}}
    client = client_of(net(offset=-6.0), client_for, optimizer=Sgd(0.1), state=memory)
    ends = {f"{part}.weight": torch.ones(1, 1) for part in ("extractor", "classifier")}
    pairs = {"enter": torch.tensor([[[3.0]]]), "leave": torch.tensor([[[5.0]]])}
    made = FedIN(middle=middle).train.run(client, {"weights": ends, "pairs": pairs})
    assert made.state is not None
    assert float(made.state["weights"]["intermediate.weight"]) == pytest.approx(weight, abs=1e-6)
    sent = {name: float(one) for name, one in made.upload["weights"].items()}
    assert sent == pytest.approx({"extractor.weight": 1.8, "classifier.weight": 1.8}, abs=1e-6)

"""FedGKT compared with values worked out by hand, and its traffic."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.client import Client, PaddedIndices, Sgd, Step
from fedloom.data import Examples
from fedloom.engines import DryRun
from fedloom.fleet import Fleet, RoundContext, make_tiers
from fedloom.methods.fedgkt import FedGKT, distillation
from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.tensors import payload_bytes


class ConstantLogits(nn.Module):
    """Its logits are its weights, for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.extractor, self.weight = nn.Identity(), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.extractor(x) * 0 + self.weight
        return made


def constant_logits() -> Model:
    return build_model("constant_logits", ConstantLogits, {}, (2,), 2)


@pytest.mark.usefixtures("double")
def test_distillation_at_temperature_three_matches_hand_value() -> None:
    """The authors add 1e-7 to the teacher's probabilities, which shows in the sixth digit."""
    made = distillation(torch.zeros(1, 1, 2), torch.tensor([[[3.0, 0.0]]]), 3.0)
    added = 9 * 1e-7 * (2 + math.log(0.731059 / 0.5) + math.log(0.268941 / 0.5))
    assert float(made) - added == pytest.approx(0.998497, abs=5e-7)


@pytest.mark.parametrize(
    ("weight", "has_teacher", "logit"),
    [(1.0, True, 0.119318), (0.5, True, 0.084659), (0.0, True, 0.05), (1.0, False, 0.05)],
)
def test_fedgkt_step_matches_hand_value(
    weight: float, has_teacher: bool, logit: float, client_for: Callable[..., Client]
) -> None:
    """The label's gradient is -1/2, the teacher's 3 (1/2 - e/(1+e)) = -0.693176; the step is 0.1 times their sum."""
    one = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)), torch.zeros(1, 1).long())
    held = PaddedIndices(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool))
    examples = Examples(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    memory = {"weights": {"weight": torch.zeros(1, 2)}}
    client = client_for(constant_logits(), examples, [one], Sgd(0.1), train_indices=held, state=memory)
    inbox: Any = {"teacher": {"logits": torch.tensor([[[3.0, 0.0]]])}} if has_teacher else {}
    made = FedGKT(weight=weight).train.run(client, inbox)
    assert made.upload["transfer"]["logits"].flatten().tolist() == pytest.approx([logit, -logit], abs=1e-5)


def small() -> Model:
    return build_model("bottleneck", MODELS["bottleneck"], {}, (3, 32, 32), 10)


def test_transfer_batch_bytes_per_example_match_hand_value() -> None:
    layout = FedGKT().train.sends["transfer"](small(), {}, 7)
    parcel = {"transfer": {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}}
    assert payload_bytes(parcel) == 7 * 65_584


def test_fedgkt_round_cost_matches_hand_value() -> None:
    """Nothing is sent down in the first round; then ten logits for each example."""
    fleet, method = Fleet(make_tiers([("a", small())]), (1.0,), 2, seed=0), FedGKT()
    engine = DryRun(lambda device: 5 if device.name == "0" else 2)
    server, moved = method.start(fleet, 0), []
    for number in (1, 2):
        context = RoundContext(number, fleet.devices(number), fleet, engine)
        server = method.round(server, context)
        moved.append((context.traffic.bytes_down, context.traffic.bytes_up))
    assert moved == [(0, 7 * 65_584), (7 * 40, 7 * 65_584)]

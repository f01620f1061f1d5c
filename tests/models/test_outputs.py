"""What a module's forward may return: logits, `Outputs`, an object with logits; anything else is refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedloom as fl
from fedloom.models.structure import as_outputs

SequenceClassifierOutput = pytest.importorskip("transformers.modeling_outputs").SequenceClassifierOutput


class Net(nn.Module):
    def __init__(self, wrap: Any, classes: int) -> None:
        super().__init__()
        self.wrap, self.classifier = wrap, nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.classifier(x.flatten(1)))


def simulate(wrap: Any) -> fl.Simulation:
    tiers = fl.tiers(lambda input_shape, classes: Net(wrap, classes), all={"share": 1.0})
    return fl.Simulation("digits", devices=20, tiers=tiers, method="fedavg", fleet={"participation": 0.1})


def test_outputs_of_transformers_are_its_logits() -> None:
    plain, wrapped = (simulate(wrap) for wrap in (lambda x: x, lambda x: SequenceClassifierOutput(logits=x)))
    (one,), (other,) = (list(sim.rounds(1)) for sim in (plain, wrapped))
    assert one.metrics == other.metrics
    x = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(plain.run.model("all")(x), wrapped.run.model("all")(x))


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (lambda x: (x, x), "a tuple of 2"),
        (lambda x: {"logits": x, "loss": x.sum()}, "a dict with 'logits', 'loss'"),
        (lambda x: [x], "a list of 1"),
        (lambda x: SequenceClassifierOutput(loss=x.sum()), "a SequenceClassifierOutput with 'loss'"),
        (lambda x: None, "a NoneType"),
    ],
)
def test_outputs_of_another_type_are_named(wrap: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"its forward returned {found}; it must return the logits as one tensor"):
        as_outputs(wrap(torch.zeros(2, 3)))
    with pytest.raises(fl.RecipeError, match=f"MODEL_BUILD: .* its forward returned {found}"):
        simulate(wrap)

"""Memory and speed of training: what is foreseen from small batches is what a large one takes."""

import pytest
import torch
from torch import nn

from fedloom.analysis import profiling
from fedloom.analysis.profiling import training_memory, training_speed
from fedloom.client import Adam, Sgd
from fedloom.models import MODELS, compute_cost, build_model
from tests.conftest import build_tiny


@pytest.mark.parametrize("family", sorted(MODELS))
def test_small_batches_tell_the_memory_of_a_large_one(family: str) -> None:
    net, optimizer = build_tiny(family, (1, 12, 12)), Sgd(momentum=0.9)
    foreseen = training_memory(net, 24, optimizer)
    assert foreseen == profiling._peak(profiling._record_allocations(net, 24, optimizer))


def test_the_parts_of_a_perceptron_are_counted_by_hand() -> None:
    """Weights twice, their velocity, gradients and a copy of these are there at the end of a step."""
    net = build_model("mlp", MODELS["mlp"], {"hidden": (400,)}, (500,), 10)
    held = 4 * compute_cost(net).parameters
    assert training_memory(net, 1, Sgd(momentum=0.9)) == pytest.approx(5 * held, rel=0.01)
    assert training_memory(net, 1, Adam()) > training_memory(net, 1, Sgd())


def test_more_examples_take_more() -> None:
    net = build_tiny("convnet", (1, 12, 12))
    few, some, many = (training_memory(net, batch, Sgd()) for batch in (8, 16, 32))
    assert few < some < many
    assert many - some == pytest.approx(2 * (some - few), rel=0.05)


class Moody(nn.Module):
    """Does something else with more examples."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.relu() if len(x) > 3 else x)


def test_a_model_of_moods_is_looked_at_with_the_batch_itself() -> None:
    net = build_model("moody", lambda classes: Moody(classes), {}, (4,), 3)
    assert training_memory(net, 7, Sgd()) == profiling._peak(profiling._record_allocations(net, 7, Sgd()))


def test_speed_is_of_work_done() -> None:
    assert 1e3 < training_speed(build_tiny("convnet", (1, 12, 12)), 4, Sgd()) < 1e13

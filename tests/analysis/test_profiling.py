"""Profiling: memory and speed of training, and block sizes that are written to a recipe."""

import tomllib

import pytest
import torch
from torch import nn

from fedloom.analysis import profiling
from fedloom.analysis.profiling import (
    BLOCK_SIZES,
    BlockTiming,
    choose_block_size,
    set_devices_per_block,
    training_memory,
    training_speed,
)
from fedloom.cli.app import main
from fedloom.client import Adam, Sgd
from fedloom.models import MODELS, build_model, compute_cost
from fedloom.recipe.load import load
from fedloom.recipe.registries import Registries
from fedloom.testing import tiny_model as build_tiny


@pytest.mark.parametrize("family", sorted(MODELS))
def test_training_memory_extrapolation_matches_full_batch(family: str) -> None:
    net, optimizer = build_tiny(family, (1, 12, 12)), Sgd(momentum=0.9)
    assert training_memory(net, 24, optimizer) == profiling._peak(profiling._record_allocations(net, 24, optimizer))


def test_training_memory_perceptron_matches_hand_count() -> None:
    """At the peak there are two copies of the weights, their velocity, and two copies of the gradients."""
    net = build_model("mlp", MODELS["mlp"], {"hidden": (400,)}, (500,), 10)
    weight_bytes = 4 * compute_cost(net).parameters
    assert training_memory(net, 1, Sgd(momentum=0.9)) == pytest.approx(5 * weight_bytes, rel=0.01)
    assert training_memory(net, 1, Adam()) > training_memory(net, 1, Sgd())


def test_training_memory_grows_linearly_with_batch() -> None:
    net = build_tiny("convnet", (1, 12, 12))
    few, some, many = (training_memory(net, batch, Sgd()) for batch in (8, 16, 32))
    assert few < some < many
    assert many - some == pytest.approx(2 * (some - few), rel=0.05)


class SizeDependent(nn.Module):
    """Computes differently with more than three examples."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.relu() if len(x) > 3 else x)


def test_training_memory_batch_dependent_model_is_measured_directly() -> None:
    net = build_model("size_dependent", lambda classes: SizeDependent(classes), {}, (4,), 3)
    assert training_memory(net, 7, Sgd()) == profiling._peak(profiling._record_allocations(net, 7, Sgd()))


def test_training_speed_is_macs_per_second() -> None:
    assert 1e3 < training_speed(build_tiny("convnet", (1, 12, 12)), 4, Sgd()) < 1e13


TIMINGS = [BlockTiming("a", {1: 2.0, 2: 1.0}, 2), BlockTiming("b", {1: 1.0, 2: 1.0}, 1)]


@pytest.mark.parametrize(
    "text",
    [
        "rounds = 1 # once\n",
        "rounds = 1\n[engine]\nkind = 'in_process'\n[method]\nname = 'x'\n",
        "rounds = 1\n\n[engine]\ndevices_per_block = { a = 16 }\nkind = 'in_process'\n",
        "rounds = 1\n\n[engine]\ndevices_per_block = 3\n",
        "rounds = 1\n\n[engine]\nkind = 'x'\n\n[engine.devices_per_block]\na = 16\nb = 2\n\n[method]\nname = 'x'\n",
    ],
    ids=["no engine", "an engine", "numbers per tier", "one number", "a table of its own"],
)
def test_set_devices_per_block_leaves_the_rest_unchanged(text: str) -> None:
    before, after = tomllib.loads(text), tomllib.loads(set_devices_per_block(text, TIMINGS))
    assert after["engine"].pop("devices_per_block") == {"a": 2, "b": 1}
    before.setdefault("engine", {}).pop("devices_per_block", None)
    assert after == before
    once = set_devices_per_block(text, TIMINGS)
    assert set_devices_per_block(once, TIMINGS) == once


def test_calibrate_write_gives_a_valid_recipe(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text(
        "rounds = 1\n[data]\ndataset = 'digits'\ndevices = 4\n[model]\nhidden = [2, 3]\n"
        "[[tiers]]\nname = 'all'\nshare = 1.0\n[method]\nname = 'fedavg'\n"
    )
    with pytest.raises(SystemExit) as done:
        main(["calibrate", "my.toml", "--write"])
    assert done.value.code == 0
    assert "written: my.toml" in capsys.readouterr().out
    assert load("my.toml", Registries()).recipe.engine.devices_per_block["all"] in BLOCK_SIZES


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({1: [9, 9, 9], 8: [1.04, 1.04, 1.04], 16: [1, 1, 1]}, 16),  # faster beyond noise, however little
        ({1: [9, 9, 9], 8: [1.04, 1.00, 1.08], 16: [1, 0.99, 1.03]}, 8),  # the same within noise: the smaller
        ({1: [1, 1.1, 1.2], 8: [1, 1.1, 1.2]}, 1),
        ({1: [3.0], 8: [2.0], 16: [2.5]}, 8),
    ],
)
def test_choose_block_size_is_the_fastest_then_the_smallest(times: dict[int, list[float]], best: int) -> None:
    assert choose_block_size(times) == best

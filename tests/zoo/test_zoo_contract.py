"""Modules that nobody wrote for fedloom pass the checks of models, cost what torch counts, and run as documented."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedloom.client import Adam, Schedule, Sgd
from fedloom.methods.fedavg import FedAvg
from fedloom.models import compute_cost
from fedloom.models.batching import Fold, Vmap, batching_mode
from fedloom.models.structure import as_outputs
from fedloom.testing import MODEL_CHECKS, TinyWorld, check_model, largest_difference
from fedloom.testing.methods import largest_change
from tests.models.test_cost_operations import unfused
from tests.zoo.cases import CASES, CLASSES, FAMILIES, names, zoo_model

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "architectures.md"
SIZES = (8, 5, 9, 8)  # unequal, so that some devices finish before others of their block


@pytest.mark.parametrize("name", names(quick=("vgg", "text_encoder", "signal_cnn", "lora_net", "lstm_classifier")))
def test_zoo_module_passes_check_of_models(name: str) -> None:
    case = CASES[name]
    report = check_model(
        FAMILIES[name], input_shape=case.input_shape, tokens=case.tokens, classes=CLASSES, tiers=[case.settings]
    )
    assert report.passed == tuple(MODEL_CHECKS)
    assert set(report.notes) <= {"check_devices_apart"}
    note = report.notes.get("check_devices_apart", "")
    assert ("cannot be run by vmap" in note) == (case.batching == "loop")
    assert bool(note) == (case.batching != "fold")
    assert len(note.splitlines()) <= 1


@pytest.mark.parametrize("name", names())
def test_zoo_module_macs_are_half_of_torch_flops(name: str) -> None:
    model = zoo_model(name)
    module, x = model.module().eval(), model.zero_inputs(1)  # building it may run the net to find its axes
    with unfused(), FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    cost = compute_cost(model)
    assert (cost.macs, cost.uncounted) == (counter.get_total_flops() // 2, ())
    assert cost.macs > 0


def test_macs_of_recurrent_nets_follow_their_rule() -> None:
    """Every step multiplies by both matrices of each layer and direction."""
    length, embedding, hidden = 6, 8, 12
    assert compute_cost(zoo_model("lstm_classifier")).macs == length * 4 * hidden * (embedding + hidden) + 12 * CLASSES
    steps, features, hidden = 7, 3, 8
    layers = (features + hidden) + (2 * hidden + hidden)
    assert compute_cost(zoo_model("gru_classifier")).macs == steps * 2 * 3 * hidden * layers + 16 * CLASSES


@pytest.mark.parametrize("name", ["lora_net", pytest.param("hf_lora", marks=pytest.mark.slow)])
def test_macs_of_adapters_grow_with_their_rank(name: str) -> None:
    found = {rank: compute_cost(zoo_model(name, rank=rank)) for rank in (16, 4, 1)}
    each = {"lora_net": (64 + 16) + (16 + 16), "hf_lora": 6 * 4 * (16 + 16)}[name]  # tokens, two layers of two
    assert found[16].macs - found[4].macs == 12 * each
    assert found[4].macs - found[1].macs == 3 * each
    assert len({cost.frozen_parameters for cost in found.values()}) == 1


def mode_of(name: str) -> str:
    mode, _ = batching_mode(zoo_model(name), True, False)
    return "fold" if isinstance(mode, Fold) else "vmap" if isinstance(mode, Vmap) else "loop"


@pytest.mark.parametrize("name", names())
def test_zoo_module_batching_mode_is_the_documented_one(name: str) -> None:
    assert mode_of(name) == CASES[name].batching
    assert zoo_model(name).one_by_one_reason() == (CASES[name].reason or None)


def loss_of(name: str, weights: dict[str, torch.Tensor], world: TinyWorld) -> float:
    """On all training examples, without dropout; batch norm uses the batch."""
    module = zoo_model(name).module().eval()
    for layer in module.modules():
        layer.train(isinstance(layer, nn.modules.batchnorm._BatchNorm))
    assert not module.load_state_dict(weights, strict=False).unexpected_keys
    train = world.dataset.train
    with torch.no_grad():
        logits = as_outputs(module(world.dataset.preparation(train.x))).logits
    return float(nn.functional.cross_entropy(logits, train.y))


@pytest.mark.parametrize("name", names(quick=()))
def test_zoo_module_trained_for_two_rounds_has_smaller_loss(name: str) -> None:
    model, method = zoo_model(name), FedAvg()
    world = TinyWorld.make(
        models=[("all", model)], sizes=SIZES, input_shape=model.input_shape, classes=CLASSES,
        schedule=Schedule(batch_size=4, epochs=5), optimizer=Adam(0.02),
    )  # fmt: skip
    before = loss_of(name, model.initial_weights(0), world)
    assert loss_of(name, world.play(method, world.engine(method), rounds=2)["weights"], world) < before - 0.02


@pytest.mark.parametrize("name", names(quick=()))
def test_zoo_module_in_block_learns_as_alone_and_says_if_that_is_slow(
    name: str, double: None, caplog: pytest.LogCaptureFixture
) -> None:
    model, method = zoo_model(name), FedAvg()
    world = TinyWorld.make(
        models=[("blocks", model)], sizes=SIZES, input_shape=model.input_shape, classes=CLASSES,
        schedule=Schedule(batch_size=4, epochs=3), optimizer=Sgd(0.1, momentum=0.5),
    )  # fmt: skip
    alone, block = (world.play(method, world.engine(method, devices_per_block=size)) for size in (1, len(SIZES)))
    assert largest_difference(alone, block) <= 1e-9
    assert largest_change(method, world, alone, {}) > 1e-3
    assert not world.refusals
    assert all(row.value == row.value for row in world.evaluate(method, block, world.engine(method)))
    slow = f"tier blocks trains one device at a time, which is slower: {CASES[name].reason}"
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == ([("WARNING", slow)] if CASES[name].reason else [])


def test_page_on_architectures_states_batching_of_every_module() -> None:
    words = {"fold": "as one network", "vmap": "by vmap", "loop": "one by one"}
    head, *rows = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert head == ("module", "devices of a block run")
    assert sorted(rows) == sorted((case.title, words[case.batching]) for case in CASES.values())

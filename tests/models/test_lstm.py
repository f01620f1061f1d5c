"""FedHeNN's nets for text: torch's LSTM as reference, pretrained word vectors, narrow nets inside wide ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom.footprints import find_footprint
from fedloom.models import MODELS, Model, StepSeeds, build_model, compute_cost
from fedloom.models.lstm import LstmLayer

SIZES = {"embedding": 6, "hidden": 4, "features": 5, "dropout": 0.0}
LENGTH, TOKENS = 7, 9
Weights = Callable[..., dict[str, Tensor]]


def net_of(**settings: Any) -> Model:
    return build_model("lstm", MODELS["lstm"], {**SIZES, **settings}, (LENGTH,), 2, TOKENS)


def rows(net: Model, devices: int = 1) -> Tensor:
    return net.random_inputs(torch.Generator().manual_seed(1), devices, 3)


def torchs_own(net: Model, w: dict[str, Tensor], layers: int) -> nn.LSTM:
    """The same weights in torch's layout, with the gates stacked along the rows."""
    hidden, inputs, _ = w["cells.0.weight"].shape
    own = nn.LSTM(inputs, hidden, layers, batch_first=True).double()
    names = {"weight_ih": "weight", "weight_hh": "recurrent", "bias_ih": "bias", "bias_hh": "recurrent_bias"}
    for layer in range(layers):
        for theirs, mine in names.items():
            stacked = w[f"cells.{layer}.{mine}"].permute(2, 0, 1).flatten(0, 1)
            getattr(own, f"{theirs}_l{layer}").data = stacked if "weight" in theirs else stacked.flatten()
    return own


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("step_seeds", [None, StepSeeds((0,))], ids=["judging", "training"])
def test_lstm_forward_matches_torch(step_seeds: StepSeeds | None, layers: int, block_weights: Weights) -> None:
    net = net_of(layers=layers)
    weights, x = block_weights(net, 1), rows(net)
    w = {name: tensor[0] for name, tensor in weights.items()}
    states, _ = torchs_own(net, w, layers)(w["lookup.weight"][x[0]])
    features = (states[:, -1] @ w["hidden.weight"].mT + w["hidden.bias"]).relu()
    result = net(weights, x, step_seeds)
    assert list(result.exits) == ["logits"]
    assert torch.allclose(result.taps["features"][0], features, rtol=0, atol=1e-10)
    logits = features @ w["classifier.weight"].mT + w["classifier.bias"]
    assert torch.allclose(result.logits[0], logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("devices", [1, 3])
def test_lstm_gradient_matches_torch(devices: int, block_weights: Weights) -> None:
    net = net_of()
    weights, x = block_weights(net, devices), rows(net, devices)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    net(leaves, x, StepSeeds((0,) * devices)).logits.sin().sum().backward()
    w = {name: tensor[-1] for name, tensor in weights.items()}
    own = torchs_own(net, w, 1)
    features = (own(w["lookup.weight"][x[-1]])[0][:, -1] @ w["hidden.weight"].mT + w["hidden.bias"]).relu()
    (features @ w["classifier.weight"].mT + w["classifier.bias"]).sin().sum().backward()
    for name, theirs in (("weight", own.weight_ih_l0), ("recurrent", own.weight_hh_l0), ("bias", own.bias_ih_l0)):
        mine = leaves[f"cells.0.{name}"].grad[-1].permute(2, 0, 1).flatten()  # type: ignore[index]
        assert torch.allclose(mine, theirs.grad.flatten(), rtol=0, atol=1e-10)


def test_lstm_layer_initial_weights_match_torch() -> None:
    """Uniform up to one over the square root of the hidden units."""
    for weight in LstmLayer(300, 64).parameters():
        assert 0.9 / 8 < float(weight.detach().abs().max()) <= 1 / 8


def test_lstm_narrow_net_equals_wide_net_with_zeroed_units(block_weights: Weights) -> None:
    """A unit whose weights and biases are zero stays zero."""
    wide, narrow = net_of(layers=2), net_of(layers=2, width=0.5)
    part = {name: tensor[0] for name, tensor in block_weights(narrow, 1).items()}
    silence = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in wide.shapes().items()}
    whole = find_footprint(narrow.shapes(), wide.shapes()).write(silence, part)
    assert tuple(narrow.shapes()["cells.1.recurrent"]) == (2, 2, 4)
    assert tuple(narrow.shapes()["cells.1.bias"]) == (2, 1, 4)
    x = rows(wide)
    left, right = (
        net({name: tensor[None] for name, tensor in weights.items()}, x).logits
        for net, weights in ((narrow, part), (wide, whole))
    )
    assert torch.allclose(left, right, atol=1e-12)


def test_lstm_dropout_leaves_features_unchanged(block_weights: Weights) -> None:
    net, still = net_of(features=40, dropout=0.5), net_of(features=40)
    weights, x = block_weights(net, 2), rows(net, 2)
    dropped, kept = net(weights, x, StepSeeds((1, 2))), still(weights, x, StepSeeds((1, 2)))
    assert torch.allclose(dropped.taps["features"], kept.taps["features"], atol=1e-12)
    assert not torch.allclose(dropped.logits, kept.logits)
    assert torch.equal(net(weights, x).logits, still(weights, x).logits)
    assert net.feature_width() == 40


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    table = np.random.default_rng(0).normal(size=(TOKENS, 6)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", table)
    return tmp_path / "vectors.npy"


@pytest.mark.parametrize("devices", [1, 3])
def test_lstm_pretrained_vectors_are_not_trained(devices: int, vectors: Path, block_weights: Weights) -> None:
    """Neither trained nor sent, and in the precision of the model."""
    net, trained = net_of(vectors=str(vectors)), net_of()
    assert set(trained.shapes()) - set(net.shapes()) == {"lookup.weight"}
    weights, x = block_weights(net, devices, torch.float32), rows(net, devices)
    table = torch.from_numpy(np.load(vectors)).expand(devices, -1, -1)
    expected = trained({**weights, "lookup.weight": table}, x, StepSeeds((0,) * devices)).logits
    assert torch.allclose(net(weights, x, StepSeeds((0,) * devices)).logits, expected, atol=1e-6)
    assert set(net.module().state_dict()) == set(net.shapes())


def test_lstm_pretrained_vectors_are_not_sliced(vectors: Path) -> None:
    given, trained = net_of(vectors=str(vectors), width=0.5), net_of(width=0.5)
    assert tuple(given.shapes()["cells.0.weight"]) == (2, 6, 4)
    assert tuple(trained.shapes()["cells.0.weight"]) == (2, 3, 4)
    assert tuple(trained.shapes()["lookup.weight"]) == (TOKENS, 3)


def test_lstm_vectors_of_wrong_shape_raise(vectors: Path) -> None:
    with pytest.raises(ValueError, match=r"vectors of the shape \(9, 6\), where \(9, 5\) are needed"):
        net_of(vectors=str(vectors), embedding=5).module()


def test_lstm_pickled_vectors_raise(tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        net_of(vectors=str(tmp_path / "bad.npy")).module()


def test_lstm_macs_match_hand_count() -> None:
    """Per token: four gates of 128 units with 300 inputs and 128 hidden units each; then 128 - 10 - 2."""
    one, two = (compute_cost(build_model("lstm", MODELS["lstm"], {"layers": n}, (25,), 2, TOKENS)).macs for n in (1, 2))
    assert one == 25 * 4 * 128 * (300 + 128) + 128 * 10 + 10 * 2
    assert two - one == 25 * 4 * 128 * (128 + 128)

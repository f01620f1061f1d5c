"""The multilayer perceptron against a hand-written one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.models import MODELS, Model, StepSeeds, build_model, compute_cost


def net_of(input_shape: tuple[int, ...], hidden: tuple[int, ...] = (5, 4), width: float = 1.0) -> Model:
    return build_model("mlp", MODELS["mlp"], {"hidden": hidden, "width": width}, input_shape, 3)


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 3, 2), (2, 3, 1)])
def test_mlp_forward_matches_paper(shape: tuple[int, ...], block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = net_of(shape)
    weights, x = block_weights(net, 2), torch.randn(2, 4, *shape, dtype=torch.float64)
    result = net(weights, x, StepSeeds((0, 0)))
    for device in range(2):
        w, features = {name: tensor[device] for name, tensor in weights.items()}, x[device].flatten(1)
        for number in range(2):
            features = F.linear(features, w[f"hidden.{number}.weight"], w[f"hidden.{number}.bias"]).relu()
        logits = F.linear(features, w["classifier.weight"], w["classifier.bias"])
        assert torch.allclose(result.logits[device], logits, atol=1e-12)
        assert torch.allclose(result.taps["features"][device], features, atol=1e-12)
    assert net.fallback_reasons() == ()


def test_mlp_with_softmax_ends_in_probabilities(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    """As LG-FedAvg's code has it; its loss applies another softmax."""
    plain, squashed = (build_model("mlp", MODELS["mlp"], {"hidden": (5,), "softmax": on}, (6,), 3) for on in (0, 1))
    weights, x = block_weights(plain, 2), torch.randn(2, 4, 6, dtype=torch.float64)
    assert torch.allclose(squashed(weights, x).logits, plain(weights, x).logits.softmax(-1), atol=1e-12)


def test_mlp_without_hidden_layers_is_linear(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = net_of((2, 3), hidden=())
    assert {name: tuple(shape) for name, shape in net.shapes().items()} == {
        "classifier.weight": (3, 6),
        "classifier.bias": (3,),
    }
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64)
    assert torch.equal(net.features(block_weights(net, 1), x), x.flatten(2))


def test_mlp_narrow_net_keeps_inputs_and_classes() -> None:
    shapes = {name: tuple(shape) for name, shape in net_of((6,), width=0.5).shapes().items()}
    assert (shapes["hidden.0.weight"], shapes["hidden.1.weight"], shapes["classifier.weight"]) == (
        (3, 6),
        (2, 3),
        (3, 2),
    )


def test_mlp_macs_are_products_of_adjacent_sizes() -> None:
    assert compute_cost(net_of((2, 3))).macs == 6 * 5 + 5 * 4 + 4 * 3

"""HeteroFL's ConvNet and pre-activation ResNet against their papers, layer by layer."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.tensors import Tensors


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """With the batch's mean and biased variance."""
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)


def convnet_by_hand(w: Tensors, x: Tensor, rate: float) -> Tensor:
    """conv, scaler, norm, ReLU, max-pool; no pool after the last; average, linear."""
    for number in range(2):
        x = F.conv2d(x, w[f"blocks.{number}.0.weight"], w[f"blocks.{number}.0.bias"], padding=1) / rate
        x = F.relu(batch_norm(x, w[f"blocks.{number}.2.weight"], w[f"blocks.{number}.2.bias"]))
        x = F.max_pool2d(x, 2) if number == 0 else x
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), w["classifier.weight"], w["classifier.bias"])


def preresnet_by_hand(w: Tensors, x: Tensor, rate: float) -> Tensor:
    """Stem, then pre-activation blocks with strides 1 and 2, a last norm, average, linear."""
    x = F.conv2d(x, w["stem.weight"], padding=1)
    for number, stride in enumerate((1, 2)):
        name = f"stages.{number}.0"
        active = F.relu(batch_norm(x / rate, w[f"{name}.norm1.1.weight"], w[f"{name}.norm1.1.bias"]))
        short = F.conv2d(active, w[f"{name}.shortcut.weight"], stride=2) if stride == 2 else x
        result = F.conv2d(active, w[f"{name}.conv1.weight"], stride=stride, padding=1)
        result = F.relu(batch_norm(result / rate, w[f"{name}.norm2.1.weight"], w[f"{name}.norm2.1.bias"]))
        x = F.conv2d(result, w[f"{name}.conv2.weight"], padding=1) + short
    x = F.relu(batch_norm(x / rate, w["norm.1.weight"], w["norm.1.bias"]))
    return F.linear(x.mean((2, 3)), w["classifier.weight"], w["classifier.bias"])


@pytest.mark.parametrize("width", [1.0, 0.5])
@pytest.mark.parametrize(("name", "by_hand"), [("convnet", convnet_by_hand), ("preresnet", preresnet_by_hand)])
def test_family_training_forward_matches_paper(
    name: str,
    by_hand: Callable[[Tensors, Tensor, float], Tensor],
    width: float,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = tiny_model(name, width=width)
    block, x = block_weights(net, 1), torch.randn(1, 5, 1, 6, 6, dtype=torch.float64)
    by_paper = by_hand({key: tensor[0] for key, tensor in block.items()}, x[0], width)
    assert torch.allclose(net(block, x, StepSeeds((0,))).logits[0], by_paper, atol=1e-10)


def test_preresnet_shortcut_is_convolution_only_where_shapes_differ() -> None:
    net = build_model("preresnet", MODELS["preresnet"], {"hidden": (4, 4, 8), "blocks": (2, 2, 1)}, (3, 8, 8), 10)
    assert {name for name in net.shapes() if "shortcut" in name} == {
        "stages.1.0.shortcut.weight",  # halves the map
        "stages.2.0.shortcut.weight",
    }
    first_wider = build_model("preresnet", MODELS["preresnet"], {"hidden": (4, 6), "blocks": (1, 2)}, (3, 8, 8), 10)
    assert tuple(first_wider.shapes()["stages.1.0.shortcut.weight"]) == (6, 4, 1, 1)

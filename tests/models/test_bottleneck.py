"""FedGKT's nets against the paper, and the server's net on the output of a device's extractor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.footprints import is_submodel
from fedloom.models import MODELS, Model, StepSeeds, build_model, compute_cost
from fedloom.tensors import Tensors

SIZES = {"stem": 3, "planes": (2, 3), "blocks": (1, 2)}


def net_of(input_shape: tuple[int, int, int] = (2, 7, 7), classes: int = 4, **settings: Any) -> Model:
    return build_model("bottleneck", MODELS["bottleneck"], {**SIZES, **settings}, input_shape, classes)


def norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w[f"{name}.weight"], w[f"{name}.bias"], training=True)


def block(w: Tensors, name: str, x: Tensor, stride: int) -> Tensor:
    result = F.relu(norm(w, f"{name}.norm1", F.conv2d(x, w[f"{name}.conv1.weight"])))
    result = F.relu(norm(w, f"{name}.norm2", F.conv2d(result, w[f"{name}.conv2.weight"], stride=stride, padding=1)))
    result = norm(w, f"{name}.norm3", F.conv2d(result, w[f"{name}.conv3.weight"]))
    if f"{name}.shortcut.0.weight" in w:
        x = norm(w, f"{name}.shortcut.1", F.conv2d(x, w[f"{name}.shortcut.0.weight"], stride=stride))
    return F.relu(result + x)


def by_hand(w: Tensors, x: Tensor) -> dict[str, Tensor]:
    """One block, then two at half the size."""
    if "extractor.0.weight" in w:
        x = F.relu(norm(w, "extractor.1", F.conv2d(x, w["extractor.0.weight"], padding=1)))
    result = {"extractor": x}
    x = block(w, "stages.1.1", block(w, "stages.1.0", block(w, "stages.0.0", x, 1), 2), 1)
    result["features"] = x.mean((2, 3))
    result["logits"] = F.linear(result["features"], w["classifier.weight"], w["classifier.bias"])
    return result


@pytest.mark.parametrize("stem", [3, None])
def test_bottleneck_forward_matches_paper(stem: int | None, block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = net_of(stem=stem)
    weights, x = block_weights(net, 1), torch.randn(1, 4, 2, 7, 7, dtype=torch.float64)
    expected = by_hand({name: tensor[0] for name, tensor in weights.items()}, x[0])
    result = net(weights, x, StepSeeds((0,)))
    assert list(result.exits) == ["logits"] and list(result.taps) == ["extractor", "features"]
    for name, tensor in {**result.exits, **result.taps}.items():
        assert torch.allclose(tensor[0], expected[name], atol=1e-9)
    assert net.fallback_reasons() == ()


def test_bottleneck_server_net_accepts_extractor_output(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    """A server net with a device's blocks computes from the feature maps what the device computes from its images."""
    device = net_of()
    server = net_of((3, 7, 7), stem=None)
    assert device.has_children("extractor", "classifier") and not server.has_children("extractor")
    assert {name: shape for name, shape in device.shapes().items() if not name.startswith("extractor.")} == dict(
        server.shapes()
    )
    weights, x = block_weights(device, 2), torch.randn(2, 4, 2, 7, 7, dtype=torch.float64)
    step_seeds = StepSeeds((0, 0))
    maps = device.submodel("extractor")(device.submodel_weights("extractor", weights), x, step_seeds).logits
    assert maps.shape == (2, 4, *server.input_shape)
    assert torch.allclose(server(weights, maps, step_seeds).logits, device(weights, x, step_seeds).logits, atol=1e-10)


def test_bottleneck_shortcut_is_convolution_only_in_first_block() -> None:
    names = {name for name in net_of(blocks=(2, 2)).shapes() if name.endswith("shortcut.0.weight")}
    assert names == {"stages.0.0.shortcut.0.weight", "stages.1.0.shortcut.0.weight"}


def test_bottleneck_narrow_net_nests_in_wide_net() -> None:
    wide, narrow = net_of(), net_of(width=0.5)
    assert is_submodel(narrow.shapes(), wide.shapes())
    assert tuple(narrow.shapes()["extractor.0.weight"]) == (2, 2, 3, 3)
    assert tuple(narrow.shapes()["stages.1.0.conv1.weight"]) == (2, 4, 1, 1)
    assert tuple(narrow.shapes()["classifier.weight"]) == (4, 6)


def test_bottleneck_macs_match_hand_count() -> None:
    """The device's net: a stem on 32 pixels a side, then two blocks with 16 channels inside and 64 outside."""
    first, second = 16 * 16 + 9 * 16 * 16 + 16 * 64 + 16 * 64, 64 * 16 + 9 * 16 * 16 + 16 * 64
    actual = compute_cost(build_model("bottleneck", MODELS["bottleneck"], {}, (3, 32, 32), 10)).macs
    assert actual == 32**2 * (27 * 16 + first + second) + 64 * 10

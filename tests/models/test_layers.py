"""Every folded layer equals torch's layer for plain weights, and each device's layer for stacked weights."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import MODELS
from fedloom.models.layers import FOLDED_LAYERS, Scaler, fold, support_device_axis, unfold

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, padding=1), (3, 7, 7)),
    "conv2d strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 7, 7)),
    "conv2d uneven": (lambda: nn.Conv2d(3, 4, (1, 3), stride=(2, 1), padding=(0, 2)), (3, 7, 6)),
    "conv2d dilated": (lambda: nn.Conv2d(3, 4, 3, dilation=2), (3, 7, 7)),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), (4, 5, 5)),
    "conv2d without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), (3, 5, 5)),
    "conv2d same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), (3, 5, 5)),
    "conv2d circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), (3, 5, 5)),
    "conv2d reflecting": (lambda: nn.Conv2d(3, 4, 3, padding=2, padding_mode="reflect", bias=False), (3, 5, 5)),
    "conv2d replicating same": (lambda: nn.Conv2d(3, 4, 3, padding="same", padding_mode="replicate"), (3, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 9)),
    "conv1d circular": (lambda: nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular", groups=2), (4, 9)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=(1, 2, 1)), (2, 3, 4, 3)),
    "batch norm 2d": (lambda: nn.BatchNorm2d(3), (3, 4, 4)),
    "batch norm 2d plain": (lambda: nn.BatchNorm2d(3, affine=False, eps=1e-3), (3, 4, 4)),
    "batch norm 2d untracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 4, 4)),
    "batch norm 1d": (lambda: nn.BatchNorm1d(5), (5,)),
    "batch norm 1d of sequences": (lambda: nn.BatchNorm1d(5), (5, 6)),
    "batch norm 3d": (lambda: nn.BatchNorm3d(2), (2, 3, 3, 2)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    "instance norm 2d": (lambda: nn.InstanceNorm2d(3, affine=True, eps=1e-3), (3, 4, 4)),
    "instance norm 2d plain": (lambda: nn.InstanceNorm2d(3), (3, 4, 4)),
    "layer norm of maps": (lambda: nn.LayerNorm((4, 3, 3)), (4, 3, 3)),
    "layer norm of vectors": (lambda: nn.LayerNorm(6), (6,)),
    "layer norm of tokens, no bias": (lambda: nn.LayerNorm(6, bias=False), (5, 6)),
    "RMS norm of maps": (lambda: nn.RMSNorm((4, 3, 3)), (4, 3, 3)),
    "RMS norm of vectors": (lambda: nn.RMSNorm(6, eps=1e-5), (6,)),
    "one slope": (lambda: nn.PReLU(), (4, 3, 3)),
    "a slope for each channel": (lambda: nn.PReLU(4), (4, 3, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4, eps=1e-4), (4, 3, 3)),
    "group norm of vectors": (lambda: nn.GroupNorm(2, 6), (6,)),
    "group norm plain": (lambda: nn.GroupNorm(4, 4, affine=False), (4, 3, 3)),
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "linear without bias": (lambda: nn.Linear(5, 3, bias=False), (5,)),
}


def drawn(name: str) -> tuple[nn.Module, Tensor]:
    """The layer with random weights and statistics, and a batch for it."""
    build, shape = LAYERS[name]
    torch.manual_seed(sum(map(ord, name)))
    layer = build().double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight))
        for key, buffer in layer.named_buffers():
            if key != "num_batches_tracked":
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return layer, torch.randn(6, *shape, dtype=torch.float64)


def with_rules(layer: nn.Module) -> nn.Module:
    copy = deepcopy(layer)
    support_device_axis(copy)
    return copy


def test_folded_layers_all_have_a_case() -> None:
    assert {type(build()) for build, _ in LAYERS.values()} == set(FOLDED_LAYERS)


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
@pytest.mark.parametrize("name", LAYERS)
def test_folded_layer_plain_weights_match_torch(name: str, training: bool, bits_equal: Callable[..., bool]) -> None:
    layer, x = drawn(name)
    ruled = with_rules(layer).train(training)
    layer.train(training)
    assert type(ruled) is FOLDED_LAYERS[type(layer)]
    assert ruled.state_dict().keys() == layer.state_dict().keys()
    assert bits_equal(ruled(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_folded_layer_plain_weights_match_torch_gradient(name: str, bits_equal: Callable[..., bool]) -> None:
    layer, x = drawn(name)
    ruled = with_rules(layer)
    gradients = []
    for one in (layer, ruled):
        leaves = [x.clone().requires_grad_(), *one.parameters()]
        gradients.append(torch.autograd.grad(one(leaves[0]).sin().sum(), leaves))
    assert all(bits_equal(mine, theirs) for theirs, mine in zip(*gradients, strict=True))


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
@pytest.mark.parametrize("name", LAYERS)
def test_folded_layer_stacked_weights_match_each_device(name: str, training: bool) -> None:
    layers, x = [], []
    for device in range(3):
        layer, batch = drawn(name)
        with torch.no_grad():
            for tensor in (*layer.parameters(), *layer.buffers()):
                if tensor.is_floating_point():
                    tensor.mul_(1 + 0.5 * device)
        layers.append(layer.train(training))
        x.append(batch * (device + 1) - device)
    stacked = with_rules(layers[0]).train(training)
    holders: list[tuple[dict[str, Any], str]] = [(stacked._parameters, key) for key, _ in layers[0].named_parameters()]
    holders += [(stacked._buffers, key) for key, _ in layers[0].named_buffers() if key != "num_batches_tracked"]
    for holder, key in holders:
        holder[key] = torch.stack([getattr(layer, key).detach() for layer in layers])
    alone = torch.stack([layer(batch).detach() for layer, batch in zip(layers, x, strict=True)])
    together = unfold(stacked(fold(torch.stack(x))), 3)
    assert together.shape == alone.shape
    assert float((together - alone).abs().max()) <= 1e-10


def test_static_batch_norm_training_tracks_nothing(bits_equal: Callable[..., bool]) -> None:
    layer, x = drawn("batch norm 2d")
    ruled = with_rules(layer).train()
    ruled(x)
    for key, buffer in layer.named_buffers():
        assert bits_equal(dict(ruled.named_buffers())[key], buffer)


def test_static_batch_norm_tracking_returns_batch_statistics() -> None:
    layer, x = drawn("batch norm 2d")
    ruled = with_rules(layer).eval()
    ruled.tracking = True  # type: ignore[assignment]
    result = ruled(x)
    assert torch.allclose(ruled.running_mean, x.mean((0, 2, 3)), atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(ruled.running_var, x.var((0, 2, 3), unbiased=True), atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(result, layer.train()(x), atol=1e-12)


def test_static_batch_norm_applied_twice_returns_mean_statistics() -> None:
    layer, x = drawn("batch norm 2d")
    ruled = with_rules(layer).eval()
    ruled.tracking = True  # type: ignore[assignment]
    batches = (x, 3 * x + 1, -x)
    for batch in batches:
        ruled(batch)
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches]).mean(0)
    variances = torch.stack([batch.var((0, 2, 3), unbiased=True) for batch in batches]).mean(0)
    assert torch.allclose(ruled.running_mean, means, atol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(ruled.running_var, variances, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 2, 4, 5), (3, 2, 1, 5, 6), (1, 2, 4, 5, 6)])
def test_unfold_inverts_fold(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(unfold(fold(x), shape[0]), x)


def test_fold_places_channels_of_devices_side_by_side() -> None:
    x = torch.arange(2 * 3 * 4).view(2, 3, 4)  # 2 devices, 3 examples, 4 channels
    for device in range(2):
        for example in range(3):
            for channel in range(4):
                assert fold(x)[example, device * 4 + channel] == x[device, example, channel]


def test_fold_single_channel_image_is_channels_last() -> None:
    assert fold(torch.randn(1, 2, 1, 4, 4)).stride() == (16, 1, 4, 1)


@pytest.mark.parametrize(("training", "expected"), [(True, 8.0), (False, 2.0)])
def test_scaler_divides_by_rate_only_in_training(training: bool, expected: float) -> None:
    assert Scaler(0.25).train(training)(torch.tensor([2.0])).tolist() == [expected]


@pytest.mark.parametrize(
    ("family", "settings", "found"),
    [
        ("preresnet", {"hidden": (4, 4), "blocks": (1,)}, "hidden has 2, blocks has 1"),
        ("preactresnet", {"hidden": (4,), "blocks": (1, 1)}, "hidden has 1, blocks has 2"),
        ("bottleneck", {"planes": (2,), "blocks": (1, 1)}, "planes has 1, blocks has 2"),
        ("mobilenet", {"widths": (4,), "kernels": (3, 3), "depths": (1,)}, "widths has 1, kernels has 2, depths has 1"),
    ],
)
def test_build_family_lists_of_unequal_length_are_named(family: str, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=f"each stage needs an entry in every list, but {found}"):
        MODELS[family](input_shape=(1, 12, 12), classes=4, **settings)

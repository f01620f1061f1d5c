"""Features, the input of the last layer: for any module, in every batching mode."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import Model, Outputs, StepSeeds, build_model
from fedloom.models.batching import BatchingMode, FunctionalModule, fold_devices, loop_over_devices, vmap_devices
from tests.models.conftest import LAST_LAYERS

NUMBERS = count()
DEVICES = 3
Pick = Callable[..., dict[str, Tensor]]


def images(shape: tuple[int, ...], devices: int = DEVICES) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(devices, 4, *shape, generator=draw, dtype=torch.float64)


def stranger(build: Callable[[], nn.Module], input_shape: tuple[int, ...] = (1, 6, 6)) -> Model:
    return build_model(f"{build.__name__} {next(NUMBERS)}", build, {}, input_shape, 4)


def judged_by_the_batch(net: Model, weights: dict[str, Tensor]) -> nn.Module:
    """The plain module in evaluation mode, except for its batch norms."""
    module = net.module().double().eval()
    module.load_state_dict(weights, strict=False)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.train()
    return module


def test_features_every_family_is_classifier_input(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """No statistics are needed."""
    net, last = tiny_model(family, width=0.5), LAST_LAYERS.get(family, "classifier")
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    actual = net.features(block, x)
    for device in range(DEVICES):
        observed: list[Tensor] = []
        module = judged_by_the_batch(net, {name: tensor[device] for name, tensor in block.items()})
        module.get_submodule(last).register_forward_pre_hook(lambda _, inputs, to=observed: to.extend(inputs))
        module(x[device])
        assert torch.allclose(actual[device], observed[0].flatten(1), atol=1e-9)


def test_features_tap_is_in_every_call(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    actual = net.features(block, x)
    assert net.feature_width() == actual.shape[-1]
    statistics = net.batch_statistics(block, x)
    assert net(block, x, StepSeeds((1, 2, 3))).taps["features"].flatten(2).shape == actual.shape
    evaluated = net({**block, **statistics}, x).taps["features"].flatten(2)
    assert evaluated.shape == actual.shape
    assert net.statistics() or torch.equal(evaluated, actual)


def test_features_do_not_depend_on_block_size(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    net = tiny_model(family)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    together = net.features(block, x)
    for device in range(DEVICES):
        alone = net.features(pick_device(block, device), x[device : device + 1])
        assert torch.allclose(together[device : device + 1], alone, atol=1e-10)


def test_features_have_gradient_in_all_but_last_layer(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """Compared with finite differences along random directions, away from kinks."""
    net = tiny_model(family)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in block.items()}
    gradients = torch.autograd.grad(
        net.features(leaves, x).square().sum(), list(leaves.values()), materialize_grads=True
    )
    step = 1e-6
    draw = torch.Generator().manual_seed(6)
    along = [torch.randn(tensor.shape, generator=draw, dtype=torch.float64) for tensor in block.values()]
    ahead, behind = (
        float(
            net.features({k: t + sign * step * d for (k, t), d in zip(block.items(), along, strict=True)}, x)
            .square()
            .sum()
        )
        for sign in (1, -1)
    )
    predicted = float(sum((gradient * d).sum() for gradient, d in zip(gradients, along, strict=True)))
    assert abs((ahead - behind) / (2 * step) - predicted) <= 1e-3 * abs(predicted) + 1e-4


class Plain(nn.Module):
    """Returns only logits; its last layer takes a whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.conv(x)).relu())
        return result.flatten(1)


def plain() -> nn.Module:
    return Plain()


@pytest.mark.parametrize("mode", [fold_devices, vmap_devices, loop_over_devices])
def test_features_of_module_without_tap_are_observed_in_every_mode(
    mode: BatchingMode, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = stranger(plain)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    result, _ = mode(FunctionalModule(net.module().double(), training=True))(block, x)
    actual = result.taps["features"]
    assert actual.shape == (DEVICES, 4, 32)
    logits = actual @ block["last.weight"].flatten(2).mT + block["last.bias"].unsqueeze(1)
    assert torch.allclose(logits, result.logits, atol=1e-10)
    for device in range(DEVICES):
        module = judged_by_the_batch(net, {name: tensor[device] for name, tensor in block.items()})
        maps = module.get_submodule("norm")(module.get_submodule("conv")(x[device])).relu()
        assert torch.allclose(actual[device], maps.flatten(1), atol=1e-10)


@pytest.mark.parametrize("devices", [1, DEVICES])
def test_features_observed_module_keeps_mode_and_results(
    devices: int, block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = stranger(plain)
    block, x = block_weights(net, devices), images(net.input_shape, devices)
    result = net(block, x, StepSeeds((0,) * devices))
    assert net.fallback_reasons() == ()
    assert torch.allclose(net.features(block, x), result.taps["features"], atol=1e-12)
    assert list(result.exits) == ["logits"] and list(result.taps) == ["features"]


class HeadFirst(nn.Module):
    """The layer with the label rows is not the last one it defines."""

    label_rows = ("head.weight", "head.bias")

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(5, 4), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Outputs:
        body = self.body(x).tanh()
        return Outputs({"logits": self.head(body)}, {"body": 2 * body})


def head_first() -> nn.Module:
    return HeadFirst()


def test_features_declared_label_rows_select_last_layer(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(head_first, (6,))
    result = net(block_weights(net, DEVICES), images((6,)))
    assert list(result.taps) == ["body", "features"]
    assert torch.equal(result.taps["features"], result.taps["body"] / 2)


class Silent(nn.Module):
    """Uses the weights of its last layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ self.last.weight.mT


def silent() -> nn.Module:
    return Silent()


def test_features_unused_last_layer_raises(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(silent, (6,))
    block, x = block_weights(net, 1), images((6,), 1)
    assert net(block, x).taps == {}
    with pytest.raises(ValueError, match=r"silent .* has no features"):
        net.features(block, x)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Flatten(), Lookup())


class Lookup(nn.Module):
    """Its last layer takes row indices, which are no features."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.rows(torch.zeros(1, dtype=torch.int64))
        return result


def test_features_integer_input_has_no_tap(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(embedded, (6,))
    assert net(block_weights(net, 1), images((6,), 1)).taps == {}


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 4))


def test_features_observed_input_is_after_dropout(
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    """In training mode; `features` runs in evaluation mode, without dropout."""
    net = stranger(dropping, (6,))
    block, x = block_weights(net, 2), images((6,), 2)
    assert bool((net(block, x, StepSeeds((1, 2))).taps["features"] == 0).any())
    assert bool((net.features(block, x) != 0).all())


def test_functional_module_releases_last_input(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(plain)
    module = FunctionalModule(net.module().double(), training=True)
    fold_devices(module)(block_weights(net, 2), images(net.input_shape, 2))
    assert module._last_input is None

"""A batching mode is chosen only if gradients agree too: devices must train in a block as they train alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import Model, StepSeeds, build_model
from tests.models.block_checks import Pick, assert_block_matches_single_devices

DEVICES = 3


class Amplified(nn.Module):
    """Its output does not depend on the number of channels, but its gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.classifier = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x.detach() + (x - x.detach()) * x.shape[1]
        return self.classifier(x.relu())  # type: ignore[no-any-return]


def test_module_whose_gradient_alone_mixes_devices_is_not_folded(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick, double: None
) -> None:
    net = build_model("amplified", Amplified, {}, (6,), 4)
    assert net.fallback_reasons() == ("Amplified cannot be folded: devices mix",)
    x = net.random_inputs(torch.Generator().manual_seed(0), DEVICES, 4)
    assert_block_matches_single_devices(net, block_weights(net, DEVICES), x, True, pick_device)


class Padded(nn.Module):
    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.classifier = nn.Embedding(7, 5, padding_idx=padding), nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.table(tokens).mean(1))  # type: ignore[no-any-return]


def padded(padding: int | None) -> Model:
    return build_model("padded", Padded, {"padding": padding}, (6,), 4, tokens=7)


@pytest.mark.parametrize("padding", [0, 3, 6, None])
def test_padding_of_embedding_is_trained_neither_alone_nor_in_a_block(
    padding: int | None, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick, double: None
) -> None:
    """torch's vmap alone would train it."""
    net = padded(padding)
    block, x = block_weights(net, DEVICES), net.random_inputs(torch.Generator().manual_seed(0), DEVICES, 9)
    assert all(token in x[device] for token in range(7) for device in range(DEVICES))
    assert net.one_by_one_reason() is None
    assert_block_matches_single_devices(net, block, x, True, pick_device)
    leaves = {name: weight.clone().requires_grad_() for name, weight in block.items()}
    (gradient,) = torch.autograd.grad(
        net(leaves, x, StepSeeds((1, 2, 3))).logits.square().sum(), leaves["table.weight"]
    )
    untrained = [row for row in range(7) if not gradient[:, row].any()]
    assert untrained == ([] if padding is None else [padding])

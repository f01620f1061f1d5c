"""Devices that do not take a step are not computed, and the others do not notice."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.client import Batch, dummy_loss, gradient
from fedloom.models import Model, StepSeeds
from fedloom.models import model as model_file
from fedloom.models.sub_block import make_sub_block


@given(block=st.integers(1, 20), devices=st.sets(st.integers(0, 19), min_size=1))
def test_sub_block_place_is_the_inverse_of_take(block: int, devices: set[int]) -> None:
    chosen = sorted(device for device in devices if device < block) or [0]
    some = make_sub_block(chosen, block)
    if some is None:
        assert len(chosen) > block / 2 or block <= 2
        return
    assert some.size < block
    assert some.size in (2, 4, 8, 16)
    assert some.size < 2 * max(2, len(chosen))
    values = torch.arange(1.0, block + 1)
    expected = [device + 1 if device in chosen else 0 for device in range(block)]
    assert some.place(some.take(values)).tolist() == expected


def test_sub_block_repeated_device_has_one_gradient() -> None:
    values = torch.ones(5, requires_grad=True)
    some = make_sub_block([3], 5)
    assert some is not None
    assert some.members == (3, 3)
    some.place(2 * some.take(values)).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0, 0, 0, 2, 0]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("family", ["convnet", "preactresnet", "mlp", "transformer"])
@pytest.mark.parametrize("running", [(1,), (0, 4), (1, 2, 3)])
def test_model_with_idle_devices_gives_the_gradients_of_running_ones(
    family: str,
    running: tuple[int, ...],
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = tiny_model(family)
    ran: list[int] = []
    plain = model_file.block_forward
    monkeypatch.setattr(model_file, "block_forward", lambda m, count, *k: ran.append(count) or plain(m, count, *k))
    weights, draw = block_weights(net, 5), torch.Generator().manual_seed(0)
    x = torch.stack([net.random_inputs(draw, 3) for _ in range(5)])
    y = torch.zeros(5, 3, dtype=torch.int64)
    every, some = (
        gradient(dummy_loss(net), weights, Batch(x, y, StepSeeds(tuple(range(5)), running=devices)))
        for devices in (None, running)
    )
    assert ran[-1] == (2 if len(running) < 3 else 4)
    idle = [device for device in range(5) if device not in running]
    for name, grads in some.items():
        assert torch.allclose(grads[list(running)], every[name][list(running)], rtol=0, atol=1e-12)
        assert not bool(grads[idle].any())

"""Compare a block of devices with the same devices one at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedloom.models import Model, StepSeeds
from fedloom.tensors import Tensors

Pick = Callable[[Tensors, int], dict[str, Tensor]]


def outputs_and_gradients(
    net: Model, weights: dict[str, Tensor], x: Tensor, step_seeds: StepSeeds | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """All outputs of a module, and the gradient of a sum over them."""
    leaves = {name: weights[name].clone().requires_grad_() for name in net.shapes()}
    result = net({**weights, **leaves}, x, step_seeds)
    named = {f"exit {name}": tensor for name, tensor in result.exits.items()}
    named |= {f"tap {name}": tensor for name, tensor in result.taps.items()}
    total = sum((tensor.sin() * (1 + number)).sum() for number, tensor in enumerate(named.values()))
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {name: tensor.detach() for name, tensor in named.items()}, dict(zip(leaves, gradients, strict=True))


def assert_block_matches_single_devices(
    net: Model, block: dict[str, Tensor], x: Tensor, training: bool, pick: Pick
) -> None:
    seeds = tuple(range(10, 10 + len(x)))
    together = outputs_and_gradients(net, block, x, StepSeeds(seeds) if training else None)
    for number in range(len(x)):
        step_seeds = StepSeeds(seeds[number : number + 1]) if training else None
        alone = outputs_and_gradients(net, pick(block, number), x[number : number + 1], step_seeds)
        for of_block, of_one in zip(together, alone, strict=True):
            for name, tensor in of_one.items():
                assert tensor.shape == of_block[name][number : number + 1].shape
                assert float((tensor - of_block[name][number : number + 1]).abs().max()) <= 1e-10, name

"""The baseline: the ordinary loop, one device after the other, in one process, eager torch on tensors in memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def train(module: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """zero_grad, forward, loss, backward, clip, SGD with momentum: the inner loop of every system."""
    module.train()
    module.load_state_dict(weights, strict=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for x, y in batches:
        optimizer.zero_grad()
        output = module(x)
        logits = output.logits if hasattr(output, "logits") else output
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())  # of examples, or of tokens
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def evaluate(module: nn.Module, training: Sequence[Tensor], tests: Sequence[Tensor]) -> None:
    """Static batch norm, then the test set: a pass over all training examples, and one over those of the test."""
    module.train()
    for x in training:
        module(x)
    module.eval()
    for x in tests:
        module(x)


def index_list_mean(old: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Aggregation with lists of indices and a tensor of counts, as in early published implementations."""
    means = {}
    for name, before in old.items():
        total, count = torch.zeros_like(before), torch.zeros_like(before)
        for part in parts:
            indices = torch.meshgrid(*(torch.arange(size) for size in part[name].shape), indexing="ij")
            total[indices] += part[name]
            count[indices] += 1
        means[name] = torch.where(count > 0, total / count.clamp_min(1), before)
    return means

"""The ordinary loop, to measure against: device after device, in one process, eager torch on tensors in memory."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def train(module: nn.Module, weights: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """zero_grad, forward, loss, backward, clip, SGD with momentum: what every system of this field does at heart."""
    module.train()
    module.load_state_dict(weights, strict=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for x, y in batches:
        optimizer.zero_grad()
        made = module(x)
        loss = F.cross_entropy(made.logits if hasattr(made, "logits") else made, y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()


def index_list_mean(whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Aggregation with lists of indices and a tensor of counts, as first published implementations have it."""
    made = {}
    for name, old in whole.items():
        total, count = torch.zeros_like(old), torch.zeros_like(old)
        for part in parts:
            where = torch.meshgrid(*(torch.arange(size) for size in part[name].shape), indexing="ij")
            total[where] += part[name]
            count[where] += 1
        made[name] = torch.where(count > 0, total / count.clamp_min(1), old)
    return made

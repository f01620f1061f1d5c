"""Losses where every position of an example is answered: the same as if each position were an example."""

import pytest
import torch
from torch.nn import functional as F

from fedloom.client import Batch, cross_entropy, mask_logits, soft_cross_entropy

K, BATCH, LENGTH, CLASSES = 3, 4, 5, 7


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(K, BATCH, LENGTH, CLASSES)


def test_cross_entropy_sequences_is_mean_over_positions(logits: torch.Tensor) -> None:
    y = torch.randint(CLASSES, (K, BATCH, LENGTH))
    made = cross_entropy(logits, Batch(logits, y))
    expected = [F.cross_entropy(logits[k].flatten(0, 1), y[k].flatten()) for k in range(K)]
    assert torch.allclose(made, torch.stack(expected))


def test_soft_cross_entropy_sequences_is_mean_over_positions(logits: torch.Tensor) -> None:
    teacher = torch.randn_like(logits)
    flat = [one.flatten(1, 2) for one in (logits, teacher)]
    assert torch.allclose(soft_cross_entropy(logits, teacher), soft_cross_entropy(*flat))


def test_mask_logits_sequences_masks_every_position(logits: torch.Tensor) -> None:
    seen = torch.rand(K, CLASSES) < 0.5
    made = mask_logits(logits, seen, 0.0)
    flat = mask_logits(logits.flatten(1, 2), seen, 0.0)
    assert torch.equal(made.flatten(1, 2), flat)
    assert bool((made[~seen[:, None, None, :].expand_as(made)] == 0).all())
    assert mask_logits(logits, seen, None) is logits

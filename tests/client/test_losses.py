"""Losses where every position of an example is answered: the same as if each position were an example."""

import pytest
import torch
from torch.nn import functional as F

from fedloom.client import (
    LOSSES,
    Batch,
    CrossEntropy,
    Focal,
    build_loss,
    mask_logits,
    soft_cross_entropy,
    supervised_loss,
)

K, BATCH, LENGTH, CLASSES = 3, 4, 5, 7


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(K, BATCH, LENGTH, CLASSES)


def test_cross_entropy_sequences_is_mean_over_positions(logits: torch.Tensor) -> None:
    y = torch.randint(CLASSES, (K, BATCH, LENGTH))
    made = supervised_loss(logits, Batch(logits, y))
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


def test_focal_without_gamma_is_cross_entropy(logits: torch.Tensor) -> None:
    flat, labels = logits.flatten(0, -2), torch.arange(logits.flatten(0, -2).shape[0]) % logits.shape[-1]
    assert torch.allclose(Focal(gamma=0.0)(flat, labels), CrossEntropy()(flat, labels))
    chance = flat.softmax(-1).gather(1, labels[:, None])[:, 0]
    assert torch.allclose(Focal(gamma=2.0)(flat, labels), -((1 - chance) ** 2) * chance.log(), atol=1e-6)


def test_build_loss_function_of_logits_and_labels_is_the_loss_itself(logits: torch.Tensor) -> None:
    def scaled(logits: torch.Tensor, labels: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return factor * CrossEntropy()(logits, labels)

    flat = logits.flatten(0, -2)
    labels = torch.zeros(len(flat), dtype=torch.int64)
    assert torch.equal(build_loss(scaled, {})(flat, labels), 2 * CrossEntropy()(flat, labels))
    assert torch.equal(build_loss(scaled, {"factor": 3.0})(flat, labels), 3 * CrossEntropy()(flat, labels))
    assert build_loss(LOSSES["focal"], {"gamma": 1.0}) == Focal(1.0)

"""Losses of labels, numbers, tokens and pixels: against torch, for every device alone, and without ignored ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedloom.client import LOSSES, Batch, build_loss, default_loss, distillation_loss, fits_task, supervised_loss
from fedloom.data import IGNORED, TASKS

DRAW = torch.Generator().manual_seed(0)


def batch_of(y: torch.Tensor, loss: str, **settings: float) -> Batch:
    return Batch(torch.zeros(y.shape[:2]), y, loss=build_loss(LOSSES[loss], settings))


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("mse", {}, F.mse_loss),
        ("mae", {}, F.l1_loss),
        ("huber", {"delta": 0.5}, lambda a, b: F.huber_loss(a, b, delta=0.5)),
        ("binary_cross_entropy", {}, F.binary_cross_entropy_with_logits),
        (
            "binary_cross_entropy", {"pos_weight": 3.0},
            lambda a, b: F.binary_cross_entropy_with_logits(a, b, pos_weight=torch.tensor(3.0)),
        ),
    ],
)  # fmt: skip
def test_supervised_loss_is_torchs_mean_for_each_device(name: str, settings: dict[str, float], theirs: object) -> None:
    outputs, targets = torch.randn(2, 5, 3, generator=DRAW), torch.randint(0, 2, (2, 5, 3), generator=DRAW).float()
    found = supervised_loss(outputs, batch_of(targets, name, **settings))
    expected = torch.stack([theirs(a, b) for a, b in zip(outputs, targets, strict=True)])  # type: ignore[operator]
    torch.testing.assert_close(found, expected)


def test_supervised_loss_of_one_number_takes_targets_without_an_axis() -> None:
    outputs, targets = torch.randn(2, 5, 1, generator=DRAW), torch.randn(2, 5, generator=DRAW)
    found = supervised_loss(outputs, batch_of(targets, "mse"))
    torch.testing.assert_close(found, (outputs[..., 0] - targets).square().mean(1))


def test_supervised_loss_with_torchs_own_loss_averages_outputs() -> None:
    outputs, targets = torch.randn(2, 5, 3, generator=DRAW), torch.randn(2, 5, 3, generator=DRAW)

    def own(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(logits, labels, reduction="none")

    found = supervised_loss(outputs, Batch(torch.zeros(2, 5), targets, loss=own))
    torch.testing.assert_close(found, (outputs - targets).square().flatten(1).mean(1))


@given(st.integers(0, 2**31), st.floats(0.0, 0.9))
def test_supervised_loss_ignores_marked_positions_of_each_device_alone(seed: int, share: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 2, 4, 4, 5, generator=draw, requires_grad=True)
    labels = torch.randint(0, 5, (3, 2, 4, 4), generator=draw)
    labels[1:][torch.rand(labels[1:].shape, generator=draw) < share] = IGNORED
    labels[2] = IGNORED
    losses = supervised_loss(logits, Batch(torch.zeros(3, 2), labels))
    alone = supervised_loss(logits[:1], Batch(torch.zeros(1, 2), labels[:1]))
    assert torch.equal(losses[:1], alone)  # to the bit, whatever others of the block ignore
    if bool((labels[1] != IGNORED).any()):
        expected = F.cross_entropy(logits[1].flatten(0, -2), labels[1].flatten())
        torch.testing.assert_close(losses[1], expected)
    assert float(losses[2].detach()) == 0
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert bool(gradient.isfinite().all())
    assert float(gradient[labels == IGNORED].abs().sum()) == 0


@pytest.mark.parametrize("kind", TASKS)
def test_default_loss_fits_its_task(kind: str) -> None:
    assert fits_task(LOSSES[TASKS[kind].loss], TASKS[kind])
    assert default_loss(TASKS[kind]) == LOSSES[TASKS[kind].loss]()


def test_fits_task_follows_targets_and_accepts_own_losses() -> None:
    assert not fits_task(LOSSES["cross_entropy"], TASKS["regression"])
    assert not fits_task(LOSSES["mse"], TASKS["multi_label"])
    assert fits_task(LOSSES["focal"], TASKS["segmentation"])
    assert fits_task(lambda logits, labels: logits, TASKS["regression"])


@pytest.mark.parametrize("kind", ["classification", "multi_label", "regression", "segmentation"])
def test_distillation_loss_is_least_at_the_teacher_and_gives_it_no_gradient(kind: str) -> None:
    shape = (2, 3, 4, 4, 5) if kind == "segmentation" else (2, 3, 5)
    teacher = torch.randn(shape, generator=DRAW, requires_grad=True)
    student = teacher.detach().clone().requires_grad_()
    loss = distillation_loss(student, teacher, TASKS[kind])
    assert loss.shape == (2,)
    by_student, by_teacher = torch.autograd.grad(loss.sum(), (student, teacher), allow_unused=True)
    assert by_teacher is None
    torch.testing.assert_close(by_student, torch.zeros_like(by_student), atol=1e-6, rtol=0)
    further = distillation_loss(student + 1 * torch.randn(shape, generator=DRAW), teacher, TASKS[kind])
    assert bool((further > loss).all())

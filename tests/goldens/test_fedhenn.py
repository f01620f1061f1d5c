"""FedHeNN compared with values worked out by hand: two representations of three examples, strength, mean."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.client import alignment_loss, average_kernels, represent
from fedloom.fleet import Device, Reply, RoundContext
from fedloom.methods._alignment import RepresentationAlignment
from fedloom.methods.fedhenn import FedHeNN
from fedloom.tensors import Parcel, Tensors

A_I = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
A_J = torch.tensor([[1], [0], [0]], dtype=torch.float64)
K_I, K_J = A_I @ A_I.T, A_J @ A_J.T
CENTRING = torch.eye(3, dtype=torch.float64) - 1 / 3

FORMS = [{"features": A_J}, {"kernel": K_J}]
HOW = ["features", "kernel"]


def alignment(features: Tensor, target: Tensors, kernel: Any = "linear") -> float:
    return 1 - float(alignment_loss(target, kernel)(features))


def test_kernel_centering_matches_hand_value() -> None:
    by_hand = [[5, -4, -1], [-4, 5, -1], [-1, -1, 2]], [[4, -2, -2], [-2, 1, 1], [-2, 1, 1]]
    for kernel, ninths in zip((K_I, K_J), by_hand, strict=True):
        assert torch.allclose(9 * CENTRING @ kernel @ CENTRING, torch.tensor(ninths, dtype=torch.float64))


def test_hsic_matches_hand_value() -> None:
    def hsic(one: Tensor, other: Tensor) -> float:
        return float(torch.trace(one @ CENTRING @ other @ CENTRING)) / (3 - 1) ** 2

    assert [hsic(K_I, K_J), hsic(K_I, K_I), hsic(K_J, K_J)] == pytest.approx([5 / 36, 5 / 18, 1 / 9])
    assert hsic(K_I, K_J) / (hsic(K_I, K_I) * hsic(K_J, K_J)) ** 0.5 == pytest.approx(5 / 40**0.5)


@pytest.mark.parametrize("target", FORMS, ids=HOW)
def test_cka_is_centered(target: Tensors) -> None:
    assert alignment(A_I, target) == pytest.approx(5 / 40**0.5, abs=1e-9)
    assert alignment(A_I, target) == pytest.approx(0.790569, abs=1e-6)


def test_cka_differs_from_papers_closed_form() -> None:
    """Equation 4 of the paper omits the centering."""
    uncentred = (A_J.T @ A_I).square().sum() / (K_I.norm() * K_J.norm())
    assert float(uncentred) == pytest.approx(0.316228, abs=1e-6)


@pytest.mark.parametrize(("features", "expected"), [(A_I, 0.968246), (A_J, 0.918559)], ids=["i", "j"])
def test_alignment_with_mean_kernel_matches_hand_value(features: Tensor, expected: float) -> None:
    mean = average_kernels([represent(one, "linear") for one in (A_I, A_J)], [1, 1], "linear")
    assert torch.allclose(mean["kernel"], (K_I + K_J) / 2)
    assert alignment(features, mean) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("target", FORMS, ids=HOW)
def test_alignment_loss_gradient_matches_hand_value(target: Tensors) -> None:
    features = A_I.clone().requires_grad_()
    (slope,) = torch.autograd.grad(alignment_loss(target, "linear")(features), features)
    g = 0.474342
    assert torch.allclose(slope, torch.tensor([[0, g], [-g, 0], [g, -g]], dtype=torch.float64), atol=1e-6)


def test_rbf_kernel_of_width_one_matches_hand_value() -> None:
    """The median distance is 1 in both, so the width needs no setting."""
    (kernel,) = represent(A_I, "rbf").values()
    assert kernel[[0, 0, 1], [1, 2, 2]].tolist() == pytest.approx([0.367879, 0.606531, 0.606531], abs=1e-6)
    assert kernel.diagonal().tolist() == pytest.approx([1, 1, 1])


def test_rbf_alignment_matches_hand_value() -> None:
    assert alignment(A_I, represent(A_J, "rbf"), "rbf") == pytest.approx(0.782924, abs=1e-6)


@pytest.mark.parametrize(("past", "pull"), [(0, 0.0), (1, 0.001), (4, 0.002), (100, 0.01), (199, 0.014107)])
def test_strength_grows_with_root_of_past_rounds(past: int, pull: float) -> None:
    assert RepresentationAlignment().strength_at(past + 1) == pytest.approx(pull, abs=1e-6)


@pytest.mark.parametrize(("growth", "pulls"), [("linear", [0, 0.002, 0.004]), ("none", [0.002] * 3)])
def test_strength_growth_setting_is_respected(growth: Any, pulls: list[float]) -> None:
    chosen = RepresentationAlignment(0.002, growth)
    assert [chosen.strength_at(number) for number in (1, 2, 3)] == pytest.approx(pulls)


def test_fedhenn_weights_are_averaged_by_examples(world: Callable[..., Any], scripted: Callable[..., Any]) -> None:
    """1 from 10 examples and 5 from 30 make 4."""
    fleet = world(sizes=(8, 8)).fleet
    values, examples = {"0": 1.0, "1": 5.0}, {"0": 10, "1": 30}

    def answer(device: Device, inbox: Parcel) -> Reply:
        sent = {name: torch.full_like(weight, values[device.name]) for name, weight in inbox["weights"].items()}
        return Reply(device, examples[device.name], {"weights": sent})

    method = FedHeNN(share="weights")
    made = method.round(method.start(fleet, 0), RoundContext(1, fleet.devices(1), fleet, scripted(answer)))
    assert all(bool((weight == 4.0).all()) for weight in made["weights"].values())

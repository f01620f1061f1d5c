"""Linear CKA against its definition by Gram matrices, and its invariances."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedloom.evaluation.cka import cka_map, features, linear_cka
from fedloom.models import Model


def by_gram_matrices(left: Tensor, right: Tensor) -> float:
    """HSIC of centered linear kernels, as the definition has it."""
    n = len(left)
    centre = torch.eye(n, dtype=torch.float64) - 1 / n
    k, l = (centre @ (one @ one.mT) @ centre for one in (left, right))  # noqa: E741
    return float((k * l).sum() / ((k * k).sum().sqrt() * (l * l).sum().sqrt()))


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)


def test_linear_cka_any_features_matches_gram_matrices(pair: tuple[Tensor, Tensor]) -> None:
    assert linear_cka(*pair) == pytest.approx(by_gram_matrices(*pair), abs=1e-12)


def test_linear_cka_rotation_scale_and_shift_are_ignored(pair: tuple[Tensor, Tensor]) -> None:
    left, _ = pair
    rotation, _ = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))
    assert linear_cka(left, 3 * left @ rotation + 7) == pytest.approx(1)
    assert linear_cka(*pair) == pytest.approx(linear_cka(*reversed(pair)))


def test_linear_cka_constant_features_is_nan(pair: tuple[Tensor, Tensor]) -> None:
    assert torch.tensor(linear_cka(pair[0], torch.ones(20, 2))).isnan()


@pytest.mark.parametrize("family", ["preactresnet", "mobilenet"])
def test_cka_map_of_a_net_with_itself_has_unit_diagonal(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    weights = {name: torch.randn(shape) for name, shape in net.shapes().items()}
    x = torch.randn(12, *net.input_shape)
    seen = features(net, weights, x)
    block = {name: one.unsqueeze(0) for name, one in weights.items()}
    stage = next(iter(seen))
    torch.testing.assert_close(seen[stage], net(block, x.unsqueeze(0)).taps[stage][0].mean((-2, -1)))
    cka = cka_map(seen, seen)
    assert [cka[n][n] for n in range(len(seen))] == pytest.approx([1.0] * len(seen))

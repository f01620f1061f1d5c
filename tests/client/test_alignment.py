"""How alike two representations are, against the definitions written out: kernels in full, centered by a matrix."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.client import alignment_loss, average_kernels, represent, representation_kind, select_examples
from fedloom.tensors import Tensors

FEW = settings(max_examples=12)


@dataclass(frozen=True)
class AlignmentCase:
    """A kernel, and the form of its target."""

    kernel: Any
    representation: Callable[[Tensor], Tensors]

    def find_footprint(self, features: Tensor, other: Tensor) -> Tensor:
        return alignment_loss(self.representation(other), self.kernel)(features)


WAYS = {
    "linear-features": AlignmentCase("linear", lambda other: {"features": other}),
    "linear-kernel": AlignmentCase("linear", lambda other: {"kernel": other @ other.mT}),
    "rbf": AlignmentCase("rbf", lambda other: represent(other, "rbf")),
    "procrustes": AlignmentCase("procrustes", lambda other: {"features": other}),
}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def representations(draw: Any, count: int = 2) -> list[Tensor]:
    """Of the same examples by nets of different widths, some wider than there are examples."""
    examples, seed = draw(st.integers(3, 8)), draw(st.integers(0, 999))
    return [drawn(seed + number, examples, draw(st.integers(1, 10))) for number in range(count)]


def median_distance(features: Tensor) -> Tensor:
    return torch.pdist(features).sort().values[(len(features) * (len(features) - 1) // 2 - 1) // 2]


def kernel_of(features: Tensor, kernel: str, width: Tensor) -> Tensor:
    if kernel == "linear":
        return features @ features.T
    apart = (features.unsqueeze(0) - features.unsqueeze(1)).square().sum(-1)
    return torch.exp(-apart / (2 * width**2))


def centered(kernel: Tensor) -> Tensor:
    matrix = torch.eye(len(kernel), dtype=kernel.dtype) - 1 / len(kernel)
    return matrix @ kernel @ matrix


def by_definition(kernel: str, features: Tensor, other: Tensor, width: Tensor | None = None) -> Tensor:
    """`width` of the features' kernel, where it is held while they change."""
    if kernel == "procrustes":
        one, two = features - features.mean(0), other - other.mean(0)
        return 1 - torch.linalg.matrix_norm(one.T @ two, "nuc") / (one.norm() * two.norm())
    widths = median_distance(features) if width is None else width, median_distance(other)
    one, two = (centered(kernel_of(x, kernel, w)) for x, w in zip((features, other), widths, strict=True))
    return 1 - (one * two).sum() / (one.norm() * two.norm())


def turned(features: Tensor, seed: int = 0) -> Tensor:
    rotation, _ = torch.linalg.qr(drawn(seed, features.shape[1], features.shape[1]))
    return features @ rotation


@every_way
@given(both=representations())
def test_alignment_loss_any_features_matches_the_definition(way: AlignmentCase, both: list[Tensor]) -> None:
    assert torch.allclose(way.find_footprint(*both), by_definition(way.kernel, *both), atol=1e-7)


@given(both=representations())
def test_alignment_loss_features_or_kernel_are_equivalent(both: list[Tensor]) -> None:
    small, large = (WAYS[way].find_footprint(*both) for way in ("linear-features", "linear-kernel"))
    assert torch.allclose(small, large, atol=1e-10)


@every_way
@given(both=representations())
def test_alignment_loss_swapped_arguments_is_symmetric(way: AlignmentCase, both: list[Tensor]) -> None:
    assert torch.allclose(way.find_footprint(*both), way.find_footprint(*reversed(both)), atol=1e-7)


@every_way
@given(both=representations())
def test_alignment_loss_any_features_lies_between_zero_and_one(way: AlignmentCase, both: list[Tensor]) -> None:
    assert -1e-9 <= float(way.find_footprint(*both)) <= 1 + 1e-9


@every_way
@given(both=representations())
def test_alignment_loss_of_itself_is_zero(way: AlignmentCase, both: list[Tensor]) -> None:
    assert float(way.find_footprint(both[0], both[0])) == pytest.approx(0, abs=1e-7)


@every_way
@given(both=representations(), scale=st.sampled_from([-3.0, 0.2, 50.0]), shift=st.floats(-5, 5))
def test_alignment_loss_rotation_scale_and_shift_are_ignored(
    way: AlignmentCase, both: list[Tensor], scale: float, shift: float
) -> None:
    features, other = both
    expected = way.find_footprint(features, other)
    assert torch.allclose(way.find_footprint(scale * turned(features) + shift, other), expected, atol=1e-5)
    assert torch.allclose(way.find_footprint(features, scale * turned(other) + shift), expected, atol=1e-5)


@every_way
@given(both=representations())
def test_alignment_loss_small_target_is_scale_invariant(way: AlignmentCase, both: list[Tensor]) -> None:
    features, other = both
    assert torch.allclose(way.find_footprint(features, 1e-3 * other), way.find_footprint(features, other), atol=1e-7)


@every_way
@given(both=representations(), seed=st.integers(0, 99))
def test_alignment_loss_permuted_examples_are_equivalent(way: AlignmentCase, both: list[Tensor], seed: int) -> None:
    order = torch.randperm(len(both[0]), generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(way.find_footprint(*(one[order] for one in both)), way.find_footprint(*both), atol=1e-9)


@given(both=representations())
def test_alignment_loss_wide_rbf_approaches_linear(both: list[Tensor]) -> None:
    features, other = both
    wide = alignment_loss(represent(other, "rbf", 100.0), "rbf", 100.0)(features)
    assert torch.allclose(wide, WAYS["linear-features"].find_footprint(features, other), atol=2e-3)


def test_alignment_loss_unrelated_features_are_far_apart() -> None:
    """Or all of the above would hold for a constant."""
    one, other = torch.eye(4, dtype=torch.float64)[:, :1], torch.eye(4, dtype=torch.float64)[:, 1:2]
    assert all(float(way.find_footprint(one, other)) > 0.5 for way in WAYS.values())


@FEW
@every_way
@given(both=representations())
def test_alignment_loss_gradient_matches_finite_differences(way: AlignmentCase, both: list[Tensor]) -> None:
    """An rbf kernel keeps its width while it learns."""
    features, other = both
    width, step = median_distance(features), 1e-5
    leaf = features.clone().requires_grad_()
    (slope,) = torch.autograd.grad(way.find_footprint(leaf, other), leaf)
    for place in torch.cartesian_prod(*map(torch.arange, features.shape)):
        nudge = torch.zeros_like(features)
        nudge[tuple(place)] = step
        up, down = (by_definition(way.kernel, features + sign * nudge, other, width) for sign in (1, -1))
        assert float(slope[tuple(place)]) == pytest.approx(float(up - down) / (2 * step), abs=2e-5)


@pytest.mark.parametrize(("scale", "digits"), [(1.0, 1e-12), (0.1, 1e-8), (0.01, 1e-5)])
@pytest.mark.parametrize(("examples", "width"), [(4, 2), (4, 10), (32, 6), (8, 40)])
@pytest.mark.parametrize("way", ["linear-features", "linear-kernel"])
def test_alignment_loss_linear_gradient_matches_the_definition_for_few_and_many_examples(
    way: str, examples: int, width: int, scale: float, digits: float
) -> None:
    """Whichever form is smaller; what keeps slopes finite at constant features costs digits only for tiny ones."""
    leaf, other = (scale * drawn(0, examples, width)).requires_grad_(), scale * drawn(1, examples, width)
    (slope,) = torch.autograd.grad(WAYS[way].find_footprint(leaf, other), leaf)
    (wanted,) = torch.autograd.grad(by_definition("linear", leaf, other), leaf)
    assert float((slope - wanted).abs().max() / wanted.abs().max()) < digits


@every_way
def test_alignment_loss_target_has_no_gradient(way: AlignmentCase) -> None:
    features, other = drawn(0, 5, 3).requires_grad_(), drawn(1, 5, 4).requires_grad_()
    slopes = torch.autograd.grad(way.find_footprint(features, other), [features, other], materialize_grads=True)
    assert slopes[0].abs().max() > 1e-3
    assert not slopes[1].any()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.25])
def test_alignment_loss_constant_target_is_zero(way: AlignmentCase, dtype: torch.dtype, constant: float) -> None:
    features = drawn(0, 5, 3).to(dtype).requires_grad_()
    apart = way.find_footprint(features, torch.full((5, 4), constant, dtype=dtype))
    (slope,) = torch.autograd.grad(apart, features)
    assert apart.item() == 0
    assert torch.equal(slope, torch.zeros_like(slope))


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.25])
def test_alignment_loss_constant_features_are_one_without_nan(
    way: AlignmentCase, dtype: torch.dtype, constant: float
) -> None:
    features = torch.full((5, 3), constant, dtype=dtype).requires_grad_()
    apart = way.find_footprint(features, drawn(1, 5, 4).to(dtype))
    (slope,) = torch.autograd.grad(apart, features)
    assert apart.item() == pytest.approx(1)
    assert torch.isfinite(slope).all()


@every_way
@FEW
@given(devices=representations(1), count=st.integers(2, 4), own_targets=st.booleans())
def test_alignment_loss_block_equals_single_devices(
    way: AlignmentCase, devices: list[Tensor], count: int, own_targets: bool
) -> None:
    examples, width = devices[0].shape
    block = drawn(3, count, examples, width).requires_grad_()
    others = drawn(4, count, examples, 4) if own_targets else drawn(4, 1, examples, 4).expand(count, -1, -1)
    apart = way.find_footprint(block, others)
    (slope,) = torch.autograd.grad(apart.sum(), block)
    assert apart.shape == (count,)
    for number in range(count):
        alone = block[number].detach().requires_grad_()
        expected = way.find_footprint(alone, others[number])
        assert torch.allclose(apart[number], expected, atol=1e-12)
        assert torch.allclose(slope[number], *torch.autograd.grad(expected, alone), atol=1e-9)


@every_way
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_alignment_loss_diverged_device_does_not_affect_others(way: AlignmentCase, bad: float) -> None:
    block, other = drawn(0, 3, 5, 4), drawn(1, 5, 2)
    expected = way.find_footprint(block, other.expand(3, -1, -1))
    block[1, 2, 0] = bad
    leaf = block.requires_grad_()
    apart = way.find_footprint(leaf, other.expand(3, -1, -1))
    (slope,) = torch.autograd.grad(apart.sum(), leaf)
    assert torch.equal(apart[[0, 2]], expected[[0, 2]])
    assert not torch.isfinite(apart[1])
    assert torch.isfinite(slope[[0, 2]]).all()


@given(representation=representations(), kernel=st.sampled_from(["linear", "rbf", "procrustes"]))
def test_represent_any_width_uses_the_smaller_form(representation: list[Tensor], kernel: Any) -> None:
    features, _ = representation
    examples, width = features.shape
    ((name, tensor),) = represent(features, kernel).items()
    assert name == representation_kind(kernel, examples, width)
    if kernel == "linear":
        assert tensor.numel() == examples * min(examples, width)
    expected = features if name == "features" else kernel_of(features, kernel, median_distance(features))
    assert torch.allclose(tensor, expected, atol=1e-7)


def full_kernel(representation: Tensors) -> Tensor:
    return (
        representation["kernel"]
        if "kernel" in representation
        else representation["features"] @ representation["features"].T
    )


def mean_by_definition(kernels: Sequence[Tensor], shares: Sequence[float], even: bool) -> Tensor:
    loud = [1 / centered(kernel).norm() if even else 1.0 for kernel in kernels]
    return sum(
        (k * scale * share / sum(shares) for k, scale, share in zip(kernels, loud, shares, strict=True)),
        torch.zeros_like(kernels[0]),
    )


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("kernel", ["linear", "rbf"])
@given(nets=st.integers(1, 4).flatmap(representations), shares=st.lists(st.floats(0.5, 9), min_size=4, max_size=4))
def test_average_kernels_weighted_matches_explicit_kernels(
    kernel: Any, even: bool, nets: list[Tensor], shares: list[float]
) -> None:
    shares = shares[: len(nets)]
    mean = average_kernels([represent(one, kernel) for one in nets], shares, kernel, even)
    kernels = [kernel_of(one, kernel, median_distance(one)) for one in nets]
    assert torch.allclose(full_kernel(mean), mean_by_definition(kernels, shares, even), atol=1e-7)


@given(nets=representations(3))
def test_average_kernels_result_uses_the_smaller_form(nets: list[Tensor]) -> None:
    ((name, tensor),) = average_kernels([represent(one, "linear") for one in nets], [1, 1, 1], "linear").items()
    examples, width = len(nets[0]), sum(one.shape[1] for one in nets)
    assert (name, tensor.numel()) == (representation_kind("linear", examples, width), examples * min(examples, width))


@pytest.mark.parametrize("even", [False, True])
@given(nets=representations(3))
def test_average_kernels_procrustes_concatenates_features(even: bool, nets: list[Tensor]) -> None:
    mean = average_kernels([represent(one, "procrustes") for one in nets], [1, 1, 1], "procrustes", even)
    kernels = [one @ one.T for one in nets]
    assert torch.allclose(full_kernel(mean), mean_by_definition(kernels, [1, 1, 1], even), atol=1e-7)


@given(nets=representations(3), scales=st.tuples(*[st.floats(0.1, 20)] * 3))
def test_average_kernels_even_ignores_scale(nets: list[Tensor], scales: tuple[float, ...]) -> None:
    louder = [scale * one for scale, one in zip(scales, nets, strict=True)]
    plain, scaled = (
        full_kernel(average_kernels([represent(one, "linear") for one in each], [1, 1, 1], "linear", True))
        for each in (nets, louder)
    )
    assert torch.allclose(plain, scaled, atol=1e-7)


@given(nets=representations(3), scale=st.floats(0.1, 20))
def test_average_kernels_adding_the_mean_keeps_its_direction(nets: list[Tensor], scale: float) -> None:
    representation = [represent(one, "linear") for one in nets]
    mean = average_kernels(representation, [1, 1, 1], "linear")
    more = average_kernels([*representation, {"kernel": scale * full_kernel(mean)}], [1, 1, 1, 1], "linear")
    ratio = full_kernel(more) / full_kernel(mean)
    assert torch.allclose(ratio, ratio.mean(), rtol=1e-6)


@every_way
@given(both=representations(), data=st.data())
def test_select_examples_subset_equals_representing_the_subset(
    way: AlignmentCase, both: list[Tensor], data: Any
) -> None:
    features, other = both
    rows = torch.tensor(data.draw(st.permutations(range(len(other))))[: data.draw(st.integers(2, len(other)))])
    representation = {name: tensor.unsqueeze(0) for name, tensor in way.representation(other).items()}
    some = select_examples(representation, rows)
    if "kernel" in representation:
        assert torch.equal(some["kernel"][0], representation["kernel"][0][rows][:, rows])
    else:
        assert torch.equal(some["features"][0], other[rows])
    if way.kernel != "rbf":  # whose width is that of all the examples the target was made of
        chosen = features[rows] / features[rows].std(0).max()  # two examples may be so close that TINY would show
        expected = by_definition(way.kernel, chosen, other[rows])
        found = alignment_loss(some, way.kernel)(chosen.unsqueeze(0))
        assert torch.allclose(found, expected.nan_to_num(1.0), atol=1e-5)

"""Width slices and normalizations; parametric normalization against its formula and torch's batch norm."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from fedloom.footprints import subnet_footprint
from fedloom.models import Model
from fedloom.models.layers import fold, unfold
from fedloom.models.normalization import Normalization, ParametricNorm, kept_channels, make_norm

EXAMPLE_ALONE = pytest.mark.parametrize("per_sample", [False, True], ids=["batch", "sample"])


def norm_of(channels: int, per_sample: bool = False, **weights: Any) -> ParametricNorm:
    result = ParametricNorm(channels, per_sample).double()
    for name, values in weights.items():
        result.get_parameter(name).data = torch.as_tensor(values, dtype=torch.float64).expand(channels).clone()
    return result


def random_norm(channels: int, per_sample: bool = False) -> ParametricNorm:
    weights = {name: torch.randn(channels, dtype=torch.float64) for name in ("weight", "shift", "bias")}
    return norm_of(channels, per_sample, **weights)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 2 + 1


def gradients(result: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(result.sin().sum(), leaves)


def test_parametric_norm_matches_hand_computed_example() -> None:
    x = torch.tensor([1.0, 3.0, 5.0, 9.0]).double().view(2, 1, 1, 2)
    assert norm_of(1, shift=4)(x).flatten().tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 5 / 3], abs=1e-7)
    assert norm_of(1, shift=4, weight=2, bias=1)(x).flatten().tolist() == pytest.approx([-1, 1 / 3, 5 / 3, 13 / 3])


def test_parametric_norm_starts_neutral_with_three_weights_per_channel() -> None:
    first = {name: weight.tolist() for name, weight in ParametricNorm(2).named_parameters()}
    assert first == {"weight": [1.0, 1.0], "shift": [0.0, 0.0], "bias": [0.0, 0.0]}


@EXAMPLE_ALONE
def test_parametric_norm_matches_formula(per_sample: bool) -> None:
    norm, x = random_norm(3, per_sample), images(4, 3, 5, 6)
    result = norm(x)
    for example in range(4):
        for channel in range(3):
            weight, shift, bias = (one[channel].item() for one in (norm.weight, norm.shift, norm.bias))
            seen = x[example, channel] if per_sample else x[:, channel]
            root = float(((seen - shift) ** 2).mean()) ** 0.5
            expected = weight * (x[example, channel] - shift) / (root + 1e-8) + bias
            assert torch.allclose(result[example, channel], expected, atol=1e-12)


def test_parametric_norm_with_batch_mean_as_shift_is_batch_norm() -> None:
    x = images(4, 3, 5, 5)
    norm = random_norm(3)
    norm.shift.data = x.mean((0, 2, 3))
    by_torch = torch.batch_norm(x, norm.weight, norm.bias, None, None, True, 1.0, 0.0, False)
    assert torch.allclose(norm(x), by_torch, atol=1e-7)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 40.0])
def test_parametric_norm_is_scale_invariant(factor: float) -> None:
    x, norm = images(4, 3, 5, 5), random_norm(3)
    result = norm(x)
    norm.shift.data = norm.shift.data * factor
    assert torch.allclose(norm(x * factor), result, atol=1e-4)


@EXAMPLE_ALONE
def test_parametric_norm_output_has_unit_mean_square(per_sample: bool) -> None:
    norm, x = random_norm(3, per_sample), images(4, 3, 5, 5)
    plain = (norm(x) - norm.bias.view(-1, 1, 1)) / norm.weight.view(-1, 1, 1)
    mean_square = plain.square().mean((2, 3) if per_sample else (0, 2, 3))
    assert torch.allclose(mean_square, torch.ones_like(mean_square), atol=1e-6)


@EXAMPLE_ALONE
def test_parametric_norm_gradient_matches_numerical(per_sample: bool) -> None:
    norm, x = random_norm(2, per_sample), images(3, 2, 2, 2).requires_grad_()

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(norm, dict(zip(("weight", "shift", "bias"), weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, norm.weight, norm.shift, norm.bias))


@EXAMPLE_ALONE
def test_parametric_norm_constant_channel_becomes_bias(per_sample: bool) -> None:
    norm, x = random_norm(3, per_sample), images(4, 3, 5, 5)
    with torch.no_grad():
        x[:, 1] = norm.shift[1]
    x.requires_grad_()
    result = norm(x)
    assert bool((result[:, 1] == norm.bias[1]).all())
    of_x, *of_weights = gradients(result, [x, norm.weight, norm.shift, norm.bias])
    assert all(bool(gradient.isfinite().all()) for gradient in (of_x, *of_weights))
    assert bool((of_x[:, 1] == 0).all())
    assert of_weights[2][1].item() == pytest.approx(100 * norm.bias[1].cos().item())


def test_parametric_norm_constant_example_leaves_others_unchanged() -> None:
    norm, x = random_norm(2, per_sample=True), images(3, 2, 4, 4)
    with torch.no_grad():
        x[1, 0] = norm.shift[0]
    lively = x[[0, 2]].clone().requires_grad_()
    x.requires_grad_()
    (among, *_), (apart, *_) = gradients(norm(x), [x]), gradients(norm(lively), [lively])
    assert torch.equal(among[[0, 2]], apart)


def test_parametric_norm_zeros_give_no_nan() -> None:
    norm, x = ParametricNorm(2), torch.zeros(2, 2, 3, 3, requires_grad=True)
    assert all(bool((gradient == 0).all()) for gradient in gradients(norm(x), [x, norm.weight, norm.shift]))


def test_parametric_norm_nonfinite_input_stays_nonfinite() -> None:
    x = torch.zeros(2, 2, 3, 3)
    x[0, 1, 0, 0] = torch.nan
    result = ParametricNorm(2)(x)
    assert bool(result[:, 1].isnan().all())
    assert bool((result[:, 0] == 0).all())


def test_parametric_norm_single_pixel_keeps_sign() -> None:
    x = torch.tensor([3.0, -0.2]).double().view(1, 2, 1, 1)
    assert norm_of(2)(x).flatten().tolist() == pytest.approx([1, -1], abs=1e-6)


@EXAMPLE_ALONE
def test_parametric_norm_only_per_sample_ignores_rest_of_batch(per_sample: bool) -> None:
    norm, x = random_norm(3, per_sample).eval(), images(4, 3, 5, 5)
    assert torch.allclose(norm(x)[:1], norm(x[:1]), atol=1e-12) is per_sample


@pytest.mark.parametrize("shape", [(3,), (3, 4)], ids=["vectors", "sequences"])
def test_parametric_norm_accepts_any_input_rank(shape: tuple[int, ...]) -> None:
    norm, x = random_norm(3), images(4, *shape)
    as_images = x.reshape(4, 3, -1, 1)
    assert torch.allclose(norm(x).reshape_as(as_images), norm(as_images), atol=1e-12)


@EXAMPLE_ALONE
def test_parametric_norm_leading_slice_is_leading_channels(per_sample: bool) -> None:
    wide, narrow, x = random_norm(5, per_sample), ParametricNorm(2, per_sample).double(), images(4, 5, 3, 3)
    narrow.load_state_dict({name: weight[:2] for name, weight in wide.state_dict().items()})
    assert torch.equal(narrow(x[:, :2]), wide(x)[:, :2])


@EXAMPLE_ALONE
@pytest.mark.parametrize("batch", [1, 4])
def test_parametric_norm_block_matches_single_devices(per_sample: bool, batch: int) -> None:
    alone = [random_norm(3, per_sample) for _ in range(4)]
    stacked = {name: torch.stack([n.get_parameter(name).detach() for n in alone]) for name in alone[0].state_dict()}
    together, x = ParametricNorm(3, per_sample).double(), images(4, batch, 3, 5, 5).requires_grad_()
    for name, weight in stacked.items():
        together._parameters[name] = weight.requires_grad_()  # type: ignore[assignment]
    result = unfold(together(fold(x)), 4)
    actual = gradients(result, [x, *stacked.values()])
    for device, norm in enumerate(alone):
        assert torch.allclose(result[device], norm(x[device]), atol=1e-12)
        own = gradients(norm(x[device]), [x, *norm.parameters()])
        assert torch.allclose(actual[0][device], own[0][device], atol=1e-12)
        for folded, single in zip(actual[1:], own[1:], strict=True):
            assert torch.allclose(folded[device], single, atol=1e-12)


@pytest.mark.parametrize("family", ["convnet", "preresnet", "preactresnet", "mobilenet"])
@pytest.mark.parametrize("normalization", ["static_batch", "group"])
def test_norm_per_width_uses_norm_of_its_width(
    family: str, normalization: Any, tiny_model: Callable[..., Model]
) -> None:
    """A slice has the norms of all narrower widths, uses only its own, and nests in the wider nets."""
    nets = [
        tiny_model(family, width=width, norm_widths=(0.25, 0.5, 1.0), normalization=normalization)
        for width in (0.25, 0.5, 1.0)
    ]
    plain = [tiny_model(family, width=width, normalization=normalization) for width in (0.25, 0.5, 1.0)]
    for number, (net, usual) in enumerate(zip(nets, plain, strict=True)):
        held = {name.split(".norms.")[1].split(".")[0] for name in net.shapes() if ".norms." in name}
        assert held == set(["0_25", "0_5", "1"][: number + 1])
        assert len(net.statistics()) == len(usual.statistics())
        used = set(net.last_exit_weights())
        own = ["0_25", "0_5", "1"][number]
        assert {name.split(".norms.")[1].split(".")[0] for name in used if ".norms." in name} == {own}
        assert net.fallback_reasons() == ()
    for small, large in pairwise(nets):
        assert subnet_footprint(small, large).blocks.keys() == small.shapes().keys()


@pytest.mark.parametrize(
    ("hidden", "width", "widest", "kept"),
    [
        (64, 1.0, 1.0, 64),
        (64, 0.0625, 1.0, 4),
        (3, 0.5, 1.0, 2),
        (5, 0.25, 1.0, 2),
        (1, 0.0625, 1.0, 1),
        (30, 0.1, 1.0, 3),  # 0.1 * 30 is a little above 3 in floating point
        (5, 0.25, 0.5, 2),  # the global model keeps ceil(2.5) = 3, a half of it is ceil(1.5)
        (64, 0.0625, 0.25, 4),
    ],
)
def test_kept_channels_fraction_rounds_up(hidden: int, width: float, widest: float, kept: int) -> None:
    assert kept_channels(hidden, width, widest) == kept


@pytest.mark.parametrize("kind", get_args(Normalization))
def test_make_norm_every_kind_normalizes_its_axes(kind: Normalization) -> None:
    x = torch.randn(6, 8, 5, 5, dtype=torch.float64) * 3 + 2
    result = make_norm(kind, 8).double().train()(x).detach()
    axes = {
        "static_batch": (0, 2, 3),
        "instance": (2, 3),
        "layer": (1, 2, 3),
        "parametric": (0, 2, 3),
        "parametric_sample": (2, 3),
    }
    if kind == "none":
        assert torch.equal(result, x)
    elif kind == "group":
        grouped = result.view(6, 4, 2, 5, 5)
        assert torch.allclose(grouped.mean((2, 3, 4)), torch.zeros(6, 4).double(), atol=1e-6)
        assert torch.allclose(grouped.var((2, 3, 4), unbiased=False), torch.ones(6, 4).double(), atol=1e-4)
    elif kind.startswith("parametric"):
        assert torch.allclose(result.square().mean(axes[kind]), torch.ones(()).double(), atol=1e-6)
    else:
        assert float(result.mean(axes[kind]).abs().max()) < 1e-6
        assert torch.allclose(result.var(axes[kind], unbiased=False), torch.ones(()).double(), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 6, 8])
def test_make_norm_group_norm_fits_narrow_slices(channels: int) -> None:
    assert make_norm("group", channels)(torch.randn(2, channels, 3, 3)).shape == (2, channels, 3, 3)

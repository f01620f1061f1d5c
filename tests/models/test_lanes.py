"""Lane kernels compute what torch computes, whatever a device's block, or refuse."""

import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import Model, Outputs, StepSeeds, build_model, choose_kernels, kernels
from fedloom.models.batching import (
    FunctionalModule,
    _agree_on_gradients,
    all_shapes,
    batching_mode,
    interleave_devices,
    loop_over_devices,
    trial_batch,
    trial_inputs,
)
from fedloom.models.lanes import NoLaneKernelError, filled, lay_out
from fedloom.models.lanes.block import SPREAD
from fedloom.models.lanes.layout import ArrangedWeights
from fedloom.models.lanes.tracing import trace
from fedloom.models.layers import StaticBatchNorm
from fedloom.models.normalization import Normalization
from tests.models.block_checks import Pick, assert_block_matches_single_devices, outputs_and_gradients

pytest.importorskip("numba")

DEVICES = 3
INTERLEAVED = (
    "bottleneck",
    "columnnet",
    "convnet",
    "convnet1d",
    "lenet",
    "mlp",
    "mobilenet",
    "preactresnet",
    "preresnet",
    "splitnet",
)


def in_lanes(model: Model) -> Model:
    return replace(model, kernels="lanes")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("family", INTERLEAVED)
@pytest.mark.parametrize(
    "mode", [(True, False), (False, False), (False, True)], ids=["training", "judging", "tracking"]
)
def test_family_passes_trial_of_lane_kernels(
    family: str, mode: tuple[bool, bool], tiny_model: Callable[..., Model]
) -> None:
    assert batching_mode(in_lanes(tiny_model(family)), *mode) == (interleave_devices, ())


@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_lane_kernels_every_normalization_matches_torch(
    normalization: str,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    net = tiny_model("preresnet", width=0.5, normalization=normalization)
    block, x = block_weights(net, DEVICES), draw(DEVICES, 5, *net.input_shape)
    assert_block_matches_single_devices(in_lanes(net), block, x, True, pick_device)
    seeds = StepSeeds((1, 2, 3))
    ours, theirs = (outputs_and_gradients(one, block, x, seeds) for one in (in_lanes(net), net))
    for mine, other in zip(ours, theirs, strict=True):
        for name, tensor in other.items():
            assert float((mine[name] - tensor).abs().max()) <= 1e-10, name


def test_lane_kernels_evaluate_net_that_leaves_weights_unused(
    tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """One device with so many examples that they fill the lanes; the norm of the narrower width is not used."""
    net = tiny_model("convnet", norm_widths=(0.5, 1.0), normalization="group")
    block, x = block_weights(net, 1), draw(1, 2 * SPREAD, *net.input_shape)
    with torch.no_grad():
        found, expected = (one(block, x).logits for one in (in_lanes(net), net))
    assert float((found - expected).abs().max()) <= 1e-10


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 1)),
    dilation=st.sampled_from([1, 1, 1, 2]),
    groups=st.sampled_from([1, 2, 4]),
    widths=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    batch=st.integers(1, 6),
    bias=st.booleans(),
)
def test_convolution_any_settings_matches_torch_or_is_refused(
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], dilation: int, groups: int,
    widths: tuple[int, int], batch: int, bias: bool,
) -> None:  # fmt: skip
    assume(all(p <= k for p, k in zip(padding, kernel, strict=True)))
    before, after = (groups * width for width in widths)
    module = nn.Sequential(nn.Conv2d(before, after, kernel, stride, padding, dilation, groups, bias)).double()
    net = FunctionalModule(module, training=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in module.named_parameters()}
    x = draw(DEVICES, batch, before, 6, 5, seed=9)
    if dilation != 1:
        with pytest.raises(NoLaneKernelError, match="dilation"):
            interleave_devices(net)(weights, x)
        return
    found = []
    for run in (interleave_devices(net), loop_over_devices(net)):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        images = x.clone().requires_grad_()
        y = run(leaves, images)[0].logits
        slopes = torch.autograd.grad((y * draw(*y.shape, seed=5)).sum(), [images, *leaves.values()])
        found.append([y.detach(), *slopes])
    for mine, other in zip(*found, strict=True):
        assert mine.shape == other.shape
        assert float((mine - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = F.relu6(F.max_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, ceil_mode=False))
        return F.adaptive_avg_pool2d(F.relu(x), 1).flatten(1) / 2


class Same(nn.Module):
    """Uses one weight twice, and a map of two channels flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(2 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.classifier((x + self.conv(F.relu(x))).flatten(1))


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (1, 1)).mean((-2, -1))


class ReshapedWeight(nn.Module):
    """A weight of another shape must not be taken for the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 2, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight.view(4, 2, 4, 2)).mean((-2, -1))


class ComputedWeight(ReshapedWeight):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * 2).mean((-2, -1))


class BatchMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((0, 2, 3), keepdim=True).expand_as(x).mean((-2, -1))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1)) if bool(x.sum() > 0) else x.amax((-2, -1))


@pytest.mark.parametrize("build", [Pooling, Same])
def test_module_of_torch_layers_matches_single_devices(build: Callable[[], nn.Module]) -> None:
    model = in_lanes(build_model(build.__name__, build, {}, (2, 6, 6), 4))
    assert batching_mode(model, True, False) == (interleave_devices, ())


@pytest.mark.parametrize("build", [Padded, ReshapedWeight, ComputedWeight, BatchMean, Branching])
def test_module_without_kernels_falls_back_with_reason(build: Callable[[], nn.Module]) -> None:
    model = in_lanes(build_model(build.__name__, build, {}, (2, 6, 6), 4))
    mode, reasons = batching_mode(model, True, False)
    assert mode is not interleave_devices
    assert "cannot be interleaved" in reasons[0]
    assert "no lane kernel" in reasons[0]
    assert not model.trains_interleaved()


def test_dropout_in_training_is_not_interleaved() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(8, 4), nn.Dropout(0.5))

    model = in_lanes(build_model("dropping", build, {}, (2, 2, 2), 4))
    assert not model.trains_interleaved()


@pytest.mark.parametrize("family", ["convnet", "mobilenet"])
def test_diverged_device_is_nan_and_stays_alone(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = in_lanes(tiny_model(family))
    block, x = block_weights(net, DEVICES), draw(DEVICES, 5, *net.input_shape)
    broken = {name: tensor.clone() for name, tensor in block.items()}
    next(iter(broken.values()))[1] = torch.nan
    clean, dirty = (outputs_and_gradients(net, one, x, StepSeeds((1, 2, 3))) for one in (block, broken))
    for of_clean, of_dirty in zip(clean, dirty, strict=True):
        for name, tensor in of_clean.items():
            assert torch.equal(of_dirty[name][[0, 2]], tensor[[0, 2]])
    logits = next(tensor for name, tensor in dirty[0].items() if name.startswith("exit"))
    assert bool(logits[1].isnan().all())
    assert any(bool(tensor[1].isnan().any()) for tensor in dirty[1].values())


def test_pooled_and_clipped_nan_is_not_swallowed() -> None:
    """One pixel of one device, which batch statistics do not spread: running ones are used."""

    def build() -> nn.Module:
        return nn.Sequential(
            nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )

    net = in_lanes(build_model("pooled", build, {}, (2, 4, 4), 2))
    weights = {
        name: torch.ones(2, *shape, dtype=torch.float64) for name, shape in {**net.shapes(), **net.statistics()}.items()
    }
    for pixel in ((0, 0), (0, 1), (1, 0), (1, 1)):
        x = draw(2, 2, 2, 4, 4)
        x[1, 0, 1, pixel[0], pixel[1]] = torch.nan
        logits = net(weights, x).logits
        assert bool(logits[1, 0, 1].isnan())
        assert int(logits.isnan().sum()) == 1


def block_gradients(net: Model, weights: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return outputs_and_gradients(net, weights, x, StepSeeds(tuple(range(len(x)))))


def assert_same_bits_in_blocks(net: Model, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """The devices of a block of sixteen, in other blocks and places."""
    weights = {name: draw(16, *shape, seed=n).to(dtype) / 3 for n, (name, shape) in enumerate(net.shapes().items())}
    x = draw(16, 5, *net.input_shape).to(dtype)
    full = block_gradients(net, weights, x)
    for size in sizes:
        chosen = torch.arange(16).flip(0)[:size]
        part = block_gradients(net, {name: tensor[chosen] for name, tensor in weights.items()}, x[chosen])
        for of_full, of_part in zip(full, part, strict=True):
            for name, tensor in of_part.items():
                assert torch.equal(tensor, of_full[name][chosen]), (size, name)


def test_gradients_do_not_depend_on_block(tiny_model: Callable[..., Model]) -> None:
    assert_same_bits_in_blocks(in_lanes(tiny_model("convnet")), torch.float64, (3, 8))


@pytest.mark.slow
@pytest.mark.parametrize("family", INTERLEAVED)
def test_gradients_of_any_family_do_not_depend_on_block(family: str, tiny_model: Callable[..., Model]) -> None:
    """Single precision, and all widths of vectors."""
    torch.set_default_dtype(torch.float32)
    assert_same_bits_in_blocks(in_lanes(tiny_model(family)), torch.float32, (1, 2, 3, 5, 7, 8, 12))


@pytest.mark.parametrize("normalization", ["static_batch", "group", "parametric"])
def test_examples_of_single_device_in_lanes_have_same_bits(
    normalization: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """Without gradients they are spread over sixteen lanes where they do not depend on each other."""
    net = in_lanes(tiny_model("convnet", normalization=normalization))
    statistics = {name: torch.rand(1, *shape, dtype=torch.float64) + 0.5 for name, shape in net.statistics().items()}
    weights, x = {**block_weights(net, 1), **statistics}, draw(1, 33, *net.input_shape)
    with torch.no_grad():
        spread = net(weights, x).logits
    assert torch.equal(spread, net(weights, x).logits.detach())
    assert spread.shape == (1, 33, 4)


def test_weights_lie_in_one_piece_and_keep_their_values() -> None:
    weights = {"b": draw(4, 3, 2, 3, 3), "a": draw(4, 3), "c": draw(4, 5, 2)}
    laid = lay_out(weights)
    assert list(laid) == list(weights)
    assert all(torch.equal(laid[name], weight) for name, weight in weights.items())
    assert all(tensor.stride(0) == 1 for tensor in laid.values())
    assert [laid[name].storage_offset() for name in "abc"] == [0, 12, 12 + 216]


def test_device_of_a_block_in_lanes_reads_its_own_weights(
    tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """Its strides are those of the block, and of as many lanes as its examples are spread over."""
    net = in_lanes(tiny_model("convnet", normalization="group"))
    weights, x = block_weights(net, SPREAD), draw(1, 2 * SPREAD, *net.input_shape)
    block = lay_out(weights)
    with torch.no_grad():
        for k in (0, SPREAD - 1):
            own, part = ({name: one[k : k + 1] for name, one in each.items()} for each in (weights, block))
            assert torch.equal(net(part, x).logits, net({name: one.clone() for name, one in own.items()}, x).logits)


def test_arranged_weights_are_kept_as_long_as_the_weights() -> None:
    arranged, weights = ArrangedWeights(), [draw(2, 3, 4)]
    found, derived = arranged.find(weights, [(2, 3, 4)])
    derived["of them"] = draw(1)
    again, same = arranged.find(weights, [(2, 3, 4)])
    assert again[0] is found[0] and same is derived
    memory = weakref.ref(found[0])
    del found, again
    weights.clear()
    assert memory() is None
    assert arranged.find([draw(2, 3, 4)], [(2, 3, 4)])[1] == {}


@pytest.mark.parametrize(("devices", "whole"), [(1, 1), (2, 2), (3, 4), (5, 8), (16, 16), (17, 32), (40, 48)])
def test_filled_is_next_number_of_whole_vectors(devices: int, whole: int) -> None:
    assert filled(devices) == whole


def test_auto_chooses_lanes_for_large_nets_where_numba_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.models.convnet import convnet

    large, small = (build_model("convnet", convnet, {"hidden": (size,) * 2}, (1, 28, 28), 10) for size in (16, 2))
    assert (choose_kernels("auto", large), choose_kernels("auto", small)) == ("lanes", "torch")
    assert (choose_kernels("torch", large), choose_kernels("lanes", small)) == ("torch", "lanes")
    monkeypatch.setattr(kernels, "is_available", lambda: False)
    assert choose_kernels("auto", large) == "torch"


def test_kernel_without_cache_folder_is_compiled_anyway(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from fedloom.models.lanes import vectors

    def no_folder(function: Any) -> Any:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(vectors, "KernelCache", no_folder)
    vectors._announce.cache_clear()

    def double(number):  # type: ignore[no-untyped-def]
        return 2 * number

    double.__module__ = vectors.__name__
    with caplog.at_level(logging.INFO):
        assert vectors.kernel(double)(3) == 6
    assert caplog.messages == ["compiling kernels for this processor; it takes some seconds, and only the first time"]


def test_kernels_on_disk_are_not_used_if_what_they_are_made_of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedloom.models.lanes import vectors

    kernel = vectors.kernel(lambda number: 2 * number)
    codegen = kernel.targetctx.codegen()
    before = kernel._cache._index_key((), codegen)
    assert before == kernel._cache._index_key((), codegen)
    monkeypatch.setattr(vectors, "REVISION", "another")
    assert before != kernel._cache._index_key((), codegen)


@pytest.mark.slow
def test_processor_without_wide_vectors_gives_same_bits() -> None:
    """As compiled for AVX2; its kernels have other tiles, and the same order of sums."""
    code = (
        "import torch; from dataclasses import replace; from fedloom.models import StepSeeds;"
        "from fedloom.models.lanes.vectors import vector_bytes; from fedloom.testing import tiny_model;"
        "from fedloom.tensors import fingerprint; from tests.models.block_checks import outputs_and_gradients;"
        "torch.set_default_dtype(torch.float32);"
        "net = replace(tiny_model('mobilenet', normalization='static_batch'), kernels='lanes');"
        "draw = torch.Generator().manual_seed(0);"
        "w = {n: torch.rand(8, *s, generator=draw) - 0.4 for n, s in net.shapes().items()};"
        "x = torch.rand(8, 5, *net.input_shape, generator=draw);"
        "found = outputs_and_gradients(net, w, x, StepSeeds(tuple(range(8)))); assert net.trains_interleaved();"
        "print(vector_bytes(), fingerprint({'outputs': found[0], 'gradients': found[1]}))"
    )
    found = []
    for name in ("host", "haswell"):
        features = {} if name == "host" else {"NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+sse4.2", "NUMBA_CPU_NAME": name}
        made = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **features}, capture_output=True, text=True, check=True
        )
        found.append(made.stdout.split())
    assert found[1][0] == "32"
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(devices=st.sampled_from([1, 2, 4, 8, 16]), taps=st.integers(1, 3), sizes=st.tuples(*[st.integers(1, 40)] * 2))
@settings(max_examples=40, deadline=None)
def test_swap_kernel_any_size_swaps_inputs_and_outputs(
    dtype: torch.dtype, devices: int, taps: int, sizes: tuple[int, int]
) -> None:
    from fedloom.models.lanes.convolution import lane_count, swap_kernel

    weight = draw(taps, *sizes, devices).to(dtype)
    found, bits = torch.full((taps, *sizes[::-1], devices), torch.nan, dtype=dtype), torch.finfo(dtype).bits
    swap_kernel(lane_count(bits), bits, devices)(weight.data_ptr(), found.data_ptr(), taps, *sizes)
    torch.testing.assert_close(found, weight.transpose(1, 2), rtol=0, atol=0)


@pytest.mark.parametrize("settings_of", [{}, {"bias": False}, {"elementwise_affine": False}])
def test_layer_norm_of_features_matches_torch(settings_of: dict[str, bool]) -> None:
    module = nn.Sequential(nn.Linear(7, 6), nn.LayerNorm(6, **settings_of), nn.ReLU(), nn.Linear(6, 3)).double()
    net = FunctionalModule(module, training=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in module.named_parameters()}
    found = []
    for run in (interleave_devices(net), loop_over_devices(net)):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        y = run(leaves, draw(DEVICES, 5, 7, seed=9))[0].logits
        slopes = torch.autograd.grad((y * draw(*y.shape, seed=5)).sum(), list(leaves.values()))
        found.append([y.detach(), *slopes])
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


def test_layer_norm_of_flattened_maps_is_refused() -> None:
    """Memory has another order than the weights of such a norm."""
    module = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Flatten(), nn.LayerNorm(8)).double()
    weights = {name: draw(DEVICES, *w.shape) for name, w in module.named_parameters()}
    with pytest.raises(NoLaneKernelError, match="layer norm"):
        interleave_devices(FunctionalModule(module, training=True))(weights, draw(DEVICES, 5, 1, 2, 2))


class Sums(nn.Module):
    """A convolution's result that is added to something, and is read again or not: by itself, or by another name."""

    def __init__(self, again: str):
        super().__init__()
        self.again, self.first, self.second = again, nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(torch.relu(x))
        other = y.clone() if self.again == "copied" else y
        found = y + x
        return (found if self.again == "no" else found + other).flatten(1)


@pytest.mark.parametrize("again", ["no", "itself", "copied"])
@pytest.mark.parametrize("trains", [True, False])
def test_sum_in_memory_of_convolution_matches_torch(again: str, trains: bool) -> None:
    module = Sums(again).double()
    net = FunctionalModule(module, training=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in module.named_parameters()}
    found = []
    for run in (interleave_devices(net), loop_over_devices(net)):
        leaves = {name: weight.clone().requires_grad_(trains) for name, weight in weights.items()}
        y = run(leaves, draw(DEVICES, 4, 1, 3, 3, seed=9))[0].logits
        slopes = torch.autograd.grad(y.square().sum(), list(leaves.values())) if trains else ()
        found.append([y.detach(), *slopes])
    for mine, other in zip(*found, strict=True):
        assert float((mine - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


class Detaching(nn.Module):
    """What is detached is read elsewhere too, is an output, or is the only way to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.first, self.second = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 2, 1)
        self.early, self.late = nn.Linear(2, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Outputs:
        maps = F.relu(self.first(x)) + F.relu(self.cut(x)).detach()
        early = self.early(maps.mean((2, 3)))
        late = self.late(F.relu(self.second(maps.detach()) + maps).mean((2, 3)))
        return Outputs({"early": early, "late": early.detach() + late}, {})


@pytest.mark.parametrize("exits", [("early", "late"), ("late",)])
def test_detached_activation_gets_no_gradient_and_equals_torch(exits: tuple[str, ...]) -> None:
    module = Detaching().double()
    net = FunctionalModule(module, training=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in module.named_parameters()}
    found = []
    for run in (interleave_devices(net), loop_over_devices(net)):
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        made = run(leaves, draw(DEVICES, 4, 1, 3, 3, seed=9))[0].exits
        total = torch.stack([made[name].square().sum() for name in exits]).sum()
        slopes = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        found.append({**{name: y.detach() for name, y in made.items()}, **dict(zip(leaves, slopes, strict=True))})
    for name, tensor in found[1].items():
        assert float((found[0][name] - tensor).abs().max()) <= 1e-12 * max(1.0, float(tensor.abs().max())), name
    reached = {name for name in weights if bool(found[0][name].any())}
    unreached = {"cut.weight", "cut.bias"} | ({"early.weight", "early.bias"} if exits == ("late",) else set())
    assert reached == weights.keys() - unreached


class Crossed(nn.Module):
    """Its norms run in another order than they are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = StaticBatchNorm(2), StaticBatchNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x))).mean((2, 3))


def test_tracked_statistics_are_in_the_order_of_the_module() -> None:
    net = FunctionalModule(Crossed().double(), training=False, tracking=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in net.module.named_parameters()}
    found, expected = (
        run(weights, draw(DEVICES, 4, 2, 3, 3))[1] for run in (interleave_devices(net), loop_over_devices(net))
    )
    assert list(found) == list(expected)
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-12) for name, tensor in expected.items())


class BranchingOnBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y + y if len(x) > 3 else y


@pytest.mark.parametrize("batch", [2, 8])
def test_lanes_net_that_depends_on_number_of_examples_matches_torch(batch: int) -> None:
    """Only nets of known layers are recorded with fewer examples; here an unknown one is inside of a known one."""
    module = nn.Sequential(nn.Linear(5, 4), BranchingOnBatch()).double()
    net = FunctionalModule(module, training=True)
    weights = {name: draw(DEVICES, *w.shape, seed=len(name)) for name, w in module.named_parameters()}
    x = draw(DEVICES, batch, 5, seed=9)
    found, expected = (run(weights, x)[0].logits for run in (interleave_devices(net), loop_over_devices(net)))
    assert float((found - expected).abs().max()) <= 1e-12


@pytest.mark.parametrize("family", INTERLEAVED)
@pytest.mark.parametrize("mode", [(True, False), (False, False), (False, True)])
def test_trace_of_sizes_is_that_of_numbers(
    family: str, mode: tuple[bool, bool], tiny_model: Callable[..., Model]
) -> None:
    model = tiny_model(family)
    module = FunctionalModule(model.module(), *mode)
    weights, x = trial_batch(all_shapes(model), trial_inputs(model), torch.get_default_dtype())
    own = {name: weight[0] for name, weight in weights.items()}
    by_numbers, by_sizes = (trace(module, module.module, own, x[0], only) for only in (False, True))
    assert by_sizes == by_numbers


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2), (7, 2)])
@pytest.mark.parametrize("channels", [3, 20, 70])
def test_depthwise_convolution_of_wide_maps_matches_torch(channels: int, taps: int, stride: int, devices: int) -> None:
    """Where several taps are summed up together, and their edges."""
    layer = nn.Conv2d(channels, channels, taps, stride, taps // 2, groups=channels).double()
    module = FunctionalModule(layer, True)
    shapes = {name: weight.shape for name, weight in layer.named_parameters()}
    inputs = draw(devices, 2, channels, 15, 14)
    assert _agree_on_gradients(interleave_devices(module), module, shapes, inputs)


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
@pytest.mark.parametrize("columns", [1, 16, 40, 200])
def test_moments_of_columns_match_torch(rows: int, columns: int) -> None:
    from fedloom.models.lanes.columns import moments, moments_across
    from fedloom.models.lanes.convolution import lane_count

    lanes = lane_count(64)
    x = draw(2, rows, columns) + 100
    mean, variance = torch.empty(2, columns).double(), torch.empty(2, columns).double()
    kernel = moments(lanes, 64, moments_across(columns, lanes))
    kernel(x.data_ptr(), mean.data_ptr(), variance.data_ptr(), 2, rows, columns)
    assert torch.allclose(mean, x.mean(1), atol=1e-12)
    assert torch.allclose(variance, x.var(1, unbiased=False), atol=1e-12)

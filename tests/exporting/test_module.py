"""An export module computes what the model computes, for every family and size."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom.data import PREPARATIONS, Preparation
from fedloom.exporting import (
    FORMATS,
    ExportModule,
    as_predictor,
    build_empty_module,
    build_export_module,
    build_preparation,
)
from fedloom.exporting.fusion import BATCH_NORM, find_fusable
from fedloom.models import MODELS, Model, Scaler, build_model
from fedloom.testing import tiny_model as build_tiny
from fedloom.testing.world import SMALLER_SETTINGS as LESSER
from tests.conftest import TOKENS

SIZES = {"large": 1.0, "medium": 0.6, "small": 0.3}
IMAGE = (1, 12, 12)
EVERY = [(family, size) for family in sorted(MODELS) for size in SIZES]


def sized(family: str, size: str, **changes: Any) -> Model:
    lesser = LESSER.get(family, {}) if size == "small" else {}
    return build_tiny(family, IMAGE, width=SIZES[size], **{**lesser, **changes})


def trained(net: Model, seed: int = 1) -> dict[str, Tensor]:
    """Random weights and statistics."""
    draw = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=draw) / 2 for name, shape in net.shapes().items()}
    for name, shape in net.statistics().items():
        weights[name] = torch.rand(shape, generator=draw) + 0.5 if name.endswith("var") else torch.randn(shape)
    return weights


def difference(net: Model, weights: dict[str, Tensor], result: Any, batch: int, one_by_one: bool = False) -> float:
    """Relative to the largest logit if that is above 1."""
    x, right = net.random_inputs(torch.Generator().manual_seed(batch), batch), as_predictor(net, weights)
    with torch.no_grad():
        expected = torch.cat([right(one) for one in x.split(1)]) if one_by_one else right(x)
        return float((result(x) - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("family", "size"), EVERY)
def test_export_module_every_family_and_size_matches_model(family: str, size: str) -> None:
    net = sized(family, size)
    weights = trained(net)
    result = build_export_module(net, weights)
    assert max(difference(net, weights, result, batch) for batch in (1, 3)) <= 1e-5
    assert not any(isinstance(part, Scaler) for part in result.modules())


def normalized() -> Iterator[tuple[str, str]]:
    for family, build in sorted(MODELS.items()):
        if "normalization" in inspect.signature(build).parameters:
            yield from ((family, kind) for kind in ("static_batch", "group", "parametric", "none"))


@pytest.mark.parametrize(("family", "kind"), list(normalized()))
def test_export_module_every_normalization_matches_model(family: str, kind: str) -> None:
    net = sized(family, "medium", normalization=kind)
    weights = trained(net)
    assert difference(net, weights, build_export_module(net, weights), 3) <= 1e-5


@pytest.mark.parametrize("family", sorted({family for family, kind in normalized() if kind == "static_batch"}))
def test_fusion_batch_norm_after_layer_is_fused(family: str) -> None:
    net = sized(family, "large", normalization="static_batch")
    left = [
        name
        for name, part in build_export_module(net, trained(net)).net.named_modules()
        if isinstance(part, BATCH_NORM)
    ]
    assert len(find_fusable(net)) + len(left) == len(net.statistics()) // 2
    follows_sum = family in ("columnnet", "preresnet", "preactresnet")  # one of whose norms does
    assert bool(left) == follows_sum
    assert find_fusable(net)


class Shared(nn.Module):
    """A convolution used twice, one with shared weights, and a norm used twice."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.seen, self.norm = nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.second.weight = self.first.weight
        self.first_norm, self.twice = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        self.last, self.last_norm, self.head = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Linear(3, classes)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen(x)
        x = torch.relu(self.norm(seen)) + seen
        x = torch.relu(self.first_norm(self.first(x)))
        x = torch.relu(self.twice(self.second(x)))
        x = torch.relu(self.twice(x))
        return self.head(self.last_norm(self.last(x)).mean((-2, -1)))


def test_fusion_layer_with_other_uses_is_not_fused() -> None:
    net = build_model("shared", lambda classes: Shared(classes), {}, (1, 4, 4), 5)
    assert find_fusable(net) == (("last", "last_norm"),)
    weights = trained(net)
    assert difference(net, weights, build_export_module(net, weights), 3) <= 1e-5


def test_fusion_reused_block_is_fused_once() -> None:
    net = sized("splitnet", "large", extra=(3, 0), tied=True)
    weights = trained(net)
    result = build_export_module(net, weights)
    assert difference(net, weights, result, 3) <= 1e-5
    assert not any(isinstance(part, BATCH_NORM) for part in result.modules())


def test_export_module_norms_of_other_widths_are_removed() -> None:
    net = sized("convnet", "large", norm_widths=(0.5, 1.0))
    weights = trained(net)
    result = build_export_module(net, weights)
    assert difference(net, weights, result, 3) <= 1e-5
    assert sum(one.numel() for one in result.parameters()) < sum(shape.numel() for shape in net.shapes().values())


def test_export_module_without_statistics_raises() -> None:
    net = sized("convnet", "large")
    with pytest.raises(ValueError, match="running_mean"):
        build_export_module(net, net.initial_weights(0))


def images() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every preparation, with images of as many channels as it has means."""
    for name, prepare in sorted(PREPARATIONS.items()):
        for shape in ((1, 28, 28), (3, 28, 28), (3, 40, 36)):
            colours = prepare.channels if prepare.channels and shape[0] == 1 else shape[0]
            if len(prepare.mean) in (0, colours) or (len(prepare.mean) == shape[0] == 1):
                yield name, shape


@pytest.mark.parametrize(("name", "shape"), list(images()))
def test_preparation_module_matches_preparation(name: str, shape: tuple[int, ...]) -> None:
    prepare = PREPARATIONS[name]
    x = torch.randint(0, 256, (4, *shape), dtype=torch.uint8)
    assert torch.allclose(build_preparation(prepare, x)(x), prepare(x), atol=2e-6)


def test_preparation_module_floats_and_tokens_need_less() -> None:
    numbers, tokens = torch.rand(3, 7), torch.arange(12).view(3, 4)
    assert torch.equal(build_preparation(Preparation(), numbers)(numbers), numbers)
    assert torch.equal(build_preparation(Preparation(), tokens)(tokens), tokens)


@pytest.mark.parametrize("shape", [(3,), (3, 7), (3, 5, 6), (3, 2, 5, 6)])
def test_preparation_module_normalizes_examples_of_any_axes(shape: tuple[int, ...]) -> None:
    prepare = Preparation((0.5, 0.1, 0.0), (0.2, 1.0, 3.0)).for_shape(shape)
    x = torch.rand(4, *shape)
    module = build_preparation(prepare, x)
    assert torch.allclose(module(x), prepare(x), atol=1e-6)
    assert not torch.allclose(module(x), x)
    assert module.steps == ("normalization",)


def test_preparation_module_steps_are_those_inside() -> None:
    x = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    everything = build_preparation(PREPARATIONS["fedsup_fashion"], x).steps
    assert everything == ("division by 255", "resizing", "repeating of gray to 3 channels", "normalization")
    assert build_preparation(Preparation(), x).steps == ("division by 255",)
    assert build_preparation(Preparation(), x.float()).steps == ()


@pytest.mark.parametrize("family", ["convnet", "mlp"])
def test_onnx_file_matches_model(family: str, tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    check_format("onnx", sized(family, "small"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "pt2", "onnx", "executorch"])
@pytest.mark.parametrize(("family", "size"), EVERY)
def test_format_every_family_and_size_matches_model(family: str, size: str, to: str, tmp_path: Any) -> None:
    for module in FORMATS[to].needs:
        pytest.importorskip(module)
    check_format(to, sized(family, size), tmp_path)


def check_format(to: str, net: Model, folder: Any) -> None:
    weights, kind = trained(net), FORMATS[to]
    file = folder / f"model{kind.suffix}"
    kind.write(build_export_module(net, weights), net.random_inputs(torch.Generator().manual_seed(0), 2), file)
    answer = kind.open(file, lambda: build_empty_module(net))
    for batch in (1, 3, 7):
        assert difference(net, weights, answer, batch, kind.one_at_a_time) <= 1e-5


def test_format_file_does_not_contain_machine_paths(tmp_path: Any) -> None:
    pytest.importorskip("onnxruntime")
    net = sized("convnet", "small")
    for to in ("onnx", "pt2"):
        file = tmp_path / f"model{FORMATS[to].suffix}"
        FORMATS[to].write(build_export_module(net, trained(net)), net.random_inputs(torch.Generator(), 2), file)
        assert __file__.encode() not in file.read_bytes()
        assert b"site-packages" not in file.read_bytes()


def test_safetensors_file_loads_as_frozen_module(tmp_path: Any) -> None:
    net = sized("lstm", "small")
    assert "lstm" in TOKENS
    FORMATS["safetensors"].write(
        build_export_module(net, trained(net)), net.zero_inputs(2), tmp_path / "model.safetensors"
    )
    result = FORMATS["safetensors"].open(tmp_path / "model.safetensors", lambda: build_empty_module(net))
    assert isinstance(result, ExportModule)
    assert not any(weight.requires_grad for weight in result.parameters())
    assert not result.training

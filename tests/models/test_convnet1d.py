"""The net for time series: shapes, slices and the lengths it takes."""

from typing import Any

import pytest
import torch

from fedloom.data import as_dataset
from fedloom.models import MODELS, Model, build_model
from fedloom.testing import TinyWorld
from tests.conftest import build_method


def build(width: float = 1.0, shape: tuple[int, ...] = (9, 128), **settings: Any) -> Model:
    return build_model("convnet1d", MODELS["convnet1d"], {"width": width, **settings}, shape, 6)


def test_convnet1d_has_the_expected_weights() -> None:
    shapes = build().shapes()
    assert tuple(shapes["blocks.0.0.weight"]) == (64, 9, 5)
    assert tuple(shapes["classifier.weight"]) == (6, 128)
    assert tuple(build(0.25).shapes()["blocks.1.0.weight"]) == (32, 16, 5)


def test_convnet1d_matches_convolutions_by_hand() -> None:
    net = build(hidden=(3, 4), kernel=3, normalization="none", shape=(2, 11))
    module = net.module()
    x = torch.randn(5, 2, 11)
    first, second = (module.get_submodule(f"blocks.{n}.0") for n in range(2))
    hidden = second(torch.nn.functional.max_pool1d(first(x).relu(), 2)).relu()
    assert torch.allclose(module(x).logits, module.get_submodule("classifier")(hidden.mean(-1)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": (1, 28, 28)}, r"it needs time series \[channels, length\], .* \(1, 28, 28\)"),
        ({"shape": (561,)}, "it needs time series"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"shape": (2, 3)}, "3 convolutions need a length of at least 4, not 3"),
    ],
)
def test_convnet1d_what_it_cannot_take_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings).module()


@pytest.mark.parametrize("name", ["heterofl", "fedrolex", "fjord", "fedavg"])
def test_convnet1d_trains_with_nested_methods(name: str) -> None:
    chosen = build_method(name)
    world = TinyWorld.make("convnet1d", widths=(1.0,) if name == "fedavg" else (1.0, 0.5))
    server = world.play(chosen, world.engine(chosen), rounds=1)
    assert world.refusals == [] and torch.isfinite(server["weights"]["classifier.weight"]).all()


def test_convnet_does_not_take_a_batch_of_series_for_an_image() -> None:
    """Two series of two channels have the axes of one image with two channels."""
    net = build_model("convnet", MODELS["convnet"], {"hidden": (4,), "normalization": "none"}, (2, 16), 6)
    with pytest.raises(ValueError, match=r"a batch of examples of shape \(2, 16\) for a single example: .* \(6,\)"):
        net.check_output_size()


def test_mlp_takes_rows() -> None:
    data = as_dataset((torch.randn(30, 7), torch.arange(30) % 3), normalize=True)
    net = build_model("mlp", MODELS["mlp"], {"hidden": (5,)}, data.input_shape, 3)
    assert net.module()(data.preparation(data.train.x)).logits.shape == (24, 3)

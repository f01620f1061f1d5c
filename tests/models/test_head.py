"""The common head: norm, activation, pooling to cells, classifier; the same at every exit and width of every family."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import fedloom
from fedloom.engines.task_ref import device_from_json, device_to_json
from fedloom.fleet import Fleet, make_nested_tiers
from fedloom.footprints import find_footprint
from fedloom.footprints.footprint import rolling
from fedloom.methods import METHODS
from fedloom.models import MODELS, Model, build_model, compute_cost
from fedloom.models.layers import pool, pool_to_cells
from fedloom.recipe.errors import RecipeError
from fedloom.settings import FrozenDict
from tests.models.block_checks import Pick, assert_block_matches_single_devices

IMAGE, CLASSES = (1, 24, 24), 5
FAMILIES: dict[str, dict[str, Any]] = {
    "bottleneck": {"stem": 4, "planes": (2, 3), "blocks": (1, 1)},
    "convnet": {"hidden": (4, 6)},
    "lenet": {"convs": (4, 6), "kernels": (3, 3)},
    "mobilenet": {"stem": 4, "widths": (4, 6), "depths": (1, 1), "kernels": (3, 5), "normalization": "static_batch"},
    "preactresnet": {"hidden": (4, 6), "blocks": (1, 1), "exit_after": 1, "normalization": "static_batch"},
    "preresnet": {"hidden": (4, 6), "blocks": (1, 1)},
    "splitnet": {"channels": 2, "extra": (1, 1)},
}
NETS = [(name, {}) for name in FAMILIES] + [("splitnet", {"pool": "classifier"})]


def net_of(family: str, cells: int | None = 2, **changes: Any) -> Model:
    head = None if cells is None else FrozenDict(cells=cells)
    settings = {**FAMILIES[family], **({} if head is None else {"head": head}), **changes}
    return build_model(family, MODELS[family], settings, IMAGE, CLASSES)


def with_statistics(net: Model, block: dict[str, Tensor]) -> dict[str, Tensor]:
    devices = len(next(iter(block.values())))
    drawn = {name: torch.rand(devices, *shape, dtype=torch.float64) + 0.5 for name, shape in net.statistics().items()}
    return {**block, **drawn}


def test_every_image_family_has_the_head() -> None:
    """Of the others, some take tokens, and a perceptron has no map to pool.

    A net of columns has no narrow sizes: `test_columnnet.py` has its head.
    """
    assert {name for name, build in MODELS.items() if "head" in build.__annotations__} == {*FAMILIES, "columnnet"}


@pytest.mark.parametrize(("family", "changes"), NETS)
def test_head_narrow_net_is_the_wide_one_with_the_rest_zeroed(
    family: str, changes: dict[str, Any], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """The proof that a slice takes, for every cell, the leading channels."""
    wide, narrow = net_of(family, **changes), net_of(family, width=0.5, **changes)
    shapes = {**narrow.shapes(), **narrow.statistics()}
    footprint = find_footprint(shapes, {**wide.shapes(), **wide.statistics()})
    weights = with_statistics(wide, block_weights(wide, 1))
    part, x = footprint.read(weights), torch.randn(1, 3, *IMAGE, dtype=torch.float64)
    empty = {name: weights[name] if name in wide.statistics() else torch.zeros_like(weights[name]) for name in weights}
    first = [{name: tensor[0] for name, tensor in block.items()} for block in (empty, part)]
    zeroed = {name: tensor.unsqueeze(0) for name, tensor in footprint.write(*first).items()}
    small, large = narrow(part, x), wide(zeroed, x)
    assert small.exits.keys() == large.exits.keys()
    for name, logits in small.exits.items():
        assert torch.allclose(logits, large.exits[name], atol=1e-12)
    assert float(small.logits.std()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_head_classifier_slices_take_whole_channels(family: str) -> None:
    wide, narrow = net_of(family), net_of(family, width=0.5)
    name = narrow.label_rows()[-2]
    classes, channels, *cells = wide.shapes()[name]
    kept = narrow.shapes()[name][1]
    assert (classes, cells) == (CLASSES, [2, 2])
    assert kept < channels
    weights = {**wide.initial_weights(0), name: torch.arange(channels).view(1, -1, 1, 1).expand(CLASSES, -1, 2, 2)}
    leading = find_footprint(narrow.shapes(), wide.shapes()).read(weights)[name]
    assert leading.unique().tolist() == list(range(kept))
    assert tuple(leading.shape) == (CLASSES, kept, 2, 2)
    window = find_footprint(narrow.shapes(), wide.shapes(), rolling(channels - 1)).read(weights)[name]
    assert window[0, :, 0, 1].tolist() == [(channels - 1 + offset) % channels for offset in range(kept)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("family", "changes"), NETS)
def test_head_block_matches_single_devices(
    family: str,
    changes: dict[str, Any],
    training: bool,
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    net = net_of(family, **changes)
    block = with_statistics(net, block_weights(net, 3))
    assert net.fallback_reasons() == ()
    x = torch.randn(3, 4, *IMAGE, dtype=torch.float64)
    assert_block_matches_single_devices(net, block, x, training, pick_device)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cells", [1, 3])
def test_head_features_are_the_cells_of_the_last_map(family: str, cells: int) -> None:
    net, published = net_of(family, cells), net_of(family, None)
    name = net.label_rows()[-2]
    assert net.feature_width() == cells**2 * net.shapes()[name][1]
    assert net.head() == published.head()  # the classifier has its name
    features = net.feature_width() * CLASSES
    assert compute_cost(net).macs >= features
    if family in ("convnet", "preresnet", "bottleneck", "splitnet"):  # the published net, but for the pooling
        extra = features - published.feature_width() * CLASSES
        assert compute_cost(net).macs - compute_cost(published).macs == extra
        assert compute_cost(net).parameters - compute_cost(published).parameters == extra


def test_head_one_cell_is_the_published_mean(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    one, published = net_of("convnet", 1), net_of("convnet", None)
    block = with_statistics(published, block_weights(published, 2))
    x = torch.randn(2, 3, *IMAGE, dtype=torch.float64)
    reshaped = {**block, "classifier.weight": block["classifier.weight"][..., None, None]}
    assert torch.allclose(one(reshaped, x).logits, published(block, x).logits, atol=1e-12)


def test_head_is_the_same_at_the_exit_and_the_end(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    deep, simple = net_of("preactresnet"), net_of("preactresnet", stages=1)
    shapes = {name: tuple(shape) for name, shape in deep.shapes().items()}
    assert (shapes["exit.classifier.weight"], shapes["classifier.weight"]) == ((5, 4, 2, 2), (5, 6, 2, 2))
    assert (shapes["exit.norm.1.weight"], shapes["norm.1.weight"]) == ((4,), (6,))
    assert "exit.pool.maximum" not in shapes
    assert simple.shapes().items() <= deep.shapes().items()
    weights, x = with_statistics(deep, block_weights(deep, 1)), torch.randn(1, 3, *IMAGE, dtype=torch.float64)
    part = {name: weights[name] for name in {**simple.shapes(), **simple.statistics()}}
    assert torch.equal(simple(part, x).logits, deep(weights, x).exits["exit"])


@pytest.mark.parametrize(("family", "norm"), [("preactresnet", "norm.1"), ("mobilenet", "norm.1")])
def test_head_normalizes_maps_that_their_paper_does_not(family: str, norm: str) -> None:
    assert f"{norm}.weight" in net_of(family).shapes()
    assert f"{norm}.weight" not in net_of(family, None).shapes()


@given(side=st.integers(1, 20), cells=st.integers(1, 6))
def test_pool_to_cells_windows_are_equal_and_cover_the_map(side: int, cells: int) -> None:
    if cells > side:
        with pytest.raises(ValueError, match=f"a map of {side} x {side} cannot be pooled to {cells} x {cells} cells"):
            pool_to_cells(torch.zeros(1, 1, side, side), cells)
        return
    rows = torch.eye(side, dtype=torch.float64).view(side, 1, side, 1).expand(-1, -1, -1, side)
    seen = pool_to_cells(rows, cells)[:, 0, :, 0]  # [row, cell]: what a row counts in a cell
    sizes = (seen > 0).sum(0)
    assert len(set(sizes.tolist())) == 1
    assert bool((seen.sum(1) > 0).all())
    assert torch.allclose(seen.sum(0), torch.ones(cells, dtype=torch.float64))
    assert all(int(a.nonzero()[0]) < int(b.nonzero()[0]) for a, b in pairwise(seen.T))
    if side % cells == 0 or (side, cells) == (7, 3):
        x = torch.randn(2, 3, side, side, dtype=torch.float64)
        assert torch.allclose(pool_to_cells(x, cells), F.adaptive_avg_pool2d(x, cells))


def test_pool_without_cells_is_the_mean() -> None:
    x = torch.randn(2, 3, 4, 6)
    assert torch.equal(pool(x, None), x.mean((-2, -1)))
    assert tuple(pool(x, 2).shape) == (2, 12)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["onnx", "pt2", "safetensors"])
def test_head_exported_model_agrees(to: str, tmp_path: Path) -> None:
    recipe = {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": 4, "max_examples": 6, "test_examples": 20},
        "model": {"family": "convnet", "hidden": [4, 6], "head": {"cells": 3}},
        "tiers": TWO_TIERS,
        "method": {"name": "heterofl"},
    }
    fedloom.run(recipe, out=tmp_path / "run")
    made = fedloom.export(tmp_path / "run", to, tier="small", out=tmp_path / "exported")
    assert made.card["parity"]["difference"] <= 1e-5


def test_head_setting_survives_json() -> None:
    """A worker process and a real device get the settings of their model as JSON."""
    tiers = make_nested_tiers([("a", net_of("convnet")), ("b", net_of("convnet", width=0.5))])
    fleet = Fleet(tiers, (0.5, 0.5), 2, 0)
    for device in fleet.devices(1):
        again = device_from_json(json.loads(json.dumps(device_to_json(device))), fleet)
        assert again.model == device.model
        assert hash(again.model) == hash(device.model)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"cell": 3}, "must be one of cells"),
        ({"cells": 0}, "cells must be >= 1"),
        ({}, "head needs at least 1"),
        (3, "head must be a table"),
        ({"cells": 5}, "a map of 4 x 4 cannot be pooled to 5 x 5 cells"),
    ],
)
def test_head_wrong_setting_is_refused(head: Any, message: str) -> None:
    recipe = {
        "rounds": 1,
        "method": {"name": "fedavg"},
        "data": {"dataset": "digits", "devices": 2},
        "model": {"family": "convnet", "hidden": [4, 4], "head": head},
        "tiers": [{"name": "all", "share": 1.0}],
    }
    with pytest.raises(RecipeError, match=message):
        fedloom.check(recipe)


def test_head_fedgkt_server_ends_as_its_devices_do() -> None:
    method = METHODS["fedgkt"](server_planes=(2,), server_blocks=(1,))
    assert tuple(method.server_model(net_of("bottleneck")).shapes()["classifier.weight"]) == (CLASSES, 8, 2, 2)
    assert tuple(method.server_model(net_of("bottleneck", None)).shapes()["classifier.weight"]) == (CLASSES, 8)


TWO_TIERS = [{"name": "large", "share": 0.5, "width": 1.0}, {"name": "small", "share": 0.5, "width": 0.5}]
RUNS: dict[str, dict[str, Any]] = {
    "heterofl": {"model": {"family": "convnet", "hidden": [4, 6]}},
    "fedrolex": {"model": {"family": "preresnet", "hidden": [4, 6], "blocks": [1, 1], "normalization": "group"}},
    "fjord": {"model": {"family": "lenet", "convs": [4], "kernels": [3]}},
    "efedsup": {"model": {"family": "mobilenet", "stem": 3, "widths": [4], "depths": [1], "kernels": [3]}},
    "fedhen": {
        "model": {"family": "preactresnet", "hidden": [4, 6], "blocks": [1, 1], "exit_after": 1},
        "tiers": [{"name": "large", "share": 0.5}, {"name": "small", "share": 0.5, "stages": 1}],
    },
    "fedin": {
        "model": {"family": "splitnet", "channels": 2, "pool": "classifier"},
        "tiers": [{"name": "a", "share": 0.5, "extra": [1, 1]}, {"name": "b", "share": 0.5, "extra": [0, 0]}],
        "cells": 1,
    },
    "fedgkt": {
        "model": {"family": "bottleneck", "stem": 4, "planes": [2], "blocks": [1]},
        "tiers": [{"name": "all", "share": 1.0}],
    },
}


@pytest.mark.parametrize("method", RUNS)
def test_head_runs_with_every_kind_of_method(method: str, tmp_path: Path) -> None:
    changes = RUNS[method]
    extra = {"server_planes": [2], "server_blocks": [1], "server_epochs": 1} if method == "fedgkt" else {}
    recipe = {
        "rounds": 1,
        "data": {"dataset": "digits", "devices": 4, "max_examples": 6, "test_examples": 20},
        "model": {**changes["model"], "head": {"cells": changes.get("cells", 2)}},
        "tiers": changes.get("tiers", TWO_TIERS),
        "method": {"name": method, **extra},
    }
    run = fedloom.run(recipe, out=tmp_path / "run")
    accuracies = [row.value for row in run.rows() if row.metric == "accuracy"]
    assert accuracies
    assert all(0 <= value <= 100 for value in accuracies)

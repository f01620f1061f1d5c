"""Nets with an exit after every stage: smaller depths are parts of larger ones, and compute the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.footprints import subnet_footprint
from fedloom.models import Model
from fedloom.models.model import exit_names

NETS: dict[str, tuple[str, dict[str, Any], str]] = {
    "preactresnet": ("preactresnet", {"hidden": (4, 6, 8), "blocks": (1, 1, 1)}, "stages"),
    "preactresnet with a head": (
        "preactresnet",
        {"hidden": (4, 6, 8), "blocks": (1, 1, 1), "head": {"cells": 2}},
        "stages",
    ),
    "convnet": ("convnet", {"hidden": (4, 6, 8), "normalization": "none"}, "depth"),
    "convnet with a head": ("convnet", {"hidden": (4, 6), "normalization": "none", "head": {"cells": 2}}, "depth"),
    "transformer": ("transformer", {"layers": 3}, "depth"),
}


@pytest.mark.parametrize("net", NETS)
def test_net_with_exits_contains_every_depth(net: str, tiny_model: Callable[..., Model]) -> None:
    family, settings, depth = NETS[net]
    sizes = len(settings.get("hidden", ())) or settings["layers"]
    large = tiny_model(family, **settings, exit_after="every")
    assert exit_names(large) == tuple(f"exit{number}" for number in range(1, sizes + 1))
    assert len(large.layers()) == sizes
    weights = large.initial_weights(0)
    x = large.random_inputs(torch.Generator().manual_seed(0), 1, 3)
    full = large({name: tensor.unsqueeze(0) for name, tensor in weights.items()}, x)
    for number in range(1, sizes):
        small = tiny_model(family, **settings, exit_after="every", **{depth: number})
        part = subnet_footprint(small, large).read(weights)
        found = small({name: tensor.unsqueeze(0) for name, tensor in part.items()}, x)
        assert torch.allclose(found.logits, full.exits[f"exit{number}"], atol=1e-6)
        assert large.label_rows()[: len(small.label_rows())] == small.label_rows()
        assert small.layers() == large.layers()[:number]


@pytest.mark.parametrize("net", NETS)
def test_net_with_exits_has_one_kind_of_head(net: str, tiny_model: Callable[..., Model]) -> None:
    family, settings, _ = NETS[net]
    module = tiny_model(family, **settings, exit_after="every").module()
    assert len({type(head) for head in module.exits}) == 1  # type: ignore[union-attr]
    names = {tuple(name for name, _ in head.named_parameters()) for head in module.exits}  # type: ignore[union-attr]
    assert len(names) == 1


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("convnet", {"hidden": (4, 6), "depth": 1}, 'set exit_after = "every"'),
        ("convnet", {"hidden": (4, 6), "depth": 3, "exit_after": "every"}, "cannot end after 3"),
        ("preactresnet", {"stages": 3, "exit_after": "every"}, "cannot end after 3"),
        ("transformer", {"depth": 3, "exit_after": "every"}, "cannot end after 3"),
    ],
)
def test_net_of_impossible_depth_is_refused(
    family: str, settings: dict[str, Any], message: str, tiny_model: Callable[..., Model]
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model(family, **settings).module()

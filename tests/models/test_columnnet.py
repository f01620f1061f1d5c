"""Nets of columns: smaller sizes lie inside larger ones, and what a column learns from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.footprints import subnet_footprint
from fedloom.models import Model
from fedloom.models.columnnet import columnnet
from fedloom.models.model import exit_names

COLUMNS = ((3, 4), (2, 3), (4, 2))


@pytest.mark.parametrize("head", [None, {"cells": 2}])
def test_columnnet_contains_every_size(head: dict[str, int] | None, tiny_model: Callable[..., Model]) -> None:
    large = tiny_model("columnnet", columns=COLUMNS, normalization="none", head=head)
    assert exit_names(large) == ("exit1", "exit2", "exit3")
    weights = large.initial_weights(0)
    x = large.random_inputs(torch.Generator().manual_seed(0), 1, 3)
    full = large({name: tensor.unsqueeze(0) for name, tensor in weights.items()}, x)
    for held in (1, 2, 3):
        small = tiny_model("columnnet", columns=COLUMNS, normalization="none", head=head, held=held)
        part = subnet_footprint(small, large).read(weights)
        found = small({name: tensor.unsqueeze(0) for name, tensor in part.items()}, x)
        assert torch.allclose(found.logits, full.exits[f"exit{held}"], atol=1e-6)
        assert large.label_rows()[: 2 * held] == small.label_rows()


@pytest.mark.parametrize("lateral", [True, False])
def test_columnnet_exit_is_no_target_of_later_exits(lateral: bool, tiny_model: Callable[..., Model]) -> None:
    module = tiny_model("columnnet", columns=COLUMNS, normalization="none", lateral_gradient=lateral).module()
    x = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    *_, last = module(x).exits.values()
    named = dict(module.named_parameters())
    gradients = torch.autograd.grad(last.sum(), list(named.values()), allow_unused=True)
    reached = {name for name, gradient in zip(named, gradients, strict=True) if gradient is not None}
    own = {name for name in named if name.startswith("columns.2.")}
    earlier = {name for name in named if ".layers.0." in name} - own  # which the last of two layers reads
    assert reached == (own | earlier if lateral else own)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": ((3, 4), (2,))}, "as many layers, but these have 2, 1"),
        ({"columns": COLUMNS, "held": 4}, "a net of 3 columns has no 4"),
    ],
)
def test_columnnet_of_other_sizes_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        columnnet(input_shape=(1, 6, 6), classes=4, **settings)

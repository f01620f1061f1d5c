"""The documentation's custom bottleneck model, plain torch, sliced by shapes alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.fleet import make_nested_tiers
from fedloom.models import StepSeeds, build_model

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own_model.md"


@pytest.fixture(scope="module")
def bottleneck() -> Any:
    code = re.search(r"```python\n(# my_model\.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "my_model"}
    exec(compile(code[1], "my_model.py", "exec"), names)
    assert "fedloom" not in code[1]
    return names["bottleneck"]


def test_custom_bottleneck_has_size_of_resnet50(bottleneck: Any) -> None:
    net = bottleneck(input_shape=(3, 32, 32), classes=10)
    assert sum(isinstance(part, torch.nn.Conv2d) for part in net.modules()) == 53
    assert sum(weight.numel() for weight in net.parameters()) > 23_000_000


def test_custom_bottleneck_widths_are_nested(bottleneck: Any) -> None:
    sizes = [
        (str(width), build_model("bottleneck", bottleneck, {"width": width, "base": 16}, (3, 32, 32), 10))
        for width in (1.0, 0.5, 0.25)
    ]
    tiers = make_nested_tiers(sizes)
    whole = tiers[0].model.initial_weights(0)
    for tier in tiers:
        carved = tier.footprint.read(whole)
        assert {name: weight.shape for name, weight in carved.items()} == dict(tier.model.shapes())


def test_custom_bottleneck_devices_run_as_one_network(bottleneck: Any) -> None:
    small = build_model("bottleneck", bottleneck, {"base": 4, "blocks": (1, 1)}, (3, 8, 8), 10)
    assert small.fallback_reasons() == ()
    weights = {name: torch.stack([w, 2 * w, w.flip(0)]) for name, w in small.initial_weights(0).items()}
    x = torch.randn(3, 2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    together = small(weights, x, StepSeeds((0, 0, 0))).logits
    for device in range(3):
        own = {name: weight[device : device + 1] for name, weight in weights.items()}
        apart = small(own, x[device : device + 1], StepSeeds((0,))).logits[0]
        torch.testing.assert_close(together[device], apart, rtol=1e-3, atol=1e-4)

"""Which modules of the zoo can be sliced, and how: by the first entries of every axis, or of what an axis stacks.

The oracle needs no footprints. It puts the weights of the narrow net into the first entries of the wide one, zeros
elsewhere, and runs both: if every axis means the same in both nets, what was added computes nothing. Layer norms are
reduced to their factors and shifts meanwhile: a narrow net normalizes its own channels, as in HeteroFL's transformer.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from fedloom.fleet import Fleet, InvalidTier, find_nesting_problem, make_nested_tiers, make_tiers
from fedloom.methods import fleet_problem
from fedloom.methods.heterofl import HeteroFL
from fedloom.models import Model
from fedloom.models.structure import as_outputs
from fedloom.testing import TinyWorld
from tests.zoo import hub
from tests.zoo.cases import zoo_model


@dataclass(frozen=True)
class Pair:
    """Two sizes of a module, and what slicing one out of the other must be.

    Parameters
    ----------
    name : of the module.
    narrow : the settings of the small net.
    expected : sliced by the "first" entries of every axis; the same, but "scaled", since a constant factor depends on
        the size; by those of everything that an axis has "stacked"; or "refused" by name.
    why : the axis that decides it.
    wide : the settings of the large net.
    """

    name: str
    narrow: dict[str, Any]
    expected: Literal["first", "scaled", "stacked", "refused"]
    why: str
    wide: dict[str, Any] = field(default_factory=dict)


HALF = {"width": 0.5}
PAIRS = {
    "convnext": Pair("convnext", HALF, "first", "depthwise kernels, factors and norms have one entry per channel"),
    "vgg": Pair("vgg", HALF, "first", "Flatten keeps the cells of a channel together"),
    "densenet": Pair("densenet", HALF, "stacked", "concatenated channels: those of the second part move"),
    "vit": Pair("vit", HALF, "stacked", "nn.MultiheadAttention stacks queries, keys and values"),
    "text_encoder-heads": Pair("text_encoder", HALF, "refused", "two heads share one axis at every width"),
    "text_encoder-head-size": Pair(
        "text_encoder", {**HALF, "head_size": 4}, "first", "whole heads, of the same size", {"head_size": 4}
    ),
    "einsum_mixer": Pair("einsum_mixer", HALF, "first", "einsum gives every axis one meaning"),
    "lstm_classifier": Pair("lstm_classifier", HALF, "stacked", "nn.LSTM stacks four gates"),
    "gru_classifier": Pair("gru_classifier", HALF, "stacked", "nn.GRU stacks three gates"),
    "signal_cnn": Pair("signal_cnn", HALF, "first", "channels"),
    "unet": Pair("unet", HALF, "stacked", "skip connections are concatenated"),
    "mlp_mixer": Pair("mlp_mixer", HALF, "first", "tokens and channels have axes of their own"),
    "lora_net": Pair("lora_net", {"rank": 4}, "first", "ranks add up", {"rank": 16}),
    "hf_bert-heads": Pair("hf_bert", HALF, "stacked", "two heads share one axis at every width"),
    "hf_bert-head-size": Pair(
        "hf_bert", {**HALF, "head_size": 4}, "first", "whole heads, of the same size", {"head_size": 4}
    ),
    "hf_bert-inner": Pair("hf_bert", {"inner": 16}, "first", "hidden units of the feed-forward layers"),
    "hf_vit-heads": Pair("hf_vit", HALF, "stacked", "two heads share one axis at every width"),
    "hf_vit-head-size": Pair(
        "hf_vit", {**HALF, "head_size": 4}, "first", "whole heads, of the same size", {"head_size": 4}
    ),
    "hf_lora": Pair("hf_lora", {"rank": 4}, "first", "ranks add up at the same scale", {"rank": 16}),
    "hf_lora-alpha": Pair(
        "hf_lora", {"rank": 4, "alpha": 8}, "scaled", "the scale alpha / rank differs", {"rank": 16, "alpha": 8}
    ),
}


def pairs(*expected: str) -> list[Any]:
    return [
        pytest.param(key, marks=[pytest.mark.slow] if pair.name in hub.MODELS else [])
        for key, pair in PAIRS.items()
        if not expected or pair.expected in expected
    ]


def make_pair(key: str) -> tuple[Model, Model]:
    """The narrow model and the wide one, on the same frozen weights."""
    pair = PAIRS[key]
    wide = zoo_model(pair.name, **pair.wide)
    return zoo_model(pair.name, **pair.narrow).with_frozen_from(wide), wide


def first_entries(small: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in small.shape)


def random_state(module: nn.Module) -> dict[str, Tensor]:
    """Random trained weights and positive statistics; frozen weights and constants as they are."""
    draw, trained = torch.Generator().manual_seed(3), {name for name, w in module.named_parameters() if w.requires_grad}
    statistics = {name for name in module.state_dict() if name.endswith(("running_mean", "running_var"))}
    return {
        name: torch.rand(value.shape, generator=draw, dtype=value.dtype) - (0.3 if name in trained else -0.5)
        if name in trained | statistics
        else value
        for name, value in module.state_dict().items()
    }


def embed(small: dict[str, Tensor], large: dict[str, Tensor]) -> dict[str, Tensor]:
    """The small net's entries first, zeros after them."""
    made = {}
    for name, value in large.items():
        made[name] = torch.zeros_like(value) if value.is_floating_point() else value.clone()
        if name.endswith("running_var"):
            made[name] += 1
        made[name][first_entries(small[name])] = small[name]
    return made


def outputs_of(key: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """Of the narrow net, and of the wide one that contains it among zeros."""
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * self.weight + self.bias)
    narrow, wide = make_pair(key)
    x = narrow.random_inputs(torch.Generator().manual_seed(0), 5)
    small, large = narrow.module().eval(), wide.module().eval()
    small.load_state_dict(random_state(small))
    large.load_state_dict(embed(small.state_dict(), large.state_dict()))
    with torch.no_grad():
        return as_outputs(small(x)).logits, as_outputs(large(x)).logits


@pytest.mark.parametrize("key", pairs())
def test_narrow_net_among_zeros_computes_the_same_only_if_it_is_to_be_sliced(
    key: str, double: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table is right: this needs no slicing code at all."""
    narrow, wide = outputs_of(key, monkeypatch)
    assert float(narrow.std(0).max()) > 1e-6 * float(narrow.abs().max())  # otherwise anything would agree
    difference = float((narrow - wide).abs().max()) / float(narrow.abs().max())
    assert (difference <= 1e-9) == (PAIRS[key].expected == "first"), difference


@pytest.mark.parametrize("key", pairs("first", "scaled"))
def test_zoo_module_to_be_sliced_gets_first_entries_of_wide_one(key: str) -> None:
    narrow, wide = make_pair(key)
    small, large = make_nested_tiers([("narrow", narrow), ("wide", wide)])
    weights = large.model.initial_weights(0)
    part = small.footprint.read(weights)
    assert {name: weight.shape for name, weight in part.items()} == dict(narrow.shapes())
    assert all(torch.equal(weight, weights[name][first_entries(weight)]) for name, weight in part.items())
    assert any(weight.shape != weights[name].shape for name, weight in part.items())


ATTENTION = {
    "vit": ("blocks.0.attention.in_proj_weight", 3),
    "hf_bert-heads": ("bert.encoder.layer.0.attention.self.query.weight", 1),
    "hf_vit-heads": ("vit.layers.0.attention.q_proj.weight", 1),
}
"""A weight with the heads of each of some packed projections along its first axis; all have two heads."""


@pytest.mark.parametrize("key", [key for key in pairs("stacked") if key.values[0] in ATTENTION])
def test_zoo_attention_gets_first_entries_of_every_head(key: str) -> None:
    narrow, wide = make_pair(key)
    small, large = make_nested_tiers([("narrow", narrow), ("wide", wide)])
    name, projections = ATTENTION[key]
    weights = large.model.initial_weights(0)
    inner, outer = (shapes[name][0] // (2 * projections) for shapes in (narrow.shapes(), wide.shapes()))
    rows = [(part * 2 + head) * outer + row for part in range(projections) for head in (0, 1) for row in range(inner)]
    assert torch.equal(small.footprint.read(weights)[name], weights[name][rows][:, : narrow.shapes()[name][1]])


@pytest.mark.parametrize("key", [key for key in pairs("stacked") if key.values[0] not in ATTENTION])
def test_zoo_module_with_stacked_axes_computes_the_same_among_zeros(
    key: str, double: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the oracle, but its entries are those of the footprint, not the first ones of every axis."""
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: x * self.weight + self.bias)
    narrow, wide = make_pair(key)
    small, _ = make_nested_tiers([("narrow", narrow), ("wide", wide)])
    nets, x = [one.module().eval() for one in (narrow, wide)], narrow.random_inputs(torch.Generator().manual_seed(0), 5)
    part = {name: torch.rand(shape) - 0.3 for name, shape in narrow.shapes().items()}
    zeros = {name: torch.zeros(shape) for name, shape in wide.shapes().items()}
    for net, weights in zip(nets, (part, small.footprint.write(zeros, part)), strict=True):
        net.load_state_dict(weights, strict=False)  # batch norm keeps its initial statistics
    with torch.no_grad():
        outputs = [as_outputs(net(x)).logits for net in nets]
    assert float(outputs[0].std(0).max()) > 1e-6
    assert torch.allclose(*outputs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("key", pairs("refused"))
def test_zoo_module_not_to_be_sliced_is_refused_by_name(key: str) -> None:
    narrow, wide = make_pair(key)
    tiers = make_tiers([("narrow", narrow), ("wide", wide)])
    problem = find_nesting_problem(Fleet(tiers, (0.5, 0.5), 2, seed=0))
    assert problem is not None
    assert "tier 'narrow'" in problem
    assert any(name.rpartition(".")[0] in problem for name in wide.shapes()), problem
    assert len(problem.splitlines()) == 1
    with pytest.raises(InvalidTier):
        make_nested_tiers([("narrow", narrow), ("wide", wide)])


@pytest.mark.slow
@pytest.mark.parametrize("key", pairs())
def test_heterofl_trains_zoo_module_to_be_sliced_and_refuses_the_others(key: str) -> None:
    narrow, wide = make_pair(key)
    method = HeteroFL()
    world = TinyWorld.make(
        models=[("wide", wide), ("narrow", narrow)], input_shape=wide.input_shape, classes=wide.classes
    )
    problem = fleet_problem(method, world.fleet)
    assert (problem is None) == (PAIRS[key].expected != "refused"), problem
    if problem is None:
        engine = world.engine(method)
        server = world.play(method, engine, rounds=2)
        assert not world.refusals
        assert world.evaluate(method, server, engine)

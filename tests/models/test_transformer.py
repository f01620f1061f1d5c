"""HeteroFL's Transformer: torch's layers as reference, sliced heads, and its exit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.footprints import find_footprint, rolling
from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.models.layers import Scaler
from fedloom.tensors import Tensors

SIZES = {"embedding": 8, "heads": 2, "hidden": 6, "layers": 2, "dropout": 0.0}
LENGTH, CLASSES = 5, 7
Weights = Callable[..., dict[str, Tensor]]


def net_of(length: int = LENGTH, classes: int = CLASSES, **settings: Any) -> Model:
    return build_model("transformer", MODELS["transformer"], {**SIZES, **settings}, (length,), classes, classes + 1)


def rows(net: Model, batch: int = 3) -> Tensor:
    return net.random_inputs(torch.Generator().manual_seed(1), 1, batch)


def norm(w: Tensors, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])


def linear(w: Tensors, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def attention(w: Tensors, name: str, x: Tensor, rate: float) -> Tensor:
    """Head by head."""
    result = w[f"{name}.out.bias"].expand_as(x)
    for head in range(w[f"{name}.out.weight"].shape[2]):
        query, key, value = (
            F.linear(x, w[f"{name}.{one}.weight"][..., head], w[f"{name}.{one}.bias"][:, 0, head]) / rate
            for one in ("query", "key", "value")
        )
        shares = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        result = result + shares @ value @ w[f"{name}.out.weight"][..., head].mT
    return result / rate


def decoder(w: Tensors, name: str, x: Tensor, rate: float) -> Tensor:
    return linear(w, f"{name}.classifier", norm(w, f"{name}.norm", F.gelu(linear(w, f"{name}.hidden", x) / rate)))


def by_hand(w: Tensors, x: Tensor, rate: float) -> tuple[list[Tensor], Tensor]:
    """The logits after each layer, and the last hidden state."""
    x = norm(w, "entry.norm", w["entry.tokens.weight"][x] / rate + w["entry.places"] / rate)
    states = []
    for number in range(2):
        name = f"layers.{number}"
        x = norm(w, f"{name}.norm1", x + attention(w, f"{name}.attention", x, rate))
        inner = F.gelu(linear(w, f"{name}.widen", x) / rate)
        x = norm(w, f"{name}.norm2", x + linear(w, f"{name}.narrow", inner) / rate)
        states.append(x)
    return states, x


@pytest.mark.parametrize("width", [1.0, 0.5])
@pytest.mark.parametrize("step_seeds", [None, StepSeeds((0,))], ids=["judging", "training"])
def test_transformer_forward_matches_paper(step_seeds: StepSeeds | None, width: float, block_weights: Weights) -> None:
    """The scaler acts only in training."""
    net = net_of(width=width, exit_after=1)
    weights, x = block_weights(net, 1), rows(net)
    w, rate = {name: tensor[0] for name, tensor in weights.items()}, width if step_seeds else 1.0
    (early, late), _ = by_hand(w, x[0], rate)
    result = net(weights, x, step_seeds)
    assert list(result.exits) == ["exit", "full"]
    assert result.logits.shape == (1, 3, LENGTH, CLASSES)
    assert torch.allclose(result.exits["exit"][0], decoder(w, "exit", early, rate), atol=1e-10)
    assert torch.allclose(result.exits["full"][0], decoder(w, "decoder", late, rate), atol=1e-10)
    assert torch.allclose(result.taps["features"][0], late.mean(1), atol=1e-10)


def test_transformer_layer_matches_torch(block_weights: Weights) -> None:
    """An independent reference, with the heads stacked along the rows of one matrix."""
    net = net_of()
    layer = net.module().double().get_submodule("layers.0")
    own = torch.nn.TransformerEncoderLayer(8, 2, 6, 0.0, "gelu", batch_first=True, norm_first=False).double()
    w = {name.removeprefix("layers.0."): tensor[0] for name, tensor in block_weights(net, 1).items()}
    layer.load_state_dict({name: w[name] for name in layer.state_dict()})
    packed = [w[f"attention.{one}.weight"].permute(2, 0, 1).flatten(0, 1) for one in ("query", "key", "value")]
    biases = [w[f"attention.{one}.bias"].permute(2, 0, 1).flatten() for one in ("query", "key", "value")]
    theirs = {
        "self_attn.in_proj_weight": torch.cat(packed),
        "self_attn.in_proj_bias": torch.cat(biases),
        "self_attn.out_proj.weight": w["attention.out.weight"].permute(0, 2, 1).flatten(1),
        "self_attn.out_proj.bias": w["attention.out.bias"],
    }
    for mine, other in (("widen", "linear1"), ("narrow", "linear2"), ("norm1", "norm1"), ("norm2", "norm2")):
        theirs |= {f"{other}.{key}": w[f"{mine}.{key}"] for key in ("weight", "bias")}
    own.load_state_dict(theirs)
    x = torch.randn(3, LENGTH, 8, dtype=torch.float64)
    assert torch.allclose(layer(x), own(x), atol=1e-10)


def test_transformer_identical_layers_start_alike() -> None:
    """As in HeteroFL's code, which copies the first layer; they are separate weights all the same."""
    for identical in (False, True):
        weights = net_of(layers=3, identical_layers=identical).initial_weights(0)
        name = "attention.query.weight"
        others = [torch.equal(weights[f"layers.0.{name}"], weights[f"layers.{number}.{name}"]) for number in (1, 2)]
        assert others == [identical] * 2


def test_transformer_slice_keeps_part_of_every_head() -> None:
    """Eight rows of two stacked heads: half of each head is rows 0, 1, 4 and 5."""
    wide, narrow = net_of(), net_of(width=0.5)
    footprint = find_footprint(narrow.shapes(), wide.shapes())
    numbers = torch.arange(8.0).view(2, 4).mT  # [dimension, heads]
    whole = {name: torch.zeros(shape) for name, shape in wide.shapes().items()}
    for one in ("query", "key", "value"):
        whole[f"layers.0.attention.{one}.weight"] = numbers.unsqueeze(1).expand(4, 8, 2)
        whole[f"layers.0.attention.{one}.bias"] = numbers.unsqueeze(1)
    whole["layers.0.attention.out.weight"] = numbers.expand(8, 4, 2)
    part = footprint.read(whole)
    for name in ("query.weight", "key.weight", "value.weight", "query.bias", "key.bias", "value.bias", "out.weight"):
        kept = part[f"layers.0.attention.{name}"]
        kept = kept.transpose(0, 1) if name == "out.weight" else kept
        assert kept[:, 0].T.flatten().tolist() == [0, 1, 4, 5]
    assert tuple(part["layers.0.attention.query.weight"].shape) == (2, 4, 2)
    assert tuple(part["layers.0.attention.out.weight"].shape) == (4, 2, 2)


@pytest.mark.parametrize(("width", "widest", "size", "dimension"), [(0.5, 1, 4, 2), (0.25, 0.5, 2, 1), (0.3, 1, 3, 2)])
def test_transformer_width_rounds_every_dimension_up(width: float, widest: float, size: int, dimension: int) -> None:
    shapes = net_of(width=width, widest=widest).shapes()
    assert tuple(shapes["layers.0.attention.key.weight"]) == (dimension, size, 2)
    assert tuple(shapes["layers.0.attention.key.bias"]) == (dimension, 1, 2)
    assert tuple(shapes["layers.0.attention.out.weight"]) == (size, dimension, 2)
    assert tuple(shapes["entry.tokens.weight"]) == (CLASSES + 1, size)
    assert tuple(shapes["entry.places"]) == (LENGTH, size)
    assert tuple(shapes["decoder.classifier.weight"]) == (CLASSES, size)


def test_transformer_rolling_slice_keeps_heads_tokens_and_positions() -> None:
    wide, narrow = net_of(), net_of(width=0.5)
    blocks = find_footprint(narrow.shapes(), wide.shapes(), rolling(3)).blocks
    query, key, out = (blocks[f"layers.0.attention.{one}.weight"] for one in ("query", "key", "out"))
    assert [axis.tolist() for axis in query[:2]] == [[3, 0], [3, 4, 5, 6]]
    assert torch.equal(key[0], query[0]) and torch.equal(out[1], query[0]) and torch.equal(out[0], query[1])
    assert query[2] == key[2] == out[2] == slice(0, 2)
    assert blocks["decoder.classifier.weight"][0] == slice(0, CLASSES)
    assert blocks["entry.tokens.weight"][0] == slice(0, CLASSES + 1)
    assert blocks["entry.places"][0] == slice(0, LENGTH)


def test_transformer_output_depends_on_position_and_context(block_weights: Weights) -> None:
    net = net_of()
    weights, x = block_weights(net, 1), rows(net)
    logits, turned = net(weights, x).logits, net(weights, x.flip(2)).logits
    assert not torch.allclose(logits.flip(2), turned, atol=1e-3)
    without = {**weights, "entry.places": torch.zeros_like(weights["entry.places"])}
    assert torch.allclose(net(without, x).logits.flip(2), net(without, x.flip(2)).logits, atol=1e-10)
    other = x.clone()
    other[..., -1] = (x[..., -1] + 1) % CLASSES
    assert bool((net(weights, other).logits[:, :, 0] != logits[:, :, 0]).any(-1).all())


def test_transformer_has_no_padding_token(block_weights: Weights) -> None:
    """Every id, including the first and the mask, has a vector with a gradient."""
    net = net_of()
    leaves = {name: tensor.requires_grad_() for name, tensor in block_weights(net, 1).items()}
    x = torch.tensor([[[0, 1, 2, 3, 4], [5, 6, 7, 0, 1]]])
    (gradient,) = torch.autograd.grad(net(leaves, x, StepSeeds((0,))).logits.sin().sum(), leaves["entry.tokens.weight"])
    assert bool(gradient.any(-1).all())


def test_transformer_short_sequence_uses_first_positions(block_weights: Weights) -> None:
    net, short = net_of(), net_of(length=3)
    weights, x = block_weights(net, 1), rows(short)
    cut = {**weights, "entry.places": weights["entry.places"][:, :3]}
    assert torch.equal(net(weights, x).logits, short(cut, x).logits)


def test_transformer_label_rows_include_embedding() -> None:
    """The decoder is not tied to the embedding; the mask has a vector but is no class."""
    net = net_of(exit_after=1)
    heads = [f"{name}.classifier.{key}" for name in ("exit", "decoder") for key in ("weight", "bias")]
    assert net.label_rows() == ("entry.tokens.weight", *heads)
    assert [net.shapes()[name][0] for name in net.label_rows()] == [CLASSES + 1, *[CLASSES] * 4]
    assert net_of().label_rows() == ("entry.tokens.weight", "decoder.classifier.weight", "decoder.classifier.bias")


def test_transformer_scaler_is_relative_to_widest_and_optional() -> None:
    def rates(**settings: Any) -> set[float]:
        return {part.rate for part in net_of(**settings).module().modules() if isinstance(part, Scaler)}

    assert rates(width=0.25, widest=0.5) == {0.5}
    assert rates(width=0.25, scaler=False) == {1.0}


def test_transformer_initial_weights_match_paper() -> None:
    weights = net_of(embedding=64, heads=4, hidden=128).initial_weights(0)
    assert all(not weight.any() for name, weight in weights.items() if name.endswith("bias"))
    assert all(bool((weight == 1).all()) for name, weight in weights.items() if "norm" in name and "weight" in name)
    for name in ("widen", "narrow"):
        assert abs(float(weights[f"layers.0.{name}.weight"].std()) - 0.02) < 0.002
    for name in ("query", "out"):
        largest = float(weights[f"layers.0.attention.{name}.weight"].abs().max())
        assert 0.95 / 8 < largest <= 1 / 8
    assert not torch.equal(weights["layers.0.widen.weight"], weights["layers.1.widen.weight"])


def test_transformer_dropout_only_in_training(block_weights: Weights) -> None:
    net, still = net_of(dropout=0.5), net_of()
    weights, x = block_weights(net, 1), rows(net)
    first, again, other = (net(weights, x, StepSeeds((seed,))).logits for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert torch.equal(net(weights, x).logits, still(weights, x).logits)


@pytest.mark.parametrize(
    ("settings", "exits", "layers"),
    [
        ({"exit_after": 1}, ["exit", "full"], 2),
        ({"exit_after": 1, "depth": 1}, ["exit"], 1),
        ({"exit_after": 2}, ["exit"], 2),
        ({}, ["full"], 2),
    ],
)
def test_transformer_exits_are_named(
    settings: dict[str, Any], exits: list[str], layers: int, block_weights: Weights
) -> None:
    net = net_of(**settings)
    weights, x = block_weights(net, 1), rows(net)
    assert list(net(weights, x).exits) == exits
    assert len({name.split(".")[1] for name in net.shapes() if name.startswith("layers.")}) == layers


def test_transformer_simple_net_nests_in_complex_net(block_weights: Weights) -> None:
    complex_net, simple = net_of(exit_after=1), net_of(exit_after=1, depth=1)
    weights, x = block_weights(complex_net, 1), rows(simple)
    part = find_footprint(simple.shapes(), complex_net.shapes()).read(
        {name: tensor[0] for name, tensor in weights.items()}
    )
    assert part.keys() == simple.shapes().keys()
    early = simple({name: tensor[None] for name, tensor in part.items()}, x).logits
    assert torch.equal(early, complex_net(weights, x).exits["exit"])
    unused = set(complex_net.shapes()) - set(complex_net.last_exit_weights())
    assert unused == {name for name in complex_net.shapes() if name.startswith("exit.")}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 1}, r"ends at its exit \(0\) or after all 2 layers, not after 1"),
        ({"exit_after": 3}, r"exit \(3\)"),
        ({"exit_after": 2, "depth": 1}, r"exit \(2\)"),
        ({"embedding": 9}, "embedding = 9 is not divisible by heads = 2"),
    ],
)
def test_transformer_impossible_size_raises(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        net_of(**settings).module()

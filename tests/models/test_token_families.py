"""Families for tokens: their inputs, blocks of devices, and narrow nets inside wide ones."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedloom.footprints import find_footprint
from fedloom.models import MODELS, InputSpec, Model, StepSeeds, build_model, chain_models, compute_cost
from fedloom.models.batching import batching_mode, vmap_devices
from tests.models.block_checks import Pick, assert_block_matches_single_devices, outputs_and_gradients

DEVICES = 3
Weights = Callable[..., dict[str, Tensor]]


def rows_of(net: Model, devices: int = DEVICES, batch: int = 4) -> Tensor:
    return net.random_inputs(torch.Generator().manual_seed(3), devices, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_input_spec_numbers_have_default_dtype(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if dtype == torch.float64:
        request.getfixturevalue("double")
    inputs, draw = InputSpec((2, 3)), torch.Generator().manual_seed(0)
    for result in (inputs.zeros(4, 1), inputs.random(draw, 4, 1)):
        assert (result.shape, result.dtype) == ((4, 1, 2, 3), dtype)
    assert not inputs.zeros(1).any()


def test_input_spec_tokens_are_valid_ids() -> None:
    inputs = InputSpec((6,), tokens=7)
    blank, drawn = inputs.zeros(2), inputs.random(torch.Generator().manual_seed(0), 20, 5)
    assert blank.dtype == drawn.dtype == torch.int64
    assert (blank.shape, drawn.shape) == ((2, 6), (20, 5, 6))
    assert set(drawn.flatten().tolist()) == set(range(7))
    assert torch.equal(drawn, inputs.random(torch.Generator().manual_seed(0), 20, 5))


def test_model_inputs_match_its_input_spec(token_family: str, tiny_model: Callable[..., Model]) -> None:
    net, images = tiny_model(token_family), tiny_model("convnet")
    assert (net.tokens, net.zero_inputs(2).dtype, net.zero_inputs(2).shape) == (5, torch.int64, (2, 5))
    assert int(net.random_inputs(torch.Generator(), 50).max()) == 4
    assert (images.tokens, images.zero_inputs(2).dtype, images.zero_inputs(2, 3).shape) == (
        None,
        torch.float32,
        (2, 3, 1, 6, 6),
    )


def test_build_model_passes_tokens_only_to_named_parameter(token_family: str) -> None:
    named = build_model(token_family, MODELS[token_family], {}, (6,), 3, 9)
    assert dict(named.settings) == {"input_shape": (6,), "classes": 3, "tokens": 9}
    assert named.with_settings(width=0.5).tokens == 9
    other = build_model("convnet", MODELS["convnet"], {}, (1, 6, 6), 3, 9)
    assert dict(other.settings) == {"input_shape": (1, 6, 6), "classes": 3}


@pytest.mark.parametrize(("shape", "tokens"), [((6,), None), ((1, 6, 6), 9), ((3, 8, 8), None)])
def test_token_family_non_token_input_raises(token_family: str, shape: tuple[int, ...], tokens: int | None) -> None:
    with pytest.raises(ValueError, match=r"sequences of tokens"):
        build_model(token_family, MODELS[token_family], {}, shape, 3, tokens).check_output_size()


def test_token_family_inspections_are_correct(token_family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(token_family)
    net.check_output_size()
    assert not net.is_batch_dependent()
    assert net.statistics() == {}
    assert set(net.last_exit_weights()) == {name for name in net.shapes() if not name.startswith("exit.")}
    assert compute_cost(net).macs > 0
    assert (
        net.feature_width()
        == net.features({k: v[None] for k, v in net.initial_weights(0).items()}, rows_of(net, 1)).shape[-1]
    )
    with pytest.raises(ValueError, match="4 logits where the data has 3 classes"):
        Model(net.family, net.build, net.settings, net.input_shape, 3, net.tokens).check_output_size()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_token_family_block_matches_single_devices(
    token_family: str,
    training: bool,
    dropout: float,
    tiny_model: Callable[..., Model],
    block_weights: Weights,
    pick_device: Pick,
) -> None:
    """Without a warning, which would be an error here. Dropout uses each device's seed."""
    net = tiny_model(token_family, width=0.5, dropout=dropout)
    assert_block_matches_single_devices(net, block_weights(net, DEVICES), rows_of(net), training, pick_device)


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_token_family_uses_vmap(token_family: str, training: bool, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(token_family)
    assert batching_mode(net, training, False) == (vmap_devices, ())
    assert net.fallback_reasons() == ()


def test_token_family_nonfinite_device_leaves_others_unchanged(
    token_family: str, tiny_model: Callable[..., Model], block_weights: Weights
) -> None:
    net = tiny_model(token_family)
    block, x, step_seeds = block_weights(net, DEVICES), rows_of(net), StepSeeds((1, 2, 3))
    broken = {name: tensor.clone() for name, tensor in block.items()}
    for tensor in broken.values():
        tensor[1] = torch.nan
    clean, dirty = outputs_and_gradients(net, block, x, step_seeds), outputs_and_gradients(net, broken, x, step_seeds)
    for of_clean, of_dirty in zip(clean, dirty, strict=True):
        for name, tensor in of_clean.items():
            assert torch.equal(of_dirty[name][[0, 2]], tensor[[0, 2]])


def test_token_family_initial_gradient_is_finite(token_family: str) -> None:
    net = build_model(token_family, MODELS[token_family], {"dropout": 0.0, "layers": 2}, (8,), 12, 13)
    block = {name: tensor.expand(2, *tensor.shape) for name, tensor in net.initial_weights(0).items()}
    _, gradients = outputs_and_gradients(net, block, rows_of(net, 2, 2), StepSeeds((0, 0)))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    assert all(bool(gradient.any()) for name, gradient in gradients.items() if not name.endswith("key.bias"))


def test_token_family_modes_match_module(
    token_family: str, tiny_model: Callable[..., Model], block_weights: Weights
) -> None:
    net = tiny_model(token_family, width=0.5)
    block, x = block_weights(net, 1), rows_of(net, 1)
    for step_seeds in (StepSeeds((0,)), None):
        module = net.module().double().train(step_seeds is not None)
        module.load_state_dict({name: tensor[0] for name, tensor in block.items()})
        assert torch.allclose(net(block, x, step_seeds).logits[0], module(x[0]).logits, atol=1e-12)


def test_token_family_widths_nest(token_family: str) -> None:
    """Slicing level by level equals slicing at once, and smaller levels lie inside larger ones."""
    sizes = {"widest": 1.0, "layers": 2}
    levels = [
        build_model(token_family, MODELS[token_family], {**sizes, "width": width}, (6,), 4, 5)
        for width in (1.0, 0.5, 0.25, 0.125, 0.0625)
    ]
    weights = stepwise = levels[0].initial_weights(0)
    for larger, smaller in pairwise(levels):
        stepwise = find_footprint(smaller.shapes(), larger.shapes()).read(stepwise)
        at_once = find_footprint(smaller.shapes(), levels[0].shapes()).read(weights)
        assert at_once.keys() == smaller.shapes().keys()
        assert {name: tensor.shape for name, tensor in at_once.items()} == dict(smaller.shapes())
        assert all(torch.equal(tensor, stepwise[name]) for name, tensor in at_once.items())


class Twice(nn.Module):
    """Passes tokens to one child and numbers to the next."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.foldable = False
        self.lookup, self.classifier = nn.Embedding(tokens, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.lookup(x).mean(1))
        return result


def twice(tokens: int | None) -> nn.Module:
    return Twice(tokens or 1)


def test_submodel_and_chain_pass_tokens_to_first_module(block_weights: Weights) -> None:
    net = build_model("twice", twice, {}, (6,), 2, 9)
    lookup, head = net.submodel("lookup"), net.submodel("classifier")
    assert (lookup.inputs, head.inputs) == (InputSpec((6,), 9), InputSpec((3,)))
    lengthened = chain_models(net, build_model("last", last, {}, (2,), 4))
    assert lengthened.inputs == net.inputs
    result = lengthened(block_weights(lengthened, DEVICES), rows_of(net), StepSeeds((1, 2, 3)))
    assert result.logits.shape == (DEVICES, 4, 4)


def last() -> nn.Module:
    return nn.Linear(2, 4)

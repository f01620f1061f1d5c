"""Every device of a block draws the random numbers that it draws alone, whatever draws them."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedloom.models import Model, Outputs, StepSeeds, build_model
from fedloom.models.batching import Fold, FunctionalModule, Vmap, batching_mode
from fedloom.testing.doubles import random_block
from tests.models.block_checks import Pick, assert_block_matches_single_devices

DEVICES = 3
NUMBERS = count()
Draw = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """A layer of the user's own that draws random numbers in training."""

    def __init__(self, draw: Draw):
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) if self.training else x


def per_example(x: Tensor) -> tuple[int, ...]:
    return (x.shape[0],) + (1,) * (x.dim() - 1)


def drop_path(x: Tensor) -> Tensor:
    return x * x.new_empty(per_example(x)).bernoulli_(0.7) / 0.7


def stochastic_depth(x: Tensor) -> Tensor:
    return x * torch.empty(per_example(x), dtype=x.dtype, device=x.device).bernoulli_(0.7).div_(0.7)


def floor_of_rand(x: Tensor) -> Tensor:
    return x * (0.7 + torch.rand(per_example(x), dtype=x.dtype)).floor_()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout in place": lambda: nn.Sequential(nn.Identity(), Drawing(lambda x: F.dropout(x.neg(), 0.3, True, True))),
    "functional dropout": lambda: Drawing(lambda x: F.dropout(x, 0.3, training=True)),
    "feature dropout": lambda: Drawing(lambda x: F.dropout1d(x.flatten(2), 0.3, True).view_as(x)),
    "AlphaDropout": lambda: nn.AlphaDropout(0.3),
    "FeatureAlphaDropout": lambda: nn.FeatureAlphaDropout(0.3),
    "drop path": lambda: Drawing(drop_path),
    "stochastic depth": lambda: Drawing(stochastic_depth),
    "floor of rand": lambda: Drawing(floor_of_rand),
    "rand_like": lambda: Drawing(lambda x: x * (torch.rand_like(x) < 0.7)),
    "randn_like": lambda: Drawing(lambda x: x + torch.randn_like(x)),
    "randn": lambda: Drawing(lambda x: x + torch.randn(x.shape, dtype=x.dtype)),
    "randint": lambda: Drawing(lambda x: x + torch.randint(0, 5, x.shape)),
    "normal": lambda: Drawing(lambda x: x * torch.normal(1.0, 0.5, tuple(x.shape))),
    "bernoulli": lambda: Drawing(lambda x: x * torch.bernoulli(torch.full_like(x, 0.7))),
    "bernoulli of values": lambda: Drawing(lambda x: x * torch.bernoulli(x.detach().sigmoid())),
    "exponential_": lambda: Drawing(lambda x: x * torch.empty_like(x).exponential_()),
    "mixup": lambda: Drawing(lambda x: 0.8 * x + 0.2 * x[torch.randperm(len(x))]),
    "one number": lambda: Drawing(lambda x: x * torch.rand(1, dtype=x.dtype)),
}


def map_net(layer: Callable[[], nn.Module]) -> nn.Module:
    """Maps, which a single device has channels-last."""
    convs = (nn.Conv2d(2, 6, 3), nn.ReLU(), layer(), nn.Conv2d(6, 4, 3), layer(), nn.ReLU())
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))


class Concatenating(nn.Module):
    """Cannot be folded."""

    def __init__(self, layer: Callable[[], nn.Module]):
        super().__init__()
        self.left, self.right, self.layer = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3), layer()
        self.classifier = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.layer(torch.cat([self.left(x), self.right(x)], 1)).mean((-2, -1)))


def stranger(build: Callable[..., nn.Module], *layer: Any, input_shape: tuple[int, ...] = (2, 6, 6)) -> Model:
    return build_model(f"stranger {next(NUMBERS)}", lambda: build(*layer), {}, input_shape, 4)


def numbers(shape: tuple[int, ...], devices: int = DEVICES, batch: int = 5) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(devices, batch, *shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", LAYERS)
def test_folded_net_that_draws_matches_single_devices(name: str, double: None, pick_device: Pick) -> None:
    net = stranger(map_net, LAYERS[name])
    assert_block_matches_single_devices(net, random_block(net, DEVICES), numbers((2, 6, 6)), True, pick_device)
    mode = batching_mode(net, True, False)[0]
    assert isinstance(mode, Fold)
    assert net.fallback_reasons() == ()


@pytest.mark.parametrize("name", LAYERS)
def test_vmapped_net_that_draws_matches_single_devices(name: str, double: None, pick_device: Pick) -> None:
    net = stranger(Concatenating, LAYERS[name])
    assert_block_matches_single_devices(net, random_block(net, DEVICES), numbers((2, 6, 6)), True, pick_device)
    assert isinstance(batching_mode(net, True, False)[0], Vmap)
    assert net.one_by_one_reason() is None


class Tokens(nn.Module):
    """Numbers of 6 steps, mixed by a layer [batch, 6, 8] -> [batch, 6, 8]."""

    def __init__(self, mix: Callable[[], nn.Module]):
        super().__init__()
        self.embedding, self.mix, self.classifier = nn.Linear(3, 8), mix(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.mix(self.embedding(x)).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, dropout: float, weights: bool):
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(8, 2, dropout, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.weights)[0]


class DotProduct(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.into, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=chance, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Parameter(torch.randn(8, 2, 4)), nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.einsum("bld,dhk->bhlk", x, self.into)
        scores = torch.einsum("bhlk,bhmk->bhlm", heads, heads).softmax(-1)
        return torch.einsum("bhlm,bhmk,hkd->bld", scores, heads, self.out)


class OwnRmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain


MIXES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: SelfAttention(0.0, weights=False),
    "attention with weights": lambda: SelfAttention(0.0, weights=True),
    "attention with dropout": lambda: SelfAttention(0.2, weights=False),
    "attention with weights and dropout": lambda: SelfAttention(0.2, weights=True),
    "scaled dot product": lambda: DotProduct(0.0),
    "scaled dot product with dropout": lambda: DotProduct(0.2),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "encoder, norm first": lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=True),
    "einsum": Einsum,
    "layer norm": lambda: nn.LayerNorm(8),
    "layer norm without weights": lambda: nn.LayerNorm(8, elementwise_affine=False),
    "RMS norm": lambda: nn.RMSNorm(8),
    "RMS norm of one's own": OwnRmsNorm,
    "dropout": lambda: nn.Dropout(0.2),
    "drop path": lambda: Drawing(drop_path),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
@pytest.mark.parametrize("name", MIXES)
def test_token_nets_run_many_devices_at_once(name: str, training: bool, double: None, pick_device: Pick) -> None:
    net = stranger(Tokens, MIXES[name], input_shape=(6, 3))
    assert_block_matches_single_devices(net, random_block(net, DEVICES), numbers((6, 3)), training, pick_device)
    assert net.one_by_one_reason() is None


NORMS: dict[str, Callable[[], nn.Module]] = {
    "group norm": lambda: nn.GroupNorm(2, 6),
    "group norm of one group": lambda: nn.GroupNorm(1, 6),
    "layer norm": lambda: nn.LayerNorm([6, 4, 4]),
    "layer norm of rows": lambda: nn.LayerNorm(4),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "RMS norm": lambda: nn.RMSNorm([6, 4, 4]),
    "RMS norm of rows": lambda: nn.RMSNorm(4),
}


@pytest.mark.parametrize("name", NORMS)
def test_normalized_maps_with_dropout_are_folded(name: str, double: None, pick_device: Pick) -> None:
    net = stranger(
        lambda: nn.Sequential(nn.Conv2d(2, 6, 3), NORMS[name](), nn.Dropout(0.2), nn.Flatten(), nn.Linear(96, 4))
    )
    assert_block_matches_single_devices(net, random_block(net, DEVICES), numbers((2, 6, 6)), True, pick_device)
    assert net.fallback_reasons() == ()


class Masks(nn.Module):
    """Its taps are what two dropout layers make of ones: the masks themselves."""

    def __init__(self, chance: float, concatenated: bool):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(1, 4, 1), nn.Dropout(chance), nn.Dropout(chance)
        self.classifier, self.concatenated = nn.Linear(4, 4), concatenated

    def forward(self, x: Tensor) -> Outputs:
        maps = self.conv(x)
        if self.concatenated:  # which folding cannot do
            maps = torch.cat([maps[:, 2:], maps[:, :2]], 1)
        ones = maps * 0 + 1
        taps = {"first": self.first(ones), "second": self.second(ones)}
        return Outputs({"logits": self.classifier(maps.mean((-2, -1)))}, taps)


def masks(net: Model, seeds: tuple[int, ...], batch: int = 4) -> dict[str, Tensor]:
    devices = len(seeds)
    x = torch.ones(devices, batch, 1, 8, 8)
    weights = {name: torch.ones(devices, *shape) for name, shape in net.shapes().items()}
    taps = net(weights, x, StepSeeds(seeds)).taps
    return {name: taps[name] for name in ("first", "second")}


@pytest.fixture(scope="module", params=[False, True], ids=["folded", "vmapped"])
def mask_net(request: pytest.FixtureRequest) -> Model:
    net = stranger(Masks, 0.3, request.param, input_shape=(1, 8, 8))
    assert isinstance(batching_mode(net, True, False)[0], Vmap if request.param else Fold)
    return net


@settings(max_examples=25, deadline=None)
@given(seeds=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=6))
def test_masks_do_not_depend_on_the_block(mask_net: Model, seeds: list[int]) -> None:
    """To the bit: alone, in any block, at any place in it."""
    together = masks(mask_net, tuple(seeds))
    for place, seed in enumerate(seeds):
        for name, mask in masks(mask_net, (seed,)).items():
            assert torch.equal(together[name][place], mask[0])


def test_masks_have_the_rate_and_are_independent(mask_net: Model) -> None:
    """Between neighbors, layers, devices and steps, whose seeds are consecutive numbers."""
    drawn = masks(mask_net, tuple(range(1000, 1008)), batch=64)
    kept = {name: (mask > 0).double().flatten(1) for name, mask in drawn.items()}
    assert all(torch.isin(mask, torch.tensor([0.0, 1 / 0.7])).all() for mask in drawn.values())
    samples = torch.cat(list(kept.values()))  # 2 layers of 8 devices
    bound = 5 / samples.shape[1] ** 0.5
    assert float((samples.mean(1) - 0.7).abs().max()) <= bound
    assert float((torch.corrcoef(samples) - torch.eye(len(samples))).abs().max()) <= bound
    shifted = torch.stack([torch.corrcoef(torch.stack([row[1:], row[:-1]]))[0, 1] for row in samples])
    assert float(shifted.abs().max()) <= bound


def test_masks_same_seed_gives_same_mask(mask_net: Model) -> None:
    first, again, other = (masks(mask_net, seeds) for seeds in ((5, 6), (5, 6), (7, 6)))
    for name, mask in first.items():
        assert torch.equal(mask, again[name])
        assert torch.equal(mask[1], other[name][1])
        assert not torch.equal(mask[0], other[name][0])
        assert not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize("name", LAYERS)
def test_judging_draws_nothing(name: str, double: None) -> None:
    net, plain = stranger(map_net, LAYERS[name]), stranger(map_net, nn.Identity)
    block, x = random_block(net, DEVICES), numbers((2, 6, 6))
    before = torch.random.get_rng_state()
    judged = net(block, x).logits
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(judged, plain(block, x).logits)


@pytest.mark.parametrize("build", [map_net, Concatenating])
def test_training_leaves_global_generator_unchanged(build: Callable[..., nn.Module], double: None) -> None:
    net = stranger(build, LAYERS["Dropout"])
    before = torch.random.get_rng_state()
    net(random_block(net, DEVICES), numbers((2, 6, 6)), StepSeeds((1, 2, 3)))
    assert torch.equal(torch.random.get_rng_state(), before)


ONE_BY_ONE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "RReLU": (nn.RReLU, "2 (RReLU) uses rrelu, which torch cannot run for many devices at once"),
    "layer drop": (
        lambda: Drawing(lambda x: x if torch.rand(1).item() < 0.7 else 2 * x),
        "2 (Drawing) branches on the values of a tensor",
    ),
    "multinomial": (
        lambda: Drawing(lambda x: x + torch.multinomial(x.flatten(1).sigmoid(), 1)[..., None, None]),
        "2 (Drawing) uses torch.multinomial, which cannot be drawn for each device",
    ),
    "checkpoint": (
        lambda: Drawing(lambda x: checkpoint(lambda y: F.dropout(y, 0.3).sin(), x, use_reentrant=False)),  # type: ignore[return-value]
        "its forward keeps tensors for later, as checkpointing does",
    ),
    "own generator": (
        lambda: Drawing(lambda x: x * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) + torch.rand(1)),
        "2 (Drawing) uses torch.rand with a generator of its own, which cannot be drawn for each device",
    ),
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_net_whose_draws_cannot_be_split_runs_one_by_one(name: str, double: None, pick_device: Pick) -> None:
    """Correct, to the bit, and it says why."""
    layer, reason = ONE_BY_ONE[name]
    net = stranger(map_net, layer)
    block, x = random_block(net, DEVICES), numbers((2, 6, 6))
    assert net.one_by_one_reason() == reason
    together = net(block, x, StepSeeds((1, 2, 3))).logits
    for device in range(DEVICES):
        alone = net(pick_device(block, device), x[device : device + 1], StepSeeds((device + 1,))).logits
        assert torch.equal(alone[0], together[device])
    assert_block_matches_single_devices(net, block, x, True, pick_device)


def test_layer_class_made_anew_for_every_module_is_recognized(double: None, pick_device: Pick) -> None:
    def build() -> nn.Module:
        class Local(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return drop_path(x) if self.training else x

        return map_net(Local)

    net, x = stranger(build), numbers((2, 6, 6))
    block = random_block(net, DEVICES)
    assert_block_matches_single_devices(net, block, x, True, pick_device)
    forward = batching_mode(net, True, False)[0](FunctionalModule(net.module(), training=True))
    folded = forward(block, x, (1, 2, 3))[0]  # would raise CannotDrawError if a layer were missed
    assert torch.equal(folded.logits, net(block, x, StepSeeds((1, 2, 3))).logits)


def test_draw_that_no_trial_saw_is_still_right(double: None, pick_device: Pick) -> None:
    """Large batches draw one number for a whole map, which a folded block cannot split."""
    net = stranger(map_net, lambda: Drawing(lambda x: F.dropout(x * torch.rand(1).item() if len(x) > 2 else x, 0.3)))
    assert isinstance(batching_mode(net, True, False)[0], Fold)
    assert_block_matches_single_devices(net, random_block(net, DEVICES), numbers((2, 6, 6)), True, pick_device)

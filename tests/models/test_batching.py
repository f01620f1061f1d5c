"""A block of devices computes what each device computes alone, in every batching mode."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.models import Model, Outputs, StepSeeds, batching, build_model, make_space
from fedloom.models.batching import FunctionalModule, choose_mode
from fedloom.models.mobilenet import mobilenet
from fedloom.models.normalization import Normalization
from fedloom.seeds import generator
from tests.models.block_checks import Pick, assert_block_matches_single_devices, outputs_and_gradients

DEVICES = 3
NUMBERS = count()


def images(shape: tuple[int, ...], batch: int = 5, devices: int = DEVICES) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    offsets = torch.arange(devices, dtype=torch.float64).view(-1, *[1] * (len(shape) + 1))
    return torch.randn(devices, batch, *shape, generator=draw, dtype=torch.float64) + offsets


def with_statistics(net: Model, block: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(8)
    devices = len(next(iter(block.values())))
    actual = {
        name: torch.rand(devices, *shape, generator=draw, dtype=torch.float64) + 0.5
        for name, shape in net.statistics().items()
    }
    return {**block, **actual}


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_folding_every_family_matches_single_devices(
    normed_family: str,
    normalization: str,
    training: bool,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    """Warnings are errors here, so these run folded."""
    net = tiny_model(normed_family, width=0.5, normalization=normalization)
    block = block_weights(net, DEVICES)
    if not training:
        block = with_statistics(net, block)
    assert_block_matches_single_devices(net, block, images(net.input_shape), training, pick_device)


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_folding_default_settings_match_single_devices(
    family: str,
    training: bool,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    """Also families without a choice of normalization."""
    net = tiny_model(family, width=0.5)
    block = with_statistics(net, block_weights(net, DEVICES))
    assert_block_matches_single_devices(net, block, images(net.input_shape), training, pick_device)


def test_batch_statistics_of_block_match_single_devices(
    normed_family: str,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    net = tiny_model(normed_family, normalization="static_batch")
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    together = net.batch_statistics(block, x)
    assert {name: tensor.shape[1:] for name, tensor in together.items()} == dict(net.statistics())
    for number in range(DEVICES):
        alone = net.batch_statistics(pick_device(block, number), x[number : number + 1])
        for name, tensor in alone.items():
            assert float((tensor[0] - together[name][number]).abs().max()) <= 1e-10


def test_block_nonfinite_device_leaves_others_unchanged(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    broken = {name: tensor.clone() for name, tensor in block.items()}
    for tensor in broken.values():
        tensor[1] = torch.nan
    step_seeds = StepSeeds((1, 2, 3))
    clean, dirty = outputs_and_gradients(net, block, x, step_seeds), outputs_and_gradients(net, broken, x, step_seeds)
    for of_clean, of_dirty in zip(clean, dirty, strict=True):
        for name, tensor in of_clean.items():
            assert torch.equal(of_dirty[name][[0, 2]], tensor[[0, 2]])
    exits = [tensor for name, tensor in dirty[0].items() if name.startswith("exit")]
    assert exits
    assert all(bool(tensor[1].isnan().all()) for tensor in exits)


class Concatenating(nn.Module):
    """Folded devices would exchange channels."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
        self.after, self.classifier = nn.Conv2d(4, 3, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        result = self.after(torch.cat([self.left(x), self.right(x)], 1))
        return self.classifier(result.mean((-2, -1)))


def concatenating() -> nn.Module:
    return Concatenating()


def layer_normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5, elementwise_affine=False), nn.ReLU(), nn.Linear(5, 4)
    )


class ChannelMean(nn.Module):
    """Squeeze and excitation with one number per image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(1, 3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        result = self.conv(x)
        return self.classifier((result * result.mean((1, 2, 3), keepdim=True).sigmoid()).mean((-2, -1)))


def channel_mean() -> nn.Module:
    return ChannelMean()


class Viewing(nn.Module):
    """Needs contiguous images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(1, 2, 3), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv(x).relu().view(len(x), -1))


def viewing() -> nn.Module:
    return Viewing()


class Blurring(nn.Module):
    """Has a constant filter, which is neither trained nor sent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.tensor([[[[0.0, 0.1, 0.0], [0.1, 0.6, 0.1], [0.0, 0.1, 0.0]]]]))
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.conv2d(x, self.kernel).flatten(1))


def blurring() -> nn.Module:
    return Blurring()


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_module_with_constant_buffers_matches_single_devices(
    training: bool, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """The module's constants have the precision it runs in, whatever a trial uses."""
    net = stranger(blurring)
    assert set(net.shapes()) == {"classifier.weight", "classifier.bias"}
    block, x = block_weights(net, DEVICES, torch.float32), images(net.input_shape).float()
    step_seeds = StepSeeds((1, 2, 3)) if training else None
    result = net(block, x, step_seeds).logits
    for device in range(DEVICES):
        module = net.module()
        module.load_state_dict({name: tensor[device] for name, tensor in block.items()}, strict=False)
        assert torch.allclose(result[device], module(x[device]), atol=1e-5)


class Centring(nn.Module):
    """Subtracts the mean over the batch of its own device, not of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier((x - x.mean()).flatten(1))


def centring() -> nn.Module:
    return Centring()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(x.flatten(1) if x.mean() > 0 else -x.flatten(1))


def branching() -> nn.Module:
    return Branching()


def recurrent() -> nn.Module:
    return Recurrent()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(6, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x.squeeze(1))[0][:, -1])


def stranger(build: Callable[[], nn.Module], input_shape: tuple[int, ...] = (1, 6, 6)) -> Model:
    """A new model: trial results are cached, and warnings are issued only once."""
    return build_model(f"{build.__name__} {next(NUMBERS)}", build, {}, input_shape, 4)


# how many faster modes fail before one is correct
FALLBACKS = [(concatenating, 1), (layer_normed, 1), (channel_mean, 1), (viewing, 1), (recurrent, 2)]


@pytest.mark.parametrize(("build", "given_up"), FALLBACKS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_unfoldable_module_gives_reasons_and_matches_single_devices(
    build: Callable[[], nn.Module],
    given_up: int,
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = stranger(build)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    assert_block_matches_single_devices(net, block, x, True, pick_device)
    assert caplog.messages == []  # the engine says what is slow, once
    name, reasons = type(net.module()).__name__, net.fallback_reasons()
    tried = ("folded", "run by vmap")[:given_up]
    assert len(reasons) == given_up
    assert all(reason.startswith(f"{name} cannot be {way}: ") for reason, way in zip(reasons, tried, strict=True))


def test_one_by_one_reason_names_layer_and_operation() -> None:
    assert stranger(recurrent).one_by_one_reason() == (
        "lstm (LSTM) uses lstm, which torch cannot run for many devices at once"
    )
    assert stranger(branching).one_by_one_reason() == "Branching branches on the values of a tensor"
    assert stranger(concatenating).one_by_one_reason() is None


def test_fallback_reasons_builtin_family_are_empty(family: str, tiny_model: Callable[..., Model]) -> None:
    assert tiny_model(family).fallback_reasons() == ()


def test_module_with_batch_statistics_sees_only_its_device(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """The devices of a trial need different examples: otherwise this module would look correct."""
    net = stranger(centring)
    assert_block_matches_single_devices(net, block_weights(net, DEVICES), images(net.input_shape), True, pick_device)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.classifier = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.second(self.first(x).tanh()).tanh())


def tied() -> nn.Module:
    return Tied()


def test_tied_weight_has_one_name_and_summed_gradient(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    net = stranger(tied, (5,))
    assert set(net.shapes()) == {"first.weight", "first.bias", "classifier.weight", "classifier.bias"}
    block, x = block_weights(net, DEVICES), images((5,))
    assert_block_matches_single_devices(net, block, x, True, pick_device)
    module = net.module().double()
    module.load_state_dict({name: tensor[1] for name, tensor in block.items()}, strict=False)
    module(x[1]).sin().sum().backward()
    leaves = {name: tensor.requires_grad_() for name, tensor in block.items()}
    net(leaves, x, StepSeeds((0, 0, 0))).logits.sin().sum().backward()
    for name, weight in module.named_parameters():
        assert torch.allclose(leaves[name].grad[1], weight.grad, atol=1e-10)  # type: ignore[index]


def dropping(chance: float) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(chance), nn.Linear(8, 4))


def dropout_model(chance: float) -> Model:
    return build_model("dropping", dropping, {"chance": chance}, (5,), 4)


@pytest.mark.parametrize("chance", [0.5, 0.001])
def test_dropout_in_block_uses_each_devices_seed(
    chance: float, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Also with rare drops: detecting random layers must not depend on chance."""
    net = dropout_model(chance)
    block, x = block_weights(net, DEVICES), images((5,), batch=2000)
    first = net(block, x, StepSeeds((1, 2, 3))).logits
    assert torch.equal(net(block, x, StepSeeds((1, 2, 3))).logits, first)
    assert not torch.equal(net(block, x, StepSeeds((1, 2, 4))).logits[2], first[2])
    assert torch.equal(net(block, x, StepSeeds((1, 2, 4))).logits[:2], first[:2])
    alone = net(pick_device(block, 1), x[1:2], StepSeeds((2,))).logits
    assert torch.allclose(alone[0], first[1], rtol=0, atol=1e-10)  # masks are equal to the bit: test_randomness.py


def test_dropout_leaves_global_generator_unchanged(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = dropout_model(0.5)
    before = torch.random.get_rng_state()
    net(block_weights(net, DEVICES), images((5,)), StepSeeds((1, 2, 3)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_dropout_in_evaluation_is_off(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net, still = dropout_model(0.5), dropout_model(0.0)
    block, x = block_weights(net, DEVICES), images((5,))
    assert torch.equal(net(block, x).logits, still(block, x).logits)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The modules of which batching modes were tried, starting with empty caches."""
    caches = (
        batching._functional_module,
        batching._single_device_forward,
        batching._multi_device_forward,
        batching.batching_mode,
        batching._mode_trials,
        batching._kind,
    )
    tried: list[nn.Module] = []

    def watched(module: FunctionalModule, *arguments: Any) -> Any:
        tried.append(module.module)
        return choose_mode(module, *arguments)

    monkeypatch.setattr(batching, "choose_mode", watched)
    monkeypatch.setattr(batching, "trials_per_kind", lambda kind: 2)
    for cache in caches:
        cache.cache_clear()
    yield tried
    for cache in caches:
        cache.cache_clear()


def test_trials_many_subnets_of_a_kind_stop_early_and_stay_correct(
    trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Otherwise a method that samples a subnet in each step would mostly run trials."""
    sizes = {"widths": ((2, 4), (4, 6)), "depths": ((1,), (1, 2)), "kernels": ((3, 5), (3, 5, 7))}
    largest = {"stem": 3, "widths": (4, 6), "depths": (1, 2), "kernels": (5, 7)}
    whole, drawn = build_model("mobilenet", mobilenet, largest, (1, 8, 8), 4), generator(0, "subnets")
    nets = {make_space(sizes).sample(whole, drawn) for _ in range(20)}
    for net in nets:
        assert_block_matches_single_devices(
            net, block_weights(net, DEVICES), images(net.input_shape), True, pick_device
        )
    # kinds of blocks: with or without a change of width, with or without stride
    assert 0 < len(trials) <= 2 * 4 < len(nets)


def test_trials_of_deep_nets_answer_for_nets_of_fewer_kinds_of_layers(trials: list[nn.Module]) -> None:
    """But not the other way round: shallow nets have no block that keeps its width."""

    def nets(depth: int) -> list[Model]:
        sizes = [{"stem": 3, "kernels": (3, 3), "widths": (w, w + 2), "depths": (depth, depth)} for w in (4, 5, 6)]
        return [build_model("mobilenet", mobilenet, size, (1, 8, 8), 4) for size in sizes]

    def tried(*models: Model) -> int:
        before = len(trials)
        for model in models:
            batching.batching_mode(model, True, False)
        return len(trials) - before

    assert (tried(*nets(2)), tried(*nets(1))) == (2, 0)
    batching._mode_trials.cache_clear()
    batching.batching_mode.cache_clear()
    assert (tried(*nets(1)), tried(*nets(2))) == (2, 2)


def dilated(width: int, dilation: tuple[int, int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, width, 3, dilation=dilation), nn.Flatten(), nn.LazyLinear(4))


def cells(width: int, count: tuple[int, int]) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.AdaptiveAvgPool2d(count), nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize("build", [dilated, cells])
def test_trials_of_nets_with_lane_kernels_do_not_answer_for_those_without(
    build: Callable[..., nn.Module], trials: list[nn.Module]
) -> None:
    """Whose layers differ in a pair of numbers, which as a rule is a size."""
    pytest.importorskip("numba")
    settings = [{"width": 4, "how": (1, 1)}, {"width": 6, "how": (1, 1)}, {"width": 8, "how": (2, 2)}]

    def family(width: int, how: tuple[int, int]) -> nn.Module:
        module = build(width, how)
        module(torch.zeros(1, 1, 8, 8))  # gives the last layer its size
        return module

    modes = [
        batching.batching_mode(replace(build_model("own", family, one, (1, 8, 8), 4), kernels="lanes"), True, False)[0]
        for one in settings
    ]
    assert modes[:2] == [batching.interleave_devices] * 2
    assert modes[2] is not batching.interleave_devices


def sometimes_dropping(depth: int, width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(5, width)]
    if depth > 2:
        layers += [nn.Dropout(0.5), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def test_mode_of_a_net_does_not_depend_on_which_came_before(trials: list[nn.Module]) -> None:
    def found(*depths: int) -> list[Any]:
        for cache in (batching._mode_trials, batching.batching_mode, batching._draw_trials, batching.is_stochastic):
            cache.cache_clear()
        sizes = [{"depth": depth, "width": width} for width, depth in enumerate(depths, 4)]
        return [
            batching.batching_mode(build_model("dropping", sometimes_dropping, size, (5,), 4), True, False)
            for size in sizes
        ]

    assert found(2) == found(3, 3, 2)[2:]


class Perhaps(nn.Module):
    """Mixes all channels if a string or a fraction says so."""

    def __init__(self, width: int, how: Any):
        super().__init__()
        self.body, self.classifier, self._mixes = nn.Linear(5, width), nn.Linear(width, 4), how in ("mixing", 0.5, 1)
        self.constant = torch.zeros(2, 2)  # no buffer; comparing it with a number has no truth value

    def forward(self, x: Tensor) -> Tensor:
        result = self.body(x)
        return self.classifier(result - result.mean(1, keepdim=True) if self._mixes else result)


def perhaps(width: int, how: Any) -> nn.Module:
    return Perhaps(width, how)


class OddOnesMix(Perhaps):
    """Mixes all channels if their number is odd."""

    def forward(self, x: Tensor) -> Tensor:
        result = self.body(x)
        return self.classifier(result - result.mean(1, keepdim=True) if self.body.out_features % 2 else result)


def odd_ones_mix(width: int) -> nn.Module:
    return OddOnesMix(width, "apart")


@pytest.mark.parametrize("how", [("apart", "mixing"), (0.25, 0.5), (False, True), (0, 1)])
def test_trials_setting_that_is_no_size_gets_its_own_trial(
    how: tuple[Any, Any], trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    for value in how:
        for width in (6, 7, 8):
            net = build_model("perhaps", perhaps, {"width": width, "how": value}, (5,), 4)
            assert_block_matches_single_devices(net, block_weights(net, DEVICES), images((5,)), True, pick_device)
    assert len(trials) == 2 * 2


def test_trials_disagreeing_sizes_are_each_tried(
    trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    for width in (6, 7, 8, 9):
        net = build_model("odd_ones_mix", odd_ones_mix, {"width": width}, (5,), 4)
        assert_block_matches_single_devices(net, block_weights(net, DEVICES), images((5,)), True, pick_device)
    assert len(trials) == 4


class TwoExits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.early, self.late = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Outputs:
        features = F.relu(self.body(x))
        return Outputs({"early": self.early(features), "late": self.late(features)}, {"features": features})


def two_exits() -> nn.Module:
    return TwoExits()


def test_outputs_exits_and_taps_have_leading_device_axis(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    net = stranger(two_exits, (5,))
    block, x = block_weights(net, DEVICES), images((5,))
    assert_block_matches_single_devices(net, block, x, True, pick_device)
    result = net(block, x, StepSeeds((0, 0, 0)))
    assert {name: tuple(t.shape) for name, t in result.exits.items()} == {"early": (3, 5, 4), "late": (3, 5, 4)}
    assert tuple(result.taps["features"].shape) == (3, 5, 6)
    assert result.logits is result.exits["late"]


def test_outputs_plain_tensor_is_one_exit(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(tied, (5,))
    result: Any = net(block_weights(net, 1), images((5,), devices=1), StepSeeds((0,)))
    assert list(result.exits) == ["logits"]
    assert tuple(result.logits.shape) == (1, 5, 4)

"""A block of devices makes what each device makes alone, whichever way its module can run."""

from collections.abc import Callable, Iterator
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
from tests.models.alone import Pick, assert_block_is_each_alone, outputs_and_slopes

DEVICES = 3
NUMBERS = count()


def images(shape: tuple[int, ...], batch: int = 5, devices: int = DEVICES) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    offsets = torch.arange(devices, dtype=torch.float64).view(-1, *[1] * (len(shape) + 1))
    return torch.randn(devices, batch, *shape, generator=draw, dtype=torch.float64) + offsets


def with_statistics(net: Model, block: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(8)
    devices = len(next(iter(block.values())))
    found = {
        name: torch.rand(devices, *shape, generator=draw, dtype=torch.float64) + 0.5
        for name, shape in net.statistics().items()
    }
    return {**block, **found}


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
@pytest.mark.parametrize("normalization", get_args(Normalization))
def test_families_fold(
    normed_family: str,
    normalization: str,
    training: bool,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    """A warning would be an error here, so these run folded."""
    net = tiny_model(normed_family, width=0.5, normalization=normalization)
    block = block_weights(net, DEVICES)
    if not training:
        block = with_statistics(net, block)
    assert_block_is_each_alone(net, block, images(net.input_shape), training, pick_device)


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_families_fold_as_they_are(
    family: str,
    training: bool,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Pick,
) -> None:
    """Those too that have no normalization to choose."""
    net = tiny_model(family, width=0.5)
    block = with_statistics(net, block_weights(net, DEVICES))
    assert_block_is_each_alone(net, block, images(net.input_shape), training, pick_device)


def test_batch_statistics_of_a_block_are_each_devices_own(
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


def test_a_broken_device_leaves_its_neighbours_clean(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    broken = {name: tensor.clone() for name, tensor in block.items()}
    for tensor in broken.values():
        tensor[1] = torch.nan
    step_seeds = StepSeeds((1, 2, 3))
    clean, dirty = outputs_and_slopes(net, block, x, step_seeds), outputs_and_slopes(net, broken, x, step_seeds)
    for of_clean, of_dirty in zip(clean, dirty, strict=True):
        for name, tensor in of_clean.items():
            assert torch.equal(of_dirty[name][[0, 2]], tensor[[0, 2]])
    exits = [tensor for name, tensor in dirty[0].items() if name.startswith("exit")]
    assert exits
    assert all(bool(tensor[1].isnan().all()) for tensor in exits)


class Concatenating(nn.Module):
    """Devices folded side by side would swap channels with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 2, 3)
        self.after, self.classifier = nn.Conv2d(4, 3, 1), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.after(torch.cat([self.left(x), self.right(x)], 1))
        return self.classifier(made.mean((-2, -1)))


def concatenating() -> nn.Module:
    return Concatenating()


def layer_normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5, elementwise_affine=False), nn.ReLU(), nn.Linear(5, 4)
    )


class ChannelMean(nn.Module):
    """Squeeze and excite by one number an image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(1, 3, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x)
        return self.classifier((made * made.mean((1, 2, 3), keepdim=True).sigmoid()).mean((-2, -1)))


def channel_mean() -> nn.Module:
    return ChannelMean()


class Viewing(nn.Module):
    """Insists on contiguous images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.classifier = nn.Conv2d(1, 2, 3), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.conv(x).relu().view(len(x), -1))


def viewing() -> nn.Module:
    return Viewing()


class Blurring(nn.Module):
    """Has a filter that is no weight: a constant, which is neither trained nor sent."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.tensor([[[[0.0, 0.1, 0.0], [0.1, 0.6, 0.1], [0.0, 0.1, 0.0]]]]))
        self.classifier = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.conv2d(x, self.kernel).flatten(1))


def blurring() -> nn.Module:
    return Blurring()


@pytest.mark.parametrize("training", [True, False], ids=["training", "judging"])
def test_a_module_may_have_constants(
    training: bool, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Whatever precision a trial uses: the module's constants have the one it runs in."""
    net = stranger(blurring)
    assert set(net.shapes()) == {"classifier.weight", "classifier.bias"}
    block, x = block_weights(net, DEVICES, torch.float32), images(net.input_shape).float()
    step_seeds = StepSeeds((1, 2, 3)) if training else None
    made = net(block, x, step_seeds).logits
    for device in range(DEVICES):
        module = net.module()
        module.load_state_dict({name: tensor[device] for name, tensor in block.items()}, strict=False)
        assert torch.allclose(made[device], module(x[device]), atol=1e-5)


class Centring(nn.Module):
    """Takes the mean of its whole batch away: of its own, not of the block's."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier((x - x.mean()).flatten(1))


def centring() -> nn.Module:
    return Centring()


def recurrent() -> nn.Module:
    return Recurrent()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.classifier = nn.LSTM(6, 3, batch_first=True), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.lstm(x.squeeze(1))[0][:, -1])


def stranger(build: Callable[[], nn.Module], input_shape: tuple[int, ...] = (1, 6, 6)) -> Model:
    """A model nobody has tried yet: what is found out of a model is kept, and said once."""
    return build_model(f"{build.__name__} {next(NUMBERS)}", build, {}, input_shape, 4)


# how often a faster way is given up before one gives each device its own
FALLBACKS = [(concatenating, 1), (layer_normed, 1), (channel_mean, 1), (viewing, 1), (recurrent, 2)]


@pytest.mark.parametrize(("build", "given_up"), FALLBACKS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_module_that_cannot_fold_says_so_and_is_right(
    build: Callable[[], nn.Module], given_up: int, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = stranger(build)
    block, x = block_weights(net, DEVICES), images(net.input_shape)
    assert_block_is_each_alone(net, block, x, True, pick_device)
    (slow,) = [message for message in caplog.messages if "slower batching" in message]
    assert slow.count(f"{type(net.module()).__name__} does not run") == given_up
    assert "does not run with fold_devices" in slow
    assert ("does not run with vmap_devices" in slow) is (given_up == 2)
    assert len(net.fallback_reasons()) == given_up


def test_families_have_no_reason_to_be_slow(family: str, tiny_model: Callable[..., Model]) -> None:
    assert tiny_model(family).fallback_reasons() == ()


def test_a_module_that_looks_at_its_whole_batch_sees_its_own_device_alone(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Devices differ in their data: a trial whose devices hold the same examples would not tell them apart."""
    net = stranger(centring)
    assert_block_is_each_alone(net, block_weights(net, DEVICES), images(net.input_shape), True, pick_device)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.classifier = nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.second(self.first(x).tanh()).tanh())


def tied() -> nn.Module:
    return Tied()


def test_a_tied_weight_has_one_name_and_both_gradients(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    net = stranger(tied, (5,))
    assert set(net.shapes()) == {"first.weight", "first.bias", "classifier.weight", "classifier.bias"}
    block, x = block_weights(net, DEVICES), images((5,))
    assert_block_is_each_alone(net, block, x, True, pick_device)
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
def test_dropout_draws_from_each_devices_own_seed(
    chance: float, block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Also a rare drop: whether a layer is random is not for chance to find out."""
    net = dropout_model(chance)
    block, x = block_weights(net, DEVICES), images((5,), batch=2000)
    first = net(block, x, StepSeeds((1, 2, 3))).logits
    assert torch.equal(net(block, x, StepSeeds((1, 2, 3))).logits, first)
    assert not torch.equal(net(block, x, StepSeeds((1, 2, 4))).logits[2], first[2])
    assert torch.equal(net(block, x, StepSeeds((1, 2, 4))).logits[:2], first[:2])
    alone = net(pick_device(block, 1), x[1:2], StepSeeds((2,))).logits
    assert torch.equal(alone[0], first[1])


def test_dropout_leaves_everybody_elses_randomness_alone(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = dropout_model(0.5)
    before = torch.random.get_rng_state()
    net(block_weights(net, DEVICES), images((5,)), StepSeeds((1, 2, 3)))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_dropout_is_off_when_judged(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net, still = dropout_model(0.5), dropout_model(0.0)
    block, x = block_weights(net, DEVICES), images((5,))
    assert torch.equal(net(block, x).logits, still(block, x).logits)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """The modules on which ways of running were tried out, with nothing known from before."""
    caches = (
        batching._functional_module,
        batching._single_device_forward,
        batching._multi_device_forward,
        batching.batching_mode,
        batching._known_modes,
    )
    tried: list[nn.Module] = []

    def watched(module: FunctionalModule, *arguments: Any) -> Any:
        tried.append(module.module)
        return choose_mode(module, *arguments)

    monkeypatch.setattr(batching, "choose_mode", watched)
    monkeypatch.setattr(batching, "TRIALS_PER_KIND", 2)
    for cache in caches:
        cache.cache_clear()
    yield tried
    for cache in caches:
        cache.cache_clear()


def test_few_of_many_sub_nets_are_tried_and_all_are_each_device_alone(
    trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    """Otherwise a method that draws a net for each step does little else than try them."""
    sizes = {"widths": ((2, 4), (4, 6)), "depths": ((1,), (1, 2)), "kernels": ((3, 5), (3, 5, 7))}
    largest = {"stem": 3, "widths": (4, 6), "depths": (1, 2), "kernels": (5, 7)}
    whole, drawn = build_model("mobilenet", mobilenet, largest, (1, 8, 8), 4), generator(0, "sub-nets")
    nets = {make_space(sizes).sample(whole, drawn) for _ in range(20)}
    for net in nets:
        assert_block_is_each_alone(net, block_weights(net, DEVICES), images(net.input_shape), True, pick_device)
    assert 0 < len(trials) <= 2 * 4 < len(nets)  # kinds of blocks: of one width or of two, with a stride or without


class Perhaps(nn.Module):
    """Looks at all channels at once where it is told to, by a word or by a share."""

    def __init__(self, width: int, how: Any):
        super().__init__()
        self.body, self.classifier, self._mixes = nn.Linear(5, width), nn.Linear(width, 4), how in ("mixing", 0.5, 1)
        self.constant = torch.zeros(2, 2)  # a tensor that is no buffer, which is neither equal to a number nor not

    def forward(self, x: Tensor) -> Tensor:
        made = self.body(x)
        return self.classifier(made - made.mean(1, keepdim=True) if self._mixes else made)


def perhaps(width: int, how: Any) -> nn.Module:
    return Perhaps(width, how)


class OddOnesMix(Perhaps):
    """Looks at all channels at once where their number is odd, which shows nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.body(x)
        return self.classifier(made - made.mean(1, keepdim=True) if self.body.out_features % 2 else made)


def odd_ones_mix(width: int) -> nn.Module:
    return OddOnesMix(width, "apart")


@pytest.mark.parametrize("how", [("apart", "mixing"), (0.25, 0.5), (False, True), (0, 1)])
def test_what_is_no_size_is_tried_on_its_own(
    how: tuple[Any, Any], trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    for said in how:
        for width in (6, 7, 8):
            net = build_model("perhaps", perhaps, {"width": width, "how": said}, (5,), 4)
            assert_block_is_each_alone(net, block_weights(net, DEVICES), images((5,)), True, pick_device)
    assert len(trials) == 2 * 2


def test_where_sizes_run_in_different_ways_each_is_tried(
    trials: list[nn.Module], block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    for width in (6, 7, 8, 9):
        net = build_model("odd_ones_mix", odd_ones_mix, {"width": width}, (5,), 4)
        assert_block_is_each_alone(net, block_weights(net, DEVICES), images((5,)), True, pick_device)
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


def test_exits_and_taps_carry_the_devices_in_front(
    block_weights: Callable[..., dict[str, Tensor]], pick_device: Pick
) -> None:
    net = stranger(two_exits, (5,))
    block, x = block_weights(net, DEVICES), images((5,))
    assert_block_is_each_alone(net, block, x, True, pick_device)
    made = net(block, x, StepSeeds((0, 0, 0)))
    assert {name: tuple(t.shape) for name, t in made.exits.items()} == {"early": (3, 5, 4), "late": (3, 5, 4)}
    assert tuple(made.taps["features"].shape) == (3, 5, 6)
    assert made.logits is made.exits["late"]


def test_a_plain_tensor_is_one_exit(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = stranger(tied, (5,))
    made: Any = net(block_weights(net, 1), images((5,), devices=1), StepSeeds((0,)))
    assert list(made.exits) == ["logits"]
    assert tuple(made.logits.shape) == (1, 5, 4)

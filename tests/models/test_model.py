"""A model is a pure function of its weights, and its inspections are right."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import MODELS, Model, StepSeeds, build_model
from fedloom.models.axes import is_plain
from fedloom.tensors import Tensors
from tests.conftest import smaller_size
from tests.models.conftest import LAST_LAYERS


def test_initial_weights_depend_on_seed(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    first, again, other = net.initial_weights(3), net.initial_weights(3), net.initial_weights(4)
    assert {name: tensor.shape for name, tensor in first.items()} == dict(net.shapes())
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


def test_initial_weights_leave_global_generator_unchanged(family: str, tiny_model: Callable[..., Model]) -> None:
    before = torch.random.get_rng_state()
    tiny_model(family).initial_weights(0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_initial_weights_do_not_depend_on_global_generator(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = net.initial_weights(0)
        torch.manual_seed(2)
        again = net.initial_weights(0)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


@pytest.mark.usefixtures("double")
def test_initial_weights_have_default_dtype(family: str, tiny_model: Callable[..., Model]) -> None:
    assert {tensor.dtype for tensor in tiny_model(family).initial_weights(0).values()} == {torch.float64}


def test_initial_weights_norms_are_neutral(normed_family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(normed_family, normalization="static_batch")
    weights = net.initial_weights(0)
    norms = {name.rpartition(".")[0] for name in net.statistics()}
    assert norms
    for norm in norms:
        first = (
            0 if normed_family == "mobilenet" and norm.endswith("norm2.1") else 1
        )  # its blocks start as their shortcuts
        assert bool((weights[f"{norm}.weight"] == first).all())
        assert bool((weights[f"{norm}.bias"] == 0).all())


def test_initial_weights_classifier_bias_is_zero(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    weights, rows = net.initial_weights(0), net.label_rows()
    assert all(bool((weights[name] == 0).all()) for name in rows if weights[name].dim() == 1)


def test_model_call_leaves_weights_and_inputs_unchanged(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family)
    block, x = block_weights(net, 2), torch.randn(2, 3, *net.input_shape, dtype=torch.float64)
    kept, held = {name: tensor.clone() for name, tensor in block.items()}, x.clone()
    net(block, x, StepSeeds((0, 1)))
    net.batch_statistics(block, x)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in block.items())
    assert torch.equal(x, held)


def test_model_repeated_call_is_bit_identical(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """A call leaves neither weights nor statistics for the next."""
    net = tiny_model(family)
    x = torch.randn(2, 3, *net.input_shape, dtype=torch.float64)
    first = net(block_weights(net, 2, seed=1), x, StepSeeds((0, 1))).logits
    net(block_weights(net, 2, seed=2), x + 3, StepSeeds((2, 3)))
    net.batch_statistics(block_weights(net, 2, seed=3), x)
    assert torch.equal(net(block_weights(net, 2, seed=1), x, StepSeeds((0, 1))).logits, first)


def test_model_training_matches_module_in_train_mode(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family, width=0.5)
    block, x = block_weights(net, 1), torch.randn(1, 5, *net.input_shape, dtype=torch.float64)
    module = net.module().double().train()
    module.load_state_dict({name: tensor[0] for name, tensor in block.items()}, strict=False)
    assert torch.allclose(
        net(block, x, StepSeeds((0,))).logits[0], module(x[0]).logits.movedim(net.class_axis, -1), atol=1e-10
    )


def test_model_evaluation_matches_module_with_statistics(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family, width=0.5)
    x = torch.randn(1, 5, *net.input_shape, dtype=torch.float64)
    statistics = {name: torch.rand(1, *shape, dtype=torch.float64) + 0.5 for name, shape in net.statistics().items()}
    block = {**block_weights(net, 1), **statistics}
    module = net.module().double().eval()
    module.load_state_dict({name: tensor[0] for name, tensor in block.items()}, strict=False)
    assert torch.allclose(net(block, x).logits[0], module(x[0]).logits.movedim(net.class_axis, -1), atol=1e-10)


def test_model_evaluation_without_statistics_raises(
    normed_family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(normed_family, normalization="static_batch")
    first = next(iter(net.statistics()))
    with pytest.raises(ValueError, match=rf"{normed_family} .*{first}"):
        net(block_weights(net, 1), torch.zeros(1, 2, *net.input_shape, dtype=torch.float64))


@pytest.mark.parametrize("normalization", ["group", "instance", "layer", "none"])
def test_model_other_normalizations_need_no_statistics(
    normed_family: str,
    normalization: str,
    tiny_model: Callable[..., Model],
    block_weights: Callable[..., dict[str, Tensor]],
) -> None:
    net = tiny_model(normed_family, normalization=normalization)
    assert net.statistics() == {}
    result = net(block_weights(net, 1), torch.ones(1, 2, *net.input_shape, dtype=torch.float64)).logits
    assert bool(result.isfinite().all())


def test_model_statistics_are_not_weights(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    assert net.shapes().keys().isdisjoint(net.statistics())
    assert all(name.endswith(("running_mean", "running_var")) for name in net.statistics())


class OwnNorm(nn.BatchNorm2d):
    """A user's subclass of batch norm."""


def own_norm() -> nn.Module:
    return nn.Sequential(OwnNorm(2), nn.Flatten(), nn.Linear(18, 3))


def norm_of_volumes() -> nn.Module:
    return nn.Sequential(nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(16, 3))


def tracking_instances() -> nn.Module:
    return nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(18, 3))


@pytest.mark.parametrize(("build", "shape"), [(own_norm, (2, 3, 3)), (norm_of_volumes, (2, 2, 2, 2))])
def test_batch_statistics_every_batch_norm_dimension_is_returned(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Otherwise evaluation would silently use the initial statistics."""
    net = build_model(build.__name__, build, {}, shape, 3)
    x = torch.randn(1, 20, *shape) * 2 + 5
    actual = net.batch_statistics({name: tensor[None] for name, tensor in net.initial_weights(0).items()}, x)
    assert actual.keys() == net.statistics().keys()
    mean, variance = (next(actual[name][0] for name in actual if name.endswith(key)) for key in ("mean", "var"))
    values = x[0].transpose(0, 1).flatten(1)
    assert torch.allclose(mean, values.mean(1), atol=1e-5)
    assert torch.allclose(variance, values.var(1), atol=1e-4)


def test_batch_statistics_names_match_statistics() -> None:
    net = build_model("tracking_instances", tracking_instances, {}, (2, 3, 3), 3)
    block = {name: tensor[None] for name, tensor in net.initial_weights(0).items()}
    assert net.batch_statistics(block, torch.randn(1, 4, 2, 3, 3)).keys() == net.statistics().keys()


def test_label_rows_end_with_last_layer(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    last = LAST_LAYERS.get(family, "classifier")
    assert net.label_rows()[-2:] == (f"{last}.weight", f"{last}.bias")
    assert all(net.shapes()[name][0] == net.classes for name in net.label_rows())


def body_last() -> nn.Module:
    result = nn.Module()
    result.head, result.body = nn.Linear(5, 4), nn.Linear(6, 5)
    return result


def declared() -> nn.Module:
    result = body_last()
    result.label_rows = ("head.weight", "head.bias")  # type: ignore[assignment]
    return result


def bias_free() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4, bias=False))


class Tempered(nn.Linear):
    """A classifier with an extra scalar weight, which has no rows."""

    def __init__(self) -> None:
        super().__init__(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def tempered() -> nn.Module:
    return nn.Sequential(Tempered())


@pytest.mark.parametrize(
    ("build", "rows"),
    [
        (body_last, ()),
        (declared, ("head.weight", "head.bias")),
        (bias_free, ("1.weight",)),
        (tempered, ("0.weight", "0.bias")),
    ],
)
def test_label_rows_are_inferred_or_declared(build: Callable[[], nn.Module], rows: tuple[str, ...]) -> None:
    assert build_model(build.__name__, build, {}, (6,), 4).label_rows() == rows


def test_shapes_builtin_family_stacks_nothing(family: str, tiny_model: Callable[..., Model]) -> None:
    shapes = tiny_model(family).shapes()
    assert all(is_plain(layout) for axes in shapes.layouts.values() for layout in axes.values())


def test_with_settings_changes_size_of_same_family(family: str, tiny_model: Callable[..., Model]) -> None:
    net = tiny_model(family)
    size = smaller_size(family)
    assert net.with_settings(**size) == tiny_model(family, **size)
    assert net == tiny_model(family)


def free_of_facts(hidden: int = 2) -> nn.Module:
    return nn.Linear(hidden, 3)


def test_build_model_passes_data_properties_only_to_named_parameters() -> None:
    net = build_model("free", free_of_facts, {"hidden": 5}, (5,), 3)
    assert dict(net.settings) == {"hidden": 5}
    taken = build_model("convnet", MODELS["convnet"], {}, (2, 6, 6), 3)
    assert dict(taken.settings) == {"input_shape": (2, 6, 6), "classes": 3}


def test_model_equality_is_by_value(tiny_model: Callable[..., Model]) -> None:
    assert hash(tiny_model("convnet")) == hash(tiny_model("convnet"))
    assert tiny_model("convnet") != replace(tiny_model("convnet"), classes=5)


def test_model_result_does_not_depend_on_memory_layout(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    """Weights that all devices share are expanded, not copied."""
    net = tiny_model(family)
    one = {name: tensor[0] for name, tensor in block_weights(net, 1).items()}
    expanded: Tensors = {name: tensor.expand(3, *tensor.shape) for name, tensor in one.items()}
    copied = {name: tensor.clone() for name, tensor in expanded.items()}
    x = torch.randn(3, 4, *net.input_shape, dtype=torch.float64)
    assert torch.equal(net(expanded, x, StepSeeds((0, 0, 0))).logits, net(copied, x, StepSeeds((0, 0, 0))).logits)


class Scaled(nn.Linear):
    """Has a constant that the backward pass needs."""

    def __init__(self) -> None:
        super().__init__(5, 4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scaled() -> nn.Module:
    return nn.Sequential(Scaled())


@pytest.mark.parametrize("devices", [1, 2])
def test_model_after_inference_mode_can_be_differentiated(devices: int) -> None:
    """Evaluation runs without autograd; its cached modules must still work for a teacher's pass with autograd."""
    net = build_model(f"scaled{devices}", scaled, {}, (5,), 4)
    block = {name: torch.stack([tensor] * devices) for name, tensor in net.initial_weights(0).items()}
    x = torch.ones(devices, 3, 5)
    with torch.inference_mode():
        net(block, x)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in block.items()}
    net(leaves, x).logits.sum().backward()
    for device in range(devices):
        assert leaves["0.bias"].grad[device].tolist() == [3.0, 6.0, 9.0, 12.0]  # type: ignore[index]


def grumbling() -> nn.Module:
    warnings.warn("an old name\n    of a library", FutureWarning, stacklevel=1)
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 4))


def test_model_whose_library_warns_says_so_once_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """A model is built many times, and a raw warning would appear every time."""
    with warnings.catch_warnings(record=True) as raw:
        warnings.simplefilter("always")
        for seed in range(3):
            net = build_model("grumbling", grumbling, {}, (5,), 4)
            net.module(seed)
        net(
            {name: weight.unsqueeze(0) for name, weight in net.initial_weights(0).items()},
            torch.ones(1, 3, 5),
            StepSeeds((0,)),
        )
    assert raw == []
    assert caplog.messages == ["building grumbling: an old name of a library"]

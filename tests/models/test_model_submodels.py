"""A child of a module as a model of its own."""

import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedloom.models import Model, StepSeeds, build_model, compute_cost


class Halves(nn.Module):
    """Its children have different input shapes, and some cannot run on their own."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, units), nn.ReLU())
        self.right = nn.Sequential(nn.BatchNorm1d(units), nn.Linear(units, 3))
        self.twice, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.right(self.left(self.twice(self.twice(x))))
        return result


def halves(units: int = 5) -> nn.Module:
    return Halves(units)


def net_of(units: int = 4) -> Model:
    return build_model("halves", halves, {"units": units}, (6,), 3)


def test_submodel_equality_is_by_value() -> None:
    left, again = net_of().submodel("left"), net_of().submodel("left")
    assert left == again and hash(left) == hash(again)
    assert left != net_of().submodel("right") and left != net_of(5).submodel("left")
    assert pickle.loads(pickle.dumps(left)) == left  # noqa: S301


def test_submodel_input_shape_and_classes_are_inferred() -> None:
    left, right = net_of().submodel("left"), net_of().submodel("right")
    assert (left.family, left.input_shape, left.classes) == ("halves.left", (6,), 4)
    assert (right.family, right.input_shape, right.classes) == ("halves.right", (4,), 3)
    assert {name: tuple(shape) for name, shape in left.shapes().items()} == {"0.weight": (4, 6), "0.bias": (4,)}
    assert set(right.statistics()) == {"0.running_mean", "0.running_var"}
    assert right.label_rows() == ("1.weight", "1.bias")
    assert (compute_cost(left).macs, compute_cost(right).macs) == (24, 12)


def test_submodel_initial_weights_match_parent() -> None:
    net = net_of()
    expected, drawn = net.submodel_weights("right", net.initial_weights(3)), net.submodel("right").initial_weights(3)
    assert drawn.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in drawn.items())


def test_submodel_weights_and_statistics_lose_prefix(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net = net_of()
    weights = block_weights(net, 2)
    weights |= net.batch_statistics(weights, torch.randn(2, 4, 6, dtype=torch.float64))
    weights["rightmost.bias"] = torch.zeros(2)
    actual = net.submodel_weights("right", weights)
    assert set(actual) == {"0.weight", "0.bias", "0.running_mean", "0.running_var", "1.weight", "1.bias"}
    assert all(tensor is weights[f"right.{name}"] for name, tensor in actual.items())


def test_submodel_runs_blocks_and_trains(block_weights: Callable[..., dict[str, Tensor]]) -> None:
    net, x = net_of(), torch.randn(3, 5, 6, dtype=torch.float64)
    leaves = {name: tensor.requires_grad_() for name, tensor in block_weights(net, 3).items()}
    step_seeds, result = StepSeeds((0, 0, 0)), x
    for name in ("twice", "twice", "left", "right"):
        child = net.submodel(name) if name != "twice" else build_model("linear", linear, {}, (6,), 6)
        result = child(net.submodel_weights(name, leaves), result, step_seeds).logits
    whole = net(leaves, x, step_seeds).logits
    assert torch.allclose(result, whole, atol=1e-12)
    used = [tensor for name, tensor in leaves.items() if not name.startswith("unused")]
    gradients = [torch.autograd.grad(one.sin().sum(), used) for one in (result, whole)]
    assert all(torch.allclose(left, right, atol=1e-12) for left, right in zip(*gradients, strict=True))


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def test_submodel_unknown_child_raises() -> None:
    net = net_of()
    assert net.has_children() and net.has_children("left", "right") and not net.has_children("left", "middle")
    assert not net.has_children("left.0")
    for ask in (net.submodel, lambda name: net.submodel_weights(name, {})):
        with pytest.raises(ValueError, match="halves has no child module 'middle'; it has: left, right, twice, unused"):
            ask("middle")


@pytest.mark.parametrize(("name", "tensors"), [("twice", 2), ("unused", 0)])
def test_submodel_child_not_called_once_raises(name: str, tensors: int) -> None:
    with pytest.raises(ValueError, match=f"{name} .* gives it {tensors} tensors"):
        net_of().submodel(name)


def test_submodel_settings_match_parent() -> None:
    child = build_model("halves", halves, {}, (6,), 3).submodel("left")
    assert child.settings == ()
    assert child.full_settings() == {"units": 5}
    assert list(inspect.signature(child.build).parameters) == ["units"]


def test_submodel_classifier_of_every_family_runs(
    family: str, tiny_model: Callable[..., Model], block_weights: Callable[..., dict[str, Tensor]]
) -> None:
    net = tiny_model(family)
    if family == "columnnet":  # its last layer is inside a column, and only a part of the logits
        with pytest.raises(ValueError, match="columnnet has no child module 'classifier'; it has: columns"):
            net.submodel("classifier")
        return
    block, x = block_weights(net, 2), torch.randn(2, 3, *net.input_shape, dtype=torch.float64)
    result, head = net(block, x, StepSeeds((0, 0))), net.submodel("classifier")
    assert head.classes == net.classes or net.class_axis == 1  # a child returns maps as its module does
    alone = head(net.submodel_weights("classifier", block), result.taps["features"], StepSeeds((0, 0)))
    classes_last = alone.logits.movedim(2, -1) if net.class_axis == 1 else alone.logits
    assert torch.allclose(classes_last, result.logits, atol=1e-12)

"""The one training loop."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.client import (
    Batch,
    Client,
    CrossEntropy,
    Schedule,
    Sgd,
    Step,
    distance,
    draw_plan,
    fit,
    gradient,
    label_loss,
    mask_logits,
    merge_plans,
    shaped,
    soft_cross_entropy,
    supervised_loss,
)
from fedloom.client.fit import _only_entries
from fedloom.client.optimizers import Adam
from fedloom.data import Examples, Preparation
from fedloom.models import Model, StepSeeds, build_model
from fedloom.seeds import generator
from fedloom.tensors import Tensors, combine

Pick = Callable[[Tensors, int], dict[str, Tensor]]
pytestmark = pytest.mark.usefixtures("double")


def linear() -> nn.Module:
    return nn.Linear(3, 4)


def toy() -> tuple[Model, Examples]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=draw, dtype=torch.float64)
    return build_model("linear", linear, {}, (3,), 4), Examples(x, torch.arange(60) % 4)


def steps_for(counts: list[int], schedule: Schedule, examples: Examples) -> tuple[Step, ...]:
    """Devices whose rows follow each other."""
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return merge_plans(
        [
            draw_plan(torch.arange(start, start + count), schedule, examples, Preparation(), generator(number, "plan"))
            for number, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_fit_one_device_matches_a_plain_torch_loop(name: str, client_for: Callable[..., Client]) -> None:
    net, examples = toy()
    steps = steps_for([10], Schedule(4, 3), examples)
    optimizer = Sgd(0.1, 0.9, 5e-4, 1.0) if name == "sgd" else Adam(0.01, weight_decay=1e-3, clip_norm=0.5)
    client = client_for(net, examples, steps, optimizer)
    start = {key: tensor[None] for key, tensor in net.initial_weights(0).items()}
    made = fit(client, start, label_loss(client))
    module = net.module().double()
    module.load_state_dict(net.initial_weights(0))
    theirs: Any = (
        torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        if name == "sgd"
        else torch.optim.Adam(module.parameters(), 0.01, weight_decay=1e-3)
    )
    for step in steps:
        theirs.zero_grad()
        F.cross_entropy(module(examples.x[step.rows[0]]), examples.y[step.rows[0]]).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0 if name == "sgd" else 0.5)
        theirs.step()
    for key, weight in module.named_parameters():
        assert float((made[key][0] - weight.detach()).abs().max()) <= 1e-12


def test_fit_given_weights_are_not_modified(client_for: Callable[..., Client], bits_equal: Callable[..., bool]) -> None:
    net, examples = toy()
    client = client_for(net, examples, steps_for([10, 10], Schedule(4, 2), examples))
    shared = net.initial_weights(0)
    start = {key: tensor.expand(2, *tensor.shape) for key, tensor in shared.items()}
    kept = combine(torch.clone, start)
    made = fit(client, start, label_loss(client))
    assert all(bits_equal(start[key], kept[key]) for key in kept)
    assert all(not torch.equal(made[key], kept[key]) for key in kept)
    assert not any(tensor.requires_grad for tensor in made.values())


@pytest.mark.parametrize("last", ["drop", "wrap"])
@pytest.mark.parametrize("optimizer", [Sgd(0.1, 0.9, 5e-4, 1.0), Adam(0.01)], ids=["sgd", "adam"])
def test_fit_devices_of_unequal_size_match_single_devices(
    optimizer: Any, last: Any, client_for: Callable[..., Client], block_weights: Callable[..., Any], pick_device: Pick
) -> None:
    net, examples = toy()
    counts, schedule = [7, 22, 12], Schedule(5, 2, last)
    steps = steps_for(counts, schedule, examples)
    client = client_for(net, examples, steps, optimizer)
    start = block_weights(net, 3)
    block = fit(client, start, label_loss(client))
    for device in range(3):
        own = tuple(
            Step(
                step.rows[device : device + 1],
                torch.ones(1),
                {},
                StepSeeds(step.step_seeds.per_device[device : device + 1]),
            )
            for step in steps
            if step.active[device]
        )
        alone = client_for(net, examples, own, optimizer)
        made = fit(alone, pick_device(start, device), label_loss(alone))
        for name, tensor in made.items():
            assert float((tensor[0] - block[name][device]).abs().max()) <= 1e-10


def test_fit_objective_returning_a_gradient_is_used(
    client_for: Callable[..., Client], block_weights: Callable[..., Any]
) -> None:
    net, examples = toy()
    client = client_for(net, examples, steps_for([8, 8], Schedule(4), examples), Sgd(0.1, 0.9, 5e-4, 1.0))
    start, loss = block_weights(net, 2), label_loss(client)
    by_hand = fit(client, start, lambda weights, batch: gradient(loss, weights, batch))
    by_loss = fit(client, start, loss)
    assert all(torch.equal(by_hand[name], by_loss[name]) for name in by_loss)


def test_gradient_block_equals_single_devices(
    client_for: Callable[..., Client], block_weights: Callable[..., Any]
) -> None:
    net, examples = toy()
    client = client_for(net, examples, steps_for([8, 8, 8], Schedule(8), examples))
    weights, batch = block_weights(net, 3), client.batch(client.plan[0])
    slopes = gradient(label_loss(client), weights, batch)
    for device in range(3):
        leaves = {name: tensor[device].clone().requires_grad_() for name, tensor in weights.items()}
        loss = F.cross_entropy(batch.x[device] @ leaves["weight"].T + leaves["bias"], batch.y[device])
        loss.backward()
        for name, leaf in leaves.items():
            assert torch.allclose(slopes[name][device], leaf.grad, atol=1e-12)


def test_gradient_unused_weight_is_zero() -> None:
    weights = {"used": torch.ones(2, 1), "idle": torch.ones(2, 3)}
    batch = Batch(torch.zeros(2, 1, 1), torch.zeros(2, 1, dtype=torch.int64))
    slopes = gradient(lambda w, b: w["used"].flatten(1).sum(1), weights, batch)
    assert slopes["used"].tolist() == [[1.0], [1.0]]
    assert slopes["idle"].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(
    "reduce", [torch.mean, lambda each: each, lambda each: each.mean(1, keepdim=True), lambda each: each.mean(0)]
)
def test_gradient_loss_of_wrong_shape_is_refused(devices: int, reduce: Callable[[Tensor], Tensor]) -> None:
    weights = {"w": torch.ones(devices, 1)}
    batch = Batch(torch.ones(devices, 5, 1), torch.zeros(devices, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="one number per device"):
        gradient(lambda w, b: reduce((b.x * w["w"][:, None]).squeeze(-1)), weights, batch)


def test_gradient_under_no_grad_is_computed() -> None:
    batch = Batch(torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        slopes = gradient(lambda w, b: w["w"].square().sum(1), {"w": torch.tensor([[3.0]])}, batch)
    assert slopes["w"].tolist() == [[6.0]]


def test_cross_entropy_block_is_mean_of_each_batch() -> None:
    logits, y = torch.randn(3, 5, 4), torch.randint(0, 4, (3, 5))
    made = supervised_loss(logits, Batch(torch.zeros(3, 5), y))
    for device in range(3):
        total = 0.0
        for example in range(5):
            scores = logits[device, example]
            total += float(scores.exp().sum().log() - scores[y[device, example]])
        assert float(made[device]) == pytest.approx(total / 5, abs=1e-12)


@pytest.mark.parametrize("fill", [0.0, -1.5, float("-inf")])
def test_mask_logits_fill_replaces_unseen_classes_per_device(fill: float) -> None:
    logits = torch.randn(2, 3, 4)
    seen = torch.tensor([[True, False, True, True], [False, False, True, False]])
    made = mask_logits(logits, seen, fill)
    for device in range(2):
        for example in range(3):
            for label in range(4):
                expected = logits[device, example, label] if seen[device, label] else fill
                assert float(made[device, example, label]) == float(expected)


def test_mask_logits_no_fill_returns_logits() -> None:
    logits = torch.randn(2, 3, 4)
    assert torch.equal(mask_logits(logits, torch.zeros(2, 4, dtype=torch.bool), None), logits)


def test_shaped_named_axes_resolve_to_classes_and_examples() -> None:
    sent = shaped(
        seen=(("classes",), torch.bool),
        rows=(("examples", 2), torch.float32),
        table=((3, "classes"), torch.float32),
        one=((), torch.int64),
    )
    assert sent(toy()[0], {}, 7) == {
        "seen": ((4,), torch.bool),
        "rows": ((7, 2), torch.float32),
        "table": ((3, 4), torch.float32),
        "one": ((), torch.int64),
    }


def test_client_batch_reads_only_planned_rows(client_for: Callable[..., Client]) -> None:
    net, examples = toy()
    client = client_for(net, examples, steps_for([6, 6], Schedule(3), examples))
    batch = client.batch(client.plan[1])
    assert torch.equal(batch.x, examples.x[client.plan[1].rows])
    assert torch.equal(batch.y, examples.y[client.plan[1].rows])
    assert batch.step_seeds == client.plan[1].step_seeds


def test_client_batch_applies_planned_augmentation(client_for: Callable[..., Client]) -> None:
    images = Examples(torch.arange(4 * 9, dtype=torch.uint8).view(4, 1, 3, 3), torch.zeros(4, dtype=torch.int64))
    flip = Preparation(flip=True)
    made = draw_plan(torch.arange(4), Schedule(4), images, flip, generator(0, "x"))
    client = client_for(build_model("linear", linear, {}, (3,), 4), images, merge_plans([made]), preparation=flip)
    batch = client.batch(client.plan[0])
    for place, (row, flipped) in enumerate(zip(made.rows, made.augmentation["flip"].flatten(), strict=True)):
        image = images.x[row].double() / 255
        assert torch.allclose(batch.x[0, place], image.flip(-1) if flipped else image)
    assert 0 < int(made.augmentation["flip"].sum()) < 4


def test_client_test_batches_are_ordered_and_mark_padding(client_for: Callable[..., Client]) -> None:
    net, examples = toy()
    client = client_for(net, examples, steps_for([4, 4], Schedule(4), examples))
    holdings = replace(
        client.test_indices,
        rows=torch.tensor([[7, 8, 9], [3, 3, 3]]),
        real=torch.tensor([[True, True, True], [True, False, False]]),
    )
    found = list(replace(client, test_indices=holdings).test_batches(2))
    assert [batch.y.tolist() for batch, _ in found] == [
        [[7 % 4, 8 % 4], [3, 3]],
        [[9 % 4], [3]],
    ]
    assert [real.tolist() for _, real in found] == [[[True, True], [True, False]], [[True], [False]]]
    assert all(batch.step_seeds is None for batch, _ in found)  # evaluation mode


def test_fit_only_named_weights_change(client_for: Callable[..., Client]) -> None:
    """Neither decay nor momentum touches the rest, and the objective still sees all of it."""
    net, examples = toy()
    plan = steps_for([20, 20], Schedule(batch_size=5), examples)
    client = client_for(net, examples, plan, Sgd(0.1, momentum=0.9, weight_decay=0.1))
    before = {name: weight.expand(2, *weight.shape) for name, weight in net.initial_weights(0).items()}
    after = fit(client, before, label_loss(client), only=["bias"])
    assert torch.equal(after["weight"], before["weight"])
    assert not torch.equal(after["bias"], before["bias"])


def test_soft_cross_entropy_matches_a_hand_computation() -> None:
    teacher, student = torch.tensor([[[2.0, 0.0]]]), torch.zeros(1, 1, 2, requires_grad=True)
    teacher.requires_grad_()
    loss = soft_cross_entropy(student, teacher)
    assert loss.tolist() == pytest.approx([0.693147], abs=1e-6)
    slope, none = torch.autograd.grad(loss.sum(), [student, teacher], allow_unused=True)
    assert slope.flatten().tolist() == pytest.approx([-0.380797, 0.380797], abs=1e-6)
    assert none is None


def test_distance_per_device_has_gradient_towards_anchor() -> None:
    """FedProx by hand: f = (w - 3)²/2 from 2 with anchor 1, mu = 0.5, rate 0.1."""
    w = torch.tensor([[2.0], [1.0]], requires_grad=True)
    far = distance({"w": w}, {"w": torch.ones(2, 1)})
    assert far.tolist() == [0.5, 0.0]
    (slope,) = torch.autograd.grad((0.5 * (w - 3) ** 2).sum() + 0.5 * far.sum(), [w])
    assert float((w - 0.1 * slope)[0].detach()) == pytest.approx(2.05)


def test_cross_entropy_label_smoothing_matches_torch() -> None:
    logits, y = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [3, 3, 0]])
    ours = supervised_loss(logits, Batch(torch.zeros(2, 3), y, loss=CrossEntropy(0.1)))
    theirs = torch.stack([F.cross_entropy(logits[k], y[k], label_smoothing=0.1) for k in range(2)])
    torch.testing.assert_close(ours, theirs)


def test_fit_entries_that_change_from_step_to_step_match_reference() -> None:
    """SGD with momentum and decay, entry by entry in Python: an idle entry's momentum waits for it too."""
    steps, draw = 5, torch.Generator().manual_seed(0)
    masks = [torch.rand(2, 3, generator=draw) < 0.5 for _ in range(steps)]
    start, slopes = (torch.rand(2, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    expected, velocity = start.clone(), torch.zeros_like(start)
    for mask in masks:
        for at in mask.nonzero().tolist():
            here = tuple(at)
            velocity[here] = 0.9 * velocity[here] + slopes[here] + 0.1 * expected[here]
            expected[here] -= 0.5 * velocity[here]
    optimizer, weights = Sgd(0.5, momentum=0.9, weight_decay=0.1), {"w": start.clone()}
    state = optimizer.start(weights)
    for mask in masks:
        with _only_entries({"w": mask}, weights, *state.values()):
            optimizer.step(weights, {"w": slopes * mask}, state, torch.ones(2))
    assert torch.allclose(weights["w"], expected, rtol=0, atol=1e-12)

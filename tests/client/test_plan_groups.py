"""Groups of steps and selected epochs of a plan: the same for a device in any block."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.client import (
    Batch,
    Client,
    DevicePlan,
    Schedule,
    Sgd,
    Step,
    draw_plan,
    fit,
    gradient,
    label_loss,
    merge_plans,
)
from fedloom.client.plan import group_steps
from fedloom.data import Examples, Preparation
from fedloom.methods.fedrep import take_epochs
from fedloom.models import StepSeeds, build_model
from fedloom.seeds import generator
from fedloom.tensors import Tensors

Last = Literal["keep", "drop", "wrap"]
STORE = Examples(torch.zeros(200, 1, 6, 6, dtype=torch.uint8), torch.zeros(200, dtype=torch.int64))

counts = st.lists(st.integers(1, 25), min_size=1, max_size=4)
sizes, epochs, groups = st.integers(1, 6), st.integers(1, 3), st.integers(1, 4)
lasts: st.SearchStrategy[Last] = st.sampled_from(["keep", "drop", "wrap"])


def plans_of(counts: list[int], schedule: Schedule) -> list[DevicePlan]:
    """Those of the devices that can share a block with the first."""
    made = [
        draw_plan(torch.arange(40 * n, 40 * n + count), schedule, STORE, Preparation(flip=True), generator(n, "test"))
        for n, count in enumerate(counts)
    ]
    return [one for one in made if one.shape == made[0].shape]


def seen_by(step: Step, device: int) -> tuple[Any, ...]:
    """All that a device is given for a step."""
    assert step.positions is not None
    flips = step.augmentation["flip"][device]
    return (
        step.rows[device].tolist(),
        step.positions[device].tolist(),
        flips.tolist(),
        step.step_seeds.per_device[device],
    )


@given(counts=counts, size=sizes, epochs=epochs, last=lasts, group=groups)
def test_group_steps_device_groups_do_not_depend_on_the_block(
    counts: list[int], size: int, epochs: int, last: Last, group: int
) -> None:
    plans = plans_of(counts, Schedule(size, epochs, last))
    made = list(group_steps(merge_plans(plans), group))
    assert all(len(steps) == group for steps in made)
    for device, own in enumerate(plans):
        alone = list(group_steps(merge_plans([own]), group))
        going = [steps for steps in made if bool(steps[0].active[device])]
        for ours, theirs in zip(going, alone, strict=True):
            assert [seen_by(step, device) for step in ours] == [seen_by(step, 0) for step in theirs]


@given(count=st.integers(1, 25), size=sizes, epochs=epochs, last=lasts, group=groups)
def test_group_steps_incomplete_group_repeats_its_first_step(
    count: int, size: int, epochs: int, last: Last, group: int
) -> None:
    steps = merge_plans(plans_of([count], Schedule(size, epochs, last)))
    made = list(group_steps(steps, group))
    missing = len(made) * group - len(steps)
    assert 0 <= missing < group
    flat = [step for one in made for step in one]
    assert [step.number for step in flat[: len(steps)]] == list(range(len(steps)))
    assert all(step is made[-1][0] for step in flat[len(steps) :])


def test_group_steps_size_one_is_the_plan() -> None:
    steps = merge_plans(plans_of([7, 12], Schedule(4, 2, "wrap")))
    assert [one for (one,) in group_steps(steps, 1)] == list(steps)


def test_group_steps_device_done_midway_repeats_the_first_batch() -> None:
    """Three batches beside four, by twos: the third stands in for the fourth, which the other has."""
    steps = merge_plans(plans_of([12, 16], Schedule(4, 1, "wrap")))
    _, (first, second) = group_steps(steps, 2)
    assert first is steps[2]
    assert seen_by(second, 0) == seen_by(steps[2], 0)
    assert seen_by(second, 1) == seen_by(steps[3], 1)
    assert steps[3].active.tolist() == [0.0, 1.0]


@given(counts=counts, size=sizes, epochs=epochs, last=lasts, count=st.integers(1, 5))
def test_epochs_of_device_epochs_do_not_depend_on_the_block(
    counts: list[int], size: int, epochs: int, last: Last, count: int
) -> None:
    plans = plans_of(counts, Schedule(size, epochs, last))
    made = take_epochs(merge_plans(plans), count)
    assert all(bool(step.active.any()) for step in made)
    for device, own in enumerate(plans):
        found = [seen_by(step, device) for step in made if bool(step.active[device])]
        steps, each = merge_plans([own]), own.steps_per_epoch
        expected = [steps[(number % epochs) * each + place] for number in range(count) for place in range(each)]
        assert found == [seen_by(step, 0) for step in expected]


def test_epochs_of_all_epochs_is_the_plan() -> None:
    steps = merge_plans(plans_of([8], Schedule(4, 3)))
    assert [seen_by(step, 0) for step in take_epochs(steps, 3)] == [seen_by(step, 0) for step in steps]
    assert len(take_epochs(steps, 1)) == 2


def test_group_steps_plan_is_not_modified() -> None:
    steps = merge_plans(plans_of([5, 12], Schedule(4, 2, "wrap")))
    before = [step.active.tolist() for step in steps]
    take_epochs(steps, 3)
    list(group_steps(steps, 2))
    assert [step.active.tolist() for step in steps] == before


def linear() -> nn.Module:
    return nn.Linear(3, 4)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("last", ["keep", "drop", "wrap"])
def test_fit_grouped_steps_match_single_devices(
    group: int,
    last: Last,
    client_for: Callable[..., Client],
    block_weights: Callable[..., dict[str, Tensor]],
    pick_device: Callable[..., dict[str, Tensor]],
) -> None:
    net, counts = build_model("linear", linear, {}, (3,), 4), [7, 20, 13]
    examples = Examples(torch.randn(60, 3), torch.arange(60) % 4)
    plans = [
        draw_plan(
            torch.arange(20 * n, 20 * n + count), Schedule(5, 1, last), examples, Preparation(), generator(n, "p")
        )
        for n, count in enumerate(counts)
    ]

    def learned(plan: tuple[Step, ...], weights: Tensors) -> dict[str, Tensor]:
        client = client_for(net, examples, plan, Sgd(0.1, 0.9, 5e-4, 1.0))
        loss = label_loss(client)

        def objective(weights: Tensors, *batches: Batch) -> Tensors:
            assert len(batches) == group
            slopes = [gradient(loss, weights, batch) for batch in batches]
            return {name: sum(2.0**n * slope[name] for n, slope in enumerate(slopes)) for name in weights}  # type: ignore[misc]

        return fit(client, weights, objective, batches_per_step=group)

    start = block_weights(net, 3)
    block = learned(merge_plans(plans), start)
    for device, plan in enumerate(plans):
        alone = learned(merge_plans([plan]), pick_device(start, device))
        for name, tensor in alone.items():
            assert float((tensor[0] - block[name][device]).abs().max()) <= 1e-12
    assert len({len(plan.sizes) % 2 for plan in plans}) == 2


def test_group_steps_without_epochs_or_positions_works() -> None:
    """As tests and small scripts write them."""
    done = Step(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1), {}, StepSeeds((0,)))
    assert [len(one) for one in group_steps([done], 2)] == [2]
    assert len(take_epochs([done], 3)) == 3

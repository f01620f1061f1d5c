"""Which examples form which batch."""

from collections import Counter
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.client import DevicePlan, Schedule, draw_plan, merge_plans
from fedloom.data import Examples, Preparation
from fedloom.seeds import generator

Last = Literal["keep", "drop", "wrap"]
STORE = Examples(torch.zeros(200, 1, 6, 6, dtype=torch.uint8), torch.zeros(200, dtype=torch.int64))


def plan(
    rows: Tensor, schedule: Schedule, seed: int = 0, preparation: Preparation | None = None, store: Examples = STORE
) -> DevicePlan:
    return draw_plan(rows, schedule, store, preparation or Preparation(), generator(seed, "test"))


def rows_of(count: int, first: int = 10) -> Tensor:
    return torch.arange(first, first + count)


@pytest.mark.parametrize(
    ("examples", "last", "sizes"),
    [
        (10, "keep", (4, 4, 2)),
        (10, "drop", (4, 4)),
        (10, "wrap", (4, 4, 4)),
        (8, "keep", (4, 4)),
        (8, "drop", (4, 4)),
        (8, "wrap", (4, 4)),
        (3, "keep", (3,)),
        (3, "drop", (3,)),  # a device with less than one batch still learns from what it has
        (3, "wrap", (4,)),
        (1, "wrap", (4,)),
        (0, "keep", ()),
    ],
)
def test_draw_plan_last_batch_rule_sets_batch_sizes(examples: int, last: Last, sizes: tuple[int, ...]) -> None:
    assert plan(rows_of(examples), Schedule(4, 2, last)).sizes == sizes * 2  # two epochs


take_epochs = st.integers(1, 3)
lasts: st.SearchStrategy[Last] = st.sampled_from(["keep", "drop", "wrap"])


@given(count=st.integers(1, 30), size=st.integers(1, 12), epochs=take_epochs, last=lasts, seed=st.integers(0, 99))
def test_draw_plan_every_epoch_visits_own_examples(count: int, size: int, epochs: int, last: Last, seed: int) -> None:
    rows = rows_of(count)
    made = plan(rows, Schedule(size, epochs, last), seed)
    assert len(made.rows) == sum(made.sizes)
    visits = len(made.rows) // epochs
    for epoch in range(epochs):
        seen = Counter(made.rows[epoch * visits : (epoch + 1) * visits].tolist())
        assert seen.keys() <= set(rows.tolist())
        if last == "keep":
            assert seen == Counter(rows.tolist())
        elif last == "drop":
            assert max(seen.values()) == 1
            assert sum(seen.values()) == (count // size * size or count)
        else:
            assert seen.keys() == set(rows.tolist())
            assert max(seen.values()) - min(seen.values()) <= 1  # wrapping goes round, not back to one example
            assert sum(seen.values()) == -(-count // size) * size


@given(count=st.integers(20, 40), seed=st.integers(0, 99))
def test_draw_plan_epochs_are_shuffled_anew(count: int, seed: int) -> None:
    made = plan(rows_of(count), Schedule(7, 2), seed)
    assert made.rows[:count].tolist() != made.rows[count:].tolist()
    assert made.rows[:count].tolist() != rows_of(count).tolist()


def test_draw_plan_without_shuffle_visits_examples_in_order() -> None:
    made = plan(rows_of(5), Schedule(2, 3, shuffle=False))
    assert made.rows.tolist() == [10, 11, 12, 13, 14] * 3


def test_draw_plan_same_generator_gives_the_same_plan() -> None:
    flips = Preparation(flip=True, crop_padding=1)
    first, again, other = (plan(rows_of(9), Schedule(4, 2), seed, flips) for seed in (1, 1, 2))
    assert torch.equal(first.rows, again.rows)
    assert first.seed == again.seed != other.seed
    assert first.augmentation.keys() == {"crop", "flip"}
    assert all(torch.equal(numbers, again.augmentation[name]) for name, numbers in first.augmentation.items())
    assert not torch.equal(first.rows, other.rows)


def test_draw_plan_every_visit_has_own_augmentation() -> None:
    made = plan(rows_of(50), Schedule(10, 2), preparation=Preparation(crop_padding=3))
    assert made.augmentation["crop"].shape == (100, 2)
    assert not torch.equal(made.augmentation["crop"][:50], made.augmentation["crop"][50:])


def test_draw_plan_tokens_need_no_images() -> None:
    words = Examples(torch.zeros(30, 5, dtype=torch.int64), torch.zeros(30, dtype=torch.int64))
    assert plan(torch.arange(30), Schedule(10), store=words).sizes == (10, 10, 10)


counts = st.lists(st.integers(1, 25), min_size=1, max_size=4)


@given(counts=counts, size=st.integers(1, 6), epochs=take_epochs, last=lasts)
def test_merge_plans_device_steps_do_not_depend_on_the_block(
    counts: list[int], size: int, epochs: int, last: Last
) -> None:
    schedule, flips = Schedule(size, epochs, last), Preparation(flip=True)
    plans = [plan(rows_of(count, 40 * number), schedule, number, flips) for number, count in enumerate(counts)]
    plans = [one for one in plans if one.shape == plans[0].shape]
    steps = merge_plans(plans)
    assert all(len(step.rows) == len(plans) for step in steps)
    for device, own in enumerate(plans):
        alone = merge_plans([own])
        assert [step.active.tolist() for step in alone] == [[1.0]] * len(own.sizes)
        assert [step.number for step in alone] == list(range(len(own.sizes)))
        taken = [step for step in steps if bool(step.active[device])]
        for step, expected in zip(taken, alone, strict=True):
            assert step.number == expected.number
            assert step.epoch[device] == expected.epoch[0]
            assert torch.equal(step.rows[device], expected.rows[0])
            assert torch.equal(step.augmentation["flip"][device], expected.augmentation["flip"][0])
            assert step.step_seeds.per_device[device] == expected.step_seeds.per_device[0]
            assert step.step_seeds.common == expected.step_seeds.common
        for step in steps:
            assert set(step.rows[device].tolist()) <= set(own.rows.tolist())  # when idle, on its own examples


@given(counts=counts, size=st.integers(1, 6), epochs=take_epochs, last=lasts)
def test_merge_plans_devices_share_all_batches_of_one_number_and_size(
    counts: list[int], size: int, epochs: int, last: Last
) -> None:
    plans = [plan(rows_of(count), Schedule(size, epochs, last)) for count in counts]
    plans = [one for one in plans if one.shape == plans[0].shape]
    steps = merge_plans(plans)
    found = [(step.number, step.rows.shape[1]) for step in steps]
    assert sorted(found) == sorted({pair for one in plans for pair in enumerate(one.sizes)})
    assert [number for number, _ in found] == sorted(number for number, _ in found)
    for step in steps:
        active = [device for device, on in enumerate(step.active.tolist()) if on]
        assert step.step_seeds.running == (None if len(active) == len(plans) else tuple(active))


def test_merge_plans_unequal_data_shares_full_batches() -> None:
    """Of 10, 9 and 5 examples in batches of 4: two full batches together, two incomplete ones apart."""
    steps = merge_plans([plan(rows_of(count), Schedule(4)) for count in (10, 9, 5)])
    assert [(step.rows.shape[1], step.active.tolist()) for step in steps] == [
        (4, [1, 1, 1]),
        (4, [1, 1, 0]),
        (1, [0, 0, 1]),
        (2, [1, 0, 0]),
        (1, [0, 1, 0]),
    ]


def test_merge_plans_steps_have_different_seeds() -> None:
    steps = merge_plans([plan(rows_of(20), Schedule(4, 3))])
    assert len({step.step_seeds.per_device for step in steps}) == len(steps) == 15


def test_merge_plans_rows_are_the_devices_own() -> None:
    held = torch.tensor([5, 190, 77])
    steps = merge_plans([plan(held, Schedule(2, 3, "wrap"))])
    assert {row for step in steps for row in step.rows.flatten().tolist()} == {5, 77, 190}
    assert np.unique([len(step.rows[0]) for step in steps]).tolist() == [2]


@given(examples=st.integers(0, 180), size=st.integers(1, 3), count=st.integers(1, 12), last=lasts)
def test_plan_parts_are_steps_of_whole(examples: int, size: int, count: int, last: Last) -> None:
    """In their order, with their rows, positions and seeds."""
    whole = plan(rows_of(examples), Schedule(size, last=last))
    parts = [whole.part(index, count) for index in range(count)]
    steps = [step for part in parts for step in merge_plans([part])]
    expected = merge_plans([whole])
    assert len(steps) == len(expected)
    for step, other in zip(steps, expected, strict=True):
        assert torch.equal(step.rows, other.rows) and torch.equal(step.positions, other.positions)
        assert step.step_seeds == other.step_seeds

"""Bundles keep devices apart, parcels are joined and split without loss, and cost what they cost."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.tensors import all_finite, combine, fingerprint, inner, join, payload_bytes, per_device, split


def test_combine_bundles_are_combined_by_name() -> None:
    made = combine(torch.add, {"a": torch.ones(2), "b": torch.zeros(1)}, {"b": torch.ones(1), "a": torch.ones(2)})
    assert {name: tensor.tolist() for name, tensor in made.items()} == {"a": [2.0, 2.0], "b": [1.0]}


@given(devices=st.integers(1, 4), seed=st.integers(0, 1000))
def test_inner_block_is_one_product_per_device(devices: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a": (devices, 3), "b": (devices, 2, 2), "c": (devices,)}
    left, right = (
        {name: torch.randn(*shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(2)
    )
    for device in range(devices):
        total = 0.0
        for name in shapes:
            for mine, theirs in zip(
                left[name][device].flatten().tolist(), right[name][device].flatten().tolist(), strict=True
            ):
                total += mine * theirs
        assert float(inner(left, right)[device]) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4, 5)])
def test_per_device_any_shape_multiplies_by_device(shape: tuple[int, ...]) -> None:
    tensor, numbers = torch.randn(shape), torch.tensor([1.0, -2.0, 0.5])
    made = per_device(numbers, tensor) * tensor
    for device, number in enumerate(numbers.tolist()):
        assert torch.equal(made[device], tensor[device] * number)


def test_split_joined_parcels_are_restored(parcels_equal: Callable[..., bool]) -> None:
    parcels = [
        {"weights": {"a": torch.randn(2, 3), "b": torch.randn(())}, "labels": {"seen": torch.rand(4) > 0.5}}
        for _ in range(3)
    ]
    block = join(parcels)
    assert tuple(block["weights"]["b"].shape) == (3,)
    for number, parcel in enumerate(parcels):
        assert parcels_equal(split(block, number), parcel)


def test_join_shared_tensor_is_not_copied() -> None:
    shared = torch.randn(50)
    block = join([{"weights": {"a": shared}}] * 4)["weights"]["a"]
    assert tuple(block.shape) == (4, 50)
    assert block.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr()


def test_split_result_does_not_keep_the_block_alive() -> None:
    block = {"weights": {"a": torch.randn(8, 10)}}
    own = split(block, 3)["weights"]["a"]
    assert own.untyped_storage().nbytes() == 10 * own.element_size()
    own.zero_()
    assert bool((block["weights"]["a"][3] != 0).any())


def test_join_empty_parcels_can_be_split() -> None:
    assert join([{}, {}]) == {}
    assert split({}, 0) == {}


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.zeros(3, 5), 60),
        (torch.zeros(3, 5, dtype=torch.float64), 120),
        (torch.zeros(7, dtype=torch.int64), 56),
        (torch.zeros((), dtype=torch.float32), 4),
        (torch.zeros(10, dtype=torch.bool), 2),
        (torch.zeros(8, dtype=torch.bool), 1),
        (torch.zeros(33_279, dtype=torch.bool), 4_160),
        (torch.zeros(0), 0),
    ],
)
def test_payload_bytes_of_a_tensor_match_its_dtype(tensor: Tensor, size: int) -> None:
    assert payload_bytes({"bundle": {"name": tensor}}) == size


def test_payload_bytes_of_a_parcel_add_up() -> None:
    parcel = {"weights": {"a": torch.zeros(3), "b": torch.zeros(2, 2)}, "labels": {"seen": torch.ones(9) > 0}}
    assert payload_bytes(parcel) == 12 + 16 + 2


def test_payload_bytes_expanded_tensor_counts_every_entry() -> None:
    assert payload_bytes({"bundle": {"name": torch.zeros(1).expand(6)}}) == 24


def fingerprints() -> dict[str, str]:
    base = torch.tensor([1.0, 0.0])
    parcels: dict[str, dict[str, dict[str, Tensor]]] = {
        "base": {"w": {"a": base}},
        "value": {"w": {"a": torch.tensor([1.0, 1e-45])}},
        "sign of zero": {"w": {"a": torch.tensor([1.0, -0.0])}},
        "dtype": {"w": {"a": base.double()}},
        "shape": {"w": {"a": base.view(2, 1)}},
        "name": {"w": {"b": base}},
        "bundle": {"v": {"a": base}},
        "more": {"w": {"a": base, "b": base}},
    }
    return {what: fingerprint(parcel) for what, parcel in parcels.items()}


def test_fingerprint_different_parcels_differ() -> None:
    assert len(set(fingerprints().values())) == len(fingerprints())


def test_fingerprint_ignores_order_and_memory_layout() -> None:
    a, b = torch.randn(3, 4), torch.rand(5) > 0.5
    first = fingerprint({"x": {"a": a, "b": b}, "y": {"a": a}})
    assert fingerprint({"y": {"a": a.clone()}, "x": {"b": b, "a": a.t().contiguous().t()}}) == first


def test_fingerprint_scalar_is_supported() -> None:
    assert fingerprint({"x": {"a": torch.tensor(1.0)}}) != fingerprint({"x": {"a": torch.tensor(2.0)}})


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        (torch.tensor([1.0, 2.0]), True),
        (torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([-float("inf")]), False),
        (torch.tensor([1, 2]), True),
        (torch.tensor([True]), True),
        (torch.zeros(0), True),
    ],
)
def test_all_finite_detects_nan_and_infinity(tensor: Tensor, finite: bool) -> None:
    assert all_finite([torch.zeros(1), tensor]) is finite

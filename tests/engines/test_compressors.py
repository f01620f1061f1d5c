"""One tensor in fewer bytes: what is lost is bounded, what is kept is exact, and no reading trusts what it reads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedloom.engines.compression import (
    COMPRESSORS,
    Compressor,
    FullUpdate,
    HalfPrecision,
    Int8,
    LowRank,
    Malformed,
    TopK,
    is_compressible,
)
from fedloom.tensors import Tensors

EVERY: list[Compressor] = [
    FullUpdate(), HalfPrecision(torch.float16), HalfPrecision(torch.bfloat16),
    Int8(), Int8("tensor"), TopK(0.1), TopK(0.02), TopK(1.0), LowRank(0.3), LowRank(1.0),
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn, largest: float = 1e6) -> Tensor:
    """Of any shape that is coded, with equal entries and zeros among them, in either precision."""
    shape = draw(st.lists(st.integers(1, 9), min_size=2, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = math.exp(draw(st.floats(math.log(1e-9), math.log(largest))))
    made = torch.randn(shape, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64]))) * size
    grain = draw(st.sampled_from([0.0, size, 2 * size]))
    return made if grain == 0 else (made / grain).round() * grain


def outline(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype


def read(code: Compressor, tensor: Tensor) -> Tensor:
    return code.decode(code.encode(tensor), *outline(tensor))


def layout(parts: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: outline(part) for name, part in parts.items()}


@given(st.sampled_from(EVERY), tensors())
def test_compressor_parts_have_declared_layout(code: Compressor, tensor: Tensor) -> None:
    assert layout(code.encode(tensor)) == {name: tuple(one) for name, one in code.parts(*outline(tensor)).items()}
    assert outline(read(code, tensor)) == outline(tensor)


@given(tensors(6e3))  # a few deviations below the largest float16
def test_half_precision_error_is_half_a_step(tensor: Tensor) -> None:
    """A step is the 1024th part of a number, and near zero the smallest number there is."""
    assert bool(((read(HalfPrecision(torch.float16), tensor) - tensor).abs() <= tensor.abs() / 2048 + 2.0**-25).all())
    assert bool(((read(HalfPrecision(torch.bfloat16), tensor) - tensor).abs() <= tensor.abs() / 256).all())


def test_half_precision_overflow_saturates_and_keeps_nan() -> None:
    found = read(HalfPrecision(torch.float16), torch.tensor([[1e9, -1e9], [math.inf, math.nan]]))
    assert found[0].tolist() == [65504.0, -65504.0]
    assert found[1, 0] == math.inf
    assert found[1, 1].isnan()


@given(tensors(), st.sampled_from(["row", "tensor"]))
def test_int8_error_is_half_a_scale(tensor: Tensor, scale: str) -> None:
    code = Int8(scale)  # type: ignore[arg-type]
    scales = code.encode(tensor)["scale"]
    assert bool((scales == tensor.reshape(len(scales), -1).abs().amax(1) / 127).all())
    allowed = scales.view(-1, *[1] * (tensor.dim() - 1)).double() / 2 * (1 + 1e-4)  # and rounding of the quotient
    assert bool(((read(code, tensor) - tensor).double().abs() <= allowed).all())


def test_int8_zero_row_stays_zero() -> None:
    tensor = torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    assert torch.equal(read(Int8(), tensor)[0], tensor[0])
    assert torch.equal(read(Int8(), torch.zeros(2, 3)), torch.zeros(2, 3))


@given(tensors(), st.floats(0.01, 1.0))
def test_top_k_keeps_largest_entries_exactly(tensor: Tensor, share: float) -> None:
    code = TopK(share)
    sent = read(code, tensor)
    left = tensor - sent
    count = math.ceil(share * tensor.numel() - 1e-9)
    assert torch.equal(sent + left, tensor)
    assert bool(((sent == 0) | (left == 0)).all())
    assert len(code.encode(tensor)["values"]) == count
    assert torch.equal(sent.abs().flatten().sort(descending=True).values[:count], largest(tensor, count))
    assert bool(left.abs().max() <= largest(tensor, count)[-1])


def largest(tensor: Tensor, count: int) -> Tensor:
    return tensor.abs().flatten().sort(descending=True).values[:count]


def test_top_k_ties_keep_first() -> None:
    assert read(TopK(0.5), torch.tensor([[1.0, -1.0, 1.0], [1.0, 1.0, 2.0]])).tolist() == [[1, -1, 0], [0, 0, 2]]


def test_top_k_nan_is_sent() -> None:
    assert read(TopK(0.3), torch.tensor([[9.0, math.nan], [1.0, math.inf]])).isnan().any()
    assert not read(TopK(0.3), torch.full((2, 3), math.nan)).isfinite().all()
    assert not Int8().encode(torch.tensor([[1.0, math.nan], [1.0, 2.0]]))["scale"].isfinite().all()
    assert not Int8().encode(torch.tensor([[1.0, math.inf], [1.0, 2.0]]))["scale"].isfinite().all()


@pytest.mark.parametrize(
    ("share", "kind", "size"), [(0.1, torch.uint8, 125), (0.04, torch.uint8, 125), (0.03, torch.int32, 30)]
)
def test_top_k_positions_use_shorter_encoding(share: float, kind: torch.dtype, size: int) -> None:
    shape, dtype = TopK(share).parts((10, 100), torch.float32)["places"]
    assert (shape, dtype) == ((size,), kind)


@given(tensors(), st.floats(0.01, 1.0))
def test_low_rank_is_the_nearest_of_its_rank(tensor: Tensor, share: float) -> None:
    """By Eckart and Young its squared error is the sum of the squares of the singular values that are left out."""
    values = torch.linalg.svdvals(tensor.flatten(1).double())
    rank = math.ceil(share * len(values) - 1e-9)
    found = read(LowRank(share), tensor)
    scale = float(values[0]) * (1e-12 if tensor.dtype == torch.float64 else 1e-5)
    lost = torch.linalg.vector_norm((found - tensor).double())
    assert float(lost) == pytest.approx(float(values[rank:].square().sum().sqrt()), abs=scale)
    assert bool((torch.linalg.svdvals(found.flatten(1).double())[rank:] <= scale).all())


def test_low_rank_of_share_sends_thin_factors_and_nan() -> None:
    assert LowRank(0.25).parts((16, 4, 3, 3), torch.float32) == {
        "left": ((16, 4), torch.float32), "right": ((4, 36), torch.float32),
    }  # fmt: skip
    assert read(LowRank(0.5), torch.tensor([[1.0, math.inf], [1.0, 2.0]])).isnan().any()


def bits(*places: int, entries: int = 12) -> Tensor:
    made = torch.zeros(-(-entries // 8), dtype=torch.uint8)
    for place in places:
        made[place // 8] |= 128 >> place % 8
    return made


MALFORMED: dict[str, tuple[Compressor, Tensors]] = {
    "too few bits": (TopK(0.25), {"values": torch.ones(3), "places": bits(1, 2)}),
    "too many bits": (TopK(0.25), {"values": torch.ones(3), "places": torch.full((2,), 255, dtype=torch.uint8)}),
    "a bit behind the end": (TopK(0.25), {"values": torch.ones(3), "places": bits(1, 2, 13)}),
    "twice": (TopK(0.01), {"values": torch.ones(2), "places": torch.tensor([4, 4], dtype=torch.int32)}),
    "out of order": (TopK(0.01), {"values": torch.ones(2), "places": torch.tensor([4, 3], dtype=torch.int32)}),
    "below zero": (TopK(0.01), {"values": torch.ones(2), "places": torch.tensor([-1, 3], dtype=torch.int32)}),
    "beyond the end": (TopK(0.01), {"values": torch.ones(2), "places": torch.tensor([4, 12], dtype=torch.int32)}),
    "a negative scale": (Int8(), {"int8": torch.ones(3, 4, dtype=torch.int8), "scale": torch.tensor([1.0, -1.0, 1.0])}),
}  # fmt: skip


@pytest.mark.parametrize(("code", "parts"), MALFORMED.values(), ids=MALFORMED)
def test_decode_impossible_parts_raise_malformed(code: Compressor, parts: Tensors) -> None:
    with pytest.raises(Malformed):
        code.decode(parts, (3, 4), torch.float32)


def test_top_k_bit_mask_is_read_in_order() -> None:
    made = TopK(0.25).decode({"values": torch.tensor([1.0, 2.0, 3.0]), "places": bits(0, 7, 11)}, (3, 4), torch.float32)
    assert made.tolist() == [[1, 0, 0, 0], [0, 0, 0, 2], [0, 0, 0, 3]]


@pytest.mark.parametrize(
    ("shape", "dtype", "coded"),
    [
        ((3, 4), torch.float32, True), ((3, 4, 5), torch.float64, True), ((3,), torch.float32, False),
        ((), torch.float32, False), ((3, 4), torch.int64, False), ((3, 4), torch.bool, False),
        ((0, 4), torch.float32, False),
    ],
)  # fmt: skip
def test_is_compressible_only_float_matrices(shape: tuple[int, ...], dtype: torch.dtype, coded: bool) -> None:
    assert is_compressible(shape, dtype) is coded


def test_uplink_registry_names_every_compressor() -> None:
    settings = {"top_k": {"share": 0.1}, "low_rank": {"share": 0.1}}
    assert {name: made(**settings.get(name, {})) for name, made in COMPRESSORS.items()} == {
        "float16": HalfPrecision(torch.float16), "bfloat16": HalfPrecision(torch.bfloat16),
        "int8": Int8(), "top_k": TopK(0.1), "low_rank": LowRank(0.1),
    }  # fmt: skip

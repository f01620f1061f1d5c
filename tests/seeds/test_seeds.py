"""A stream depends on the seed and its purpose, and on nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import seeds
from fedloom.seeds import generator, number

purposes = st.lists(st.one_of(st.text(max_size=5), st.integers(-5, 1000)), min_size=1, max_size=3).map(tuple)


@given(seed=st.integers(0, 2**40), purpose=purposes)
def test_generator_same_purpose_gives_the_same_stream(seed: int, purpose: tuple[str | int, ...]) -> None:
    first = generator(seed, *purpose)
    generator(seed, "something else").random(100)
    again = generator(seed, *purpose)
    assert first.random(5).tolist() == again.random(5).tolist()


@given(seed=st.integers(0, 2**40), one=purposes, other=purposes)
def test_generator_other_purpose_differs(seed: int, one: tuple[str | int, ...], other: tuple[str | int, ...]) -> None:
    alike = [(type(part), part) for part in one] == [(type(part), part) for part in other]
    assert (generator(seed, *one).random(4).tolist() == generator(seed, *other).random(4).tolist()) is alike


def test_generator_purposes_equal_when_joined_differ() -> None:
    numbers = {number(0, *purpose) for purpose in (("a", "bc"), ("ab", "c"), ("abc",), ("a", 1), ("a", "1"), ("a1",))}
    assert len(numbers) == 6


def test_generator_other_seed_gives_another_stream() -> None:
    assert len({number(seed, "x") for seed in range(1000)}) == 1000


@pytest.mark.parametrize("bits", [1, 31, 63, 128])
def test_number_bits_bound_the_value(bits: int) -> None:
    drawn = [number(seed, "x", bits=bits) for seed in range(200)]
    assert all(0 <= one < 2**bits for one in drawn)
    assert max(drawn) >= 2 ** (bits - 1)  # and the highest of them is used


def test_generator_streams_are_pinned() -> None:
    """A change here changes every result ever recorded."""
    assert number(0, "cohort", 1) == 7787510123845680917
    assert generator(0, "cohort", 1).integers(0, 1000, 5).tolist() == [558, 721, 354, 538, 786]
    assert generator(7, "plan", 2, "train", 0, "05").permutation(8).tolist() == [3, 2, 0, 4, 1, 5, 7, 6]


def test_purposes_strings_are_pinned() -> None:
    """A constant may get another name; another string would change every result ever recorded."""
    strings = sorted(value for name, value in vars(seeds).items() if name.isupper())
    assert strings == [
        "answer", "architecture of ", "attack", "canvases", "cohort", "collect", "corrupt", "damage", "describe",
        "dropout", "fit_head", "hidden test words", "initial weights", "made-up data", "malicious", "measure",
        "most examples", "pace", "pairs", "partition", "plan", "poisson cohort", "pooled tests", "privacy", "probe",
        "public", "sampled window", "score",
        "sentiment140 tests", "server", "server", "server batches", "shuffled local test", "shuffled test", "space",
        "subnet", "subnet examples", "subnets", "subnets within a budget", "teach", "thinned", "tier",
        "tier label tie", "train", "tune", "ucihar tests", "unseen", "validation",
    ]  # fmt: skip

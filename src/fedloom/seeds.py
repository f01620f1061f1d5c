"""Every random draw of a run, named by what it is for.

A stream depends on the seed and its purpose alone, never on what was drawn before, so results are the same
on every engine, in any order, and one draw more in one place changes nothing elsewhere.
"""

import hashlib

import numpy as np


def generator(seed: int, *purpose: str | int) -> np.random.Generator:
    """The stream for one purpose, e.g. `generator(0, "batches", round, device)`."""
    return np.random.Generator(np.random.Philox(key=number(seed, *purpose, bits=128)))


def number(seed: int, *purpose: str | int, bits: int = 63) -> int:
    """One number for one purpose, where a library wants a seed of its own."""
    words = [part if isinstance(part, str) else int(part) for part in (seed, *purpose)]  # numpy spells its numbers
    digest = hashlib.sha256(repr(tuple(words)).encode()).digest()
    return int.from_bytes(digest) >> (256 - bits)

"""How much privacy rounds cost: a function of their number and of settings alone, so there is nothing to keep.

One round is a Gaussian mechanism on the updates of devices that were drawn each by its own chance; rounds add up. The
figure is for the presence of one device, against whoever sees the model after every round.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..recipes.recipe import Accountant


class AccountantMissing(Exception):  # noqa: N818 - named for what is wrong
    """The package that counts is not installed."""


@dataclass(frozen=True)
class Mechanism:
    """`noise` is in units of how far one device can change the sum; `chance` is that of a device to be drawn."""

    noise: float
    chance: float
    delta: float
    accountant: Accountant = "rdp"

    def epsilon(self, rounds: int) -> float:
        return _epsilon(self, rounds) if rounds else 0.0


@lru_cache(maxsize=4096)
def _epsilon(one: Mechanism, rounds: int) -> float:
    if one.accountant == "pld":
        return float(_privacy_loss(one.noise, one.chance).self_compose(rounds).get_epsilon_for_delta(one.delta))
    orders, costs = _renyi(one.noise, one.chance)
    spent, _ = _library().rdp.compute_epsilon(orders, [rounds * cost for cost in costs], one.delta)
    return float(spent)


@lru_cache(maxsize=8)
def _privacy_loss(noise: float, chance: float) -> Any:
    """The distribution of what one round gives away, rounded to the safe side."""
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=chance)


@lru_cache(maxsize=256)
def _renyi(noise: float, chance: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rényi orders and what one round costs at each; so many rounds cost so many times that. Every order gives a bound,
    so those that the library cannot compute, or gets wrong by rounding, are left out."""
    library = _library()
    accountant = library.rdp.RdpAccountant()
    with _silent():
        accountant.compose(library.PoissonSampledDpEvent(chance, library.GaussianDpEvent(noise)))
    pairs = zip(accountant.orders.tolist(), accountant.rdp.tolist(), strict=True)
    orders, costs = zip(*((order, cost) for order, cost in pairs if cost >= 0), strict=True)
    return orders, costs


def _library() -> Any:
    """Imported only where privacy is asked for: it takes seconds."""
    try:
        library: Any = importlib.import_module("dp_accounting")
        for name in ("pld", "rdp"):
            importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise AccountantMissing(f"privacy is counted by the package dp-accounting: {error}") from error
    return library


@contextmanager
def _silent() -> Iterator[None]:
    """The library warns of orders that do not count."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)

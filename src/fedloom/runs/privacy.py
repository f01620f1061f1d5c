"""Differential privacy of a run: the epsilon it costs, and the settings that the guarantee does not cover.

A round is a Poisson-subsampled Gaussian mechanism (DP-FedAvg, McMahan et al. 2018); rounds compose. Epsilon is
client-level, against an observer of the model after every round, and depends only on settings and number of rounds.
"""

import importlib
import logging
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..fleet import Fleet
from ..methods import Method
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import Accountant, Recipe
from ..wording import pluralize


class AccountantMissing(Exception):  # noqa: N818 - named for what is wrong
    """dp-accounting is not installed."""


@dataclass(frozen=True)
class Mechanism:
    """`noise` is a multiple of the clipping norm; `chance` is the sampling probability of a device."""

    noise: float
    chance: float
    delta: float
    accountant: Accountant = "rdp"

    def epsilon(self, rounds: int) -> float:
        return _epsilon(self, rounds) if rounds else 0.0


@lru_cache(maxsize=4096)
def _epsilon(mechanism: Mechanism, rounds: int) -> float:
    if mechanism.accountant == "pld":
        loss = _privacy_loss(mechanism.noise, mechanism.chance).self_compose(rounds)
        return float(loss.get_epsilon_for_delta(mechanism.delta))
    orders, costs = _renyi(mechanism.noise, mechanism.chance)
    with _silent():
        epsilon, _ = _library().rdp.compute_epsilon(orders, [rounds * cost for cost in costs], mechanism.delta)
    return float(epsilon)


@lru_cache(maxsize=8)
def _privacy_loss(noise: float, chance: float) -> Any:
    """The privacy loss distribution of one round, a pessimistic estimate."""
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(noise, sampling_prob=chance)


@lru_cache(maxsize=256)
def _renyi(noise: float, chance: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rényi orders and the cost of one round at each; costs of rounds add up. Every order gives a bound, so those that
    the library cannot compute, or gets wrong by rounding, are left out."""
    library = _library()
    accountant = library.rdp.RdpAccountant()
    with _silent():
        accountant.compose(library.PoissonSampledDpEvent(chance, library.GaussianDpEvent(noise)))
    pairs = zip(accountant.orders.tolist(), accountant.rdp.tolist(), strict=True)
    orders, costs = zip(*((order, cost) for order, cost in pairs if cost >= 0), strict=True)
    return orders, costs


def _library() -> Any:
    """Imported only when needed: it takes seconds."""
    try:
        library: Any = importlib.import_module("dp_accounting")
        for name in ("pld", "rdp"):
            importlib.import_module(f"dp_accounting.{name}")
    except ImportError as error:
        raise AccountantMissing(f"privacy accounting needs the package dp-accounting: {error}") from error
    return library


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the library's warnings about orders that are left out, and about bounds that are infinite."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(before)


HARMLESS_FAULTS = ("stragglers", "max_failed_rounds")  # change no round


def build_mechanism(recipe: Recipe) -> Mechanism | None:
    """The mechanism of every round; None without differential privacy."""
    config = recipe.privacy
    if config.clip is None or config.noise is None:
        return None
    return Mechanism(config.noise, recipe.fleet.participation, config.delta, config.accountant)


def compute_epsilon(recipe: Recipe, rounds: int) -> float | None:
    """Epsilon after this many rounds; None without differential privacy."""
    mechanism = build_mechanism(recipe)
    return mechanism.epsilon(rounds) if mechanism else None


def summarize_privacy(recipe: Recipe) -> str:
    """The privacy of a complete run in one line; "" if it has none."""
    epsilon, delta = compute_epsilon(recipe, recipe.rounds), recipe.privacy.delta
    if epsilon is None:
        return ""
    return (
        f"privacy: epsilon {epsilon:.3f} at delta {delta:g} for every device, after {pluralize(recipe.rounds, 'round')}"
    )


def check_privacy(loaded: LoadedRecipe, fleet: Fleet, method: Method) -> None:
    """Raise if a recipe combines privacy with anything that epsilon does not account for."""
    if loaded.recipe.privacy.clip is None:
        return
    problems = list(_find_uncovered(loaded.recipe, fleet, method)) or list(_find_overspending(loaded.recipe))
    if problems:
        raise loaded.error(*problems)


def check_noise_is_secret(loaded: LoadedRecipe) -> None:
    """Raise for real devices: anybody with the recipe could draw the same noise again and subtract it."""
    if loaded.recipe.privacy.noise is not None:
        message = "the noise is drawn from the recipe's seed, so anybody with the recipe can subtract it"
        raise loaded.error(RecipeIssue(("privacy", "noise"), "SIMULATION_ONLY", message))


def _find_uncovered(recipe: Recipe, fleet: Fleet, method: Method) -> Iterator[RecipeIssue]:
    if recipe.privacy.noise is None:
        message, hint = "clip without noise gives no privacy: noise is required", "a multiple of clip, e.g. 1.0"
        yield RecipeIssue(("privacy", "noise"), "RECIPE_MISSING", message, hint)
    if recipe.fleet.sampling != "poisson":
        message = "epsilon is computed for devices that are sampled independently of each other"
        yield RecipeIssue(("fleet", "sampling"), "PRIVACY_SAMPLING", message, 'set fleet.sampling = "poisson"')
    if method.dp_uncovered:
        message = f"noise does not cover everything that {recipe.method.name} uses from a device: {method.dp_uncovered}"
        yield RecipeIssue(("method", "name"), "PRIVACY_METHOD", message, value=recipe.method.name)
    tier_name = next((tier.name for tier in fleet.active_tiers if tier.model.statistics()), None)
    if tier_name is not None:
        message = f"the model of tier {tier_name!r} has batch-norm statistics, collected from devices without noise"
        hint = 'use another normalization, e.g. model.normalization = "group"'
        yield RecipeIssue(("model",), "PRIVACY_STATISTICS", message, hint)
    if recipe.aggregation.rule != "none":
        message = "a robust rule compares devices with each other, so clip does not bound the influence of one device"
        hint = "privacy.clip already bounds a bad device; leave the rule out"
        yield RecipeIssue(("aggregation", "rule"), "PRIVACY_AGGREGATION", message, hint, recipe.aggregation.rule)
    for key, field in type(recipe.faults).model_fields.items():
        if key not in HARMLESS_FAULTS and getattr(recipe.faults, key) != field.default:
            message = "which round counts, and which replies, must not depend on the devices that take part"
            yield RecipeIssue(("faults", key), "PRIVACY_FAULTS", message, "leave it out")


def _find_overspending(recipe: Recipe) -> Iterator[RecipeIssue]:
    mechanism, target = build_mechanism(recipe), recipe.privacy.target_epsilon
    assert mechanism is not None
    try:
        cost = mechanism.epsilon(recipe.rounds)
    except AccountantMissing as error:
        yield RecipeIssue(("privacy",), "EXTRA_MISSING", str(error), "pip install 'fedloom[privacy]'")
        return
    if target is not None and cost > target:
        rounds = bisect_right(range(recipe.rounds), target, key=mechanism.epsilon) - 1
        message = f"{pluralize(recipe.rounds, 'round')} would cost epsilon {cost:.3f} at delta {mechanism.delta:g}"
        hint = f"it is enough for {rounds} of them; or use more privacy.noise or less fleet.participation"
        yield RecipeIssue(("privacy", "target_epsilon"), "PRIVACY_BUDGET", message, hint, target)

"""Differential privacy of a run: what it costs, and what is refused because nobody has counted what it gives away.

How much privacy rounds cost: a function of their number and of settings alone, so there is nothing to keep.

One round is a Gaussian mechanism on the updates of devices that were drawn each by its own chance; rounds add up. The
figure is for the presence of one device, against whoever sees the model after every round.
"""

import importlib
import logging
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..fleet import Fleet
from ..methods import Method
from ..recipe.errors import RecipeIssue
from ..recipe.load import LoadedRecipe
from ..recipe.schema import Accountant, Recipe


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
    epsilon, _ = _library().rdp.compute_epsilon(orders, [rounds * cost for cost in costs], one.delta)
    return float(epsilon)


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


CHANGE_NO_ROUND = ("stragglers", "max_failed_rounds")  # of what may go wrong


def mechanism(recipe: Recipe) -> Mechanism | None:
    """What hides a device in every round; None where nothing does."""
    said = recipe.privacy
    if said.clip is None or said.noise is None:
        return None
    return Mechanism(said.noise, recipe.fleet.participation, said.delta, said.accountant)


def compute_epsilon(recipe: Recipe, rounds: int) -> float | None:
    """Epsilon after so many rounds; None for a run without privacy."""
    made = mechanism(recipe)
    return made.epsilon(rounds) if made else None


def summarize_privacy(recipe: Recipe) -> str:
    """A whole run's privacy in one line; "" where it has none."""
    epsilon, said = compute_epsilon(recipe, recipe.rounds), recipe.privacy
    if epsilon is None:
        return ""
    return f"privacy: epsilon {epsilon:.3f} at delta {said.delta:g} for every device, after {recipe.rounds} rounds"


def check_privacy(loaded: LoadedRecipe, fleet: Fleet, method: Method) -> None:
    """Raise if a recipe asks for privacy together with anything the figure would not be true of."""
    if loaded.recipe.privacy.clip is None:
        return
    problems = list(_uncovered(loaded.recipe, fleet, method)) or list(_unaffordable(loaded.recipe))
    if problems:
        raise loaded.error(*problems)


def check_noise_is_secret(loaded: LoadedRecipe) -> None:
    """Raise if real devices were to trust in noise that whoever has the recipe can draw again and take off."""
    if loaded.recipe.privacy.noise is not None:
        said = (
            "the noise comes from the recipe's seed, so that runs can be repeated; who has the recipe can take it off"
        )
        raise loaded.error(RecipeIssue(("privacy", "noise"), "SIMULATION_ONLY", said))


def _uncovered(recipe: Recipe, fleet: Fleet, method: Method) -> Iterator[RecipeIssue]:
    if recipe.privacy.noise is None:
        hint = "it is in units of clip, e.g. 1.0"
        yield RecipeIssue(("privacy", "noise"), "RECIPE_MISSING", "clip alone hides nobody: noise is required", hint)
    if recipe.fleet.sampling != "poisson":
        said = "what noise hides is counted for devices that take part each by its own chance"
        yield RecipeIssue(("fleet", "sampling"), "PRIVACY_SAMPLING", said, 'set fleet.sampling = "poisson"')
    if method.dp_uncovered:
        said = f"noise would not hide all that {recipe.method.name} takes from a device: {method.dp_uncovered}"
        yield RecipeIssue(("method", "name"), "PRIVACY_METHOD", said, value=recipe.method.name)
    gathered = next((tier.name for tier in fleet.active_tiers if tier.model.statistics()), None)
    if gathered is not None:
        said = f"with the model of tier {gathered!r} go statistics of batch norm, gathered from devices as they are"
        hint = 'use another normalization, e.g. model.normalization = "group"'
        yield RecipeIssue(("model",), "PRIVACY_STATISTICS", said, hint)
    if recipe.aggregation.rule != "none":
        said = "a rule that weighs devices against each other lets one of them move what others say"
        hint = "privacy.clip bounds what a bad device can do; leave the rule out"
        yield RecipeIssue(("aggregation", "rule"), "PRIVACY_DEFENCE", said, hint, recipe.aggregation.rule)
    for key, field in type(recipe.faults).model_fields.items():
        if key not in CHANGE_NO_ROUND and getattr(recipe.faults, key) != field.default:
            said = "whether a round counts, and who is heard in it, must not depend on which devices are there"
            yield RecipeIssue(("faults", key), "PRIVACY_FAULTS", said, "leave it out")


def _unaffordable(recipe: Recipe) -> Iterator[RecipeIssue]:
    made, target = mechanism(recipe), recipe.privacy.target_epsilon
    assert made is not None
    try:
        cost = made.epsilon(recipe.rounds)
    except AccountantMissing as error:
        yield RecipeIssue(("privacy",), "EXTRA_MISSING", str(error), "pip install 'fedloom[privacy]'")
        return
    if target is not None and cost > target:
        rounds = bisect_right(range(recipe.rounds), target, key=made.epsilon) - 1
        said = f"{recipe.rounds} rounds cost epsilon {cost:.3f} at delta {made.delta:g}"
        hint = f"it is enough for {rounds} of them; or take more privacy.noise, or less fleet.participation"
        yield RecipeIssue(("privacy", "target_epsilon"), "PRIVACY_BUDGET", said, hint, target)

"""Differential privacy of a run: what it costs, and what is refused because nobody has counted what it gives away."""

from bisect import bisect_right
from collections.abc import Iterator

from ...fleet import Fleet
from ...methods import Method
from ..recipes.load import Loaded
from ..recipes.problems import Problem
from ..recipes.recipe import Recipe
from .accountant import AccountantMissing, Mechanism

CHANGE_NO_ROUND = ("stragglers", "give_up_after")  # of what may go wrong


def mechanism(recipe: Recipe) -> Mechanism | None:
    """What hides a device in every round; None where nothing does."""
    said = recipe.privacy
    if said.clip is None or said.noise is None:
        return None
    return Mechanism(said.noise, recipe.fleet.participation, said.delta, said.accountant)


def spent(recipe: Recipe, rounds: int) -> float | None:
    """Epsilon after so many rounds; None for a run without privacy."""
    made = mechanism(recipe)
    return made.epsilon(rounds) if made else None


def told(recipe: Recipe) -> str:
    """A whole run's privacy in one line; "" where it has none."""
    epsilon, said = spent(recipe, recipe.rounds), recipe.privacy
    if epsilon is None:
        return ""
    return f"privacy: epsilon {epsilon:.3f} at delta {said.delta:g} for every device, after {recipe.rounds} rounds"


def refuse_uncovered(loaded: Loaded, fleet: Fleet, method: Method) -> None:
    """Raise if a recipe asks for privacy together with anything the figure would not be true of."""
    if loaded.recipe.privacy.clip is None:
        return
    problems = list(_uncovered(loaded.recipe, fleet, method)) or list(_unaffordable(loaded.recipe))
    if problems:
        raise loaded.error(*problems)


def refuse_known_noise(loaded: Loaded) -> None:
    """Raise if real devices were to trust in noise that whoever has the recipe can draw again and take off."""
    if loaded.recipe.privacy.noise is not None:
        said = (
            "the noise comes from the recipe's seed, so that runs can be repeated; who has the recipe can take it off"
        )
        raise loaded.error(Problem(("privacy", "noise"), "SIMULATION_ONLY", said))


def _uncovered(recipe: Recipe, fleet: Fleet, method: Method) -> Iterator[Problem]:
    if recipe.privacy.noise is None:
        hint = "it is in units of clip, e.g. 1.0"
        yield Problem(("privacy", "noise"), "RECIPE_MISSING", "clip alone hides nobody: noise is required", hint)
    if recipe.fleet.sampling != "poisson":
        said = "what noise hides is counted for devices that take part each by its own chance"
        yield Problem(("fleet", "sampling"), "PRIVACY_SAMPLING", said, 'set fleet.sampling = "poisson"')
    if method.unmerged:
        said = f"noise would not hide all that {recipe.method.name} takes from a device: {method.unmerged}"
        yield Problem(("method", "name"), "PRIVACY_METHOD", said, value=recipe.method.name)
    gathered = next((tier.name for tier in fleet.served if tier.model.statistics()), None)
    if gathered is not None:
        said = f"with the model of tier {gathered!r} go statistics of batch norm, gathered from devices as they are"
        hint = 'use another normalisation, e.g. model.normalisation = "group"'
        yield Problem(("model",), "PRIVACY_STATISTICS", said, hint)
    if recipe.defence.rule != "none":
        said = "a rule that weighs devices against each other lets one of them move what others say"
        hint = "privacy.clip bounds what a bad device can do; leave the rule out"
        yield Problem(("defence", "rule"), "PRIVACY_DEFENCE", said, hint, recipe.defence.rule)
    for key, field in type(recipe.faults).model_fields.items():
        if key not in CHANGE_NO_ROUND and getattr(recipe.faults, key) != field.default:
            said = "whether a round counts, and who is heard in it, must not depend on which devices are there"
            yield Problem(("faults", key), "PRIVACY_FAULTS", said, "leave it out")


def _unaffordable(recipe: Recipe) -> Iterator[Problem]:
    made, target = mechanism(recipe), recipe.privacy.target_epsilon
    assert made is not None
    try:
        cost = made.epsilon(recipe.rounds)
    except AccountantMissing as error:
        yield Problem(("privacy",), "EXTRA_MISSING", str(error), "pip install 'fedloom[privacy]'")
        return
    if target is not None and cost > target:
        rounds = bisect_right(range(recipe.rounds), target, key=made.epsilon) - 1
        said = f"{recipe.rounds} rounds cost epsilon {cost:.3f} at delta {made.delta:g}"
        hint = f"it is enough for {rounds} of them; or take more privacy.noise, or less fleet.participation"
        yield Problem(("privacy", "target_epsilon"), "PRIVACY_BUDGET", said, hint, target)

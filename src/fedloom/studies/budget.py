"""How many rounds the arms of a comparison have, so that all send as many bytes as the first one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..analysis.costs import dry_run
from ..data import Dataset
from ..recipe.load import LoadedRecipe
from ..recipe.registries import Registries
from ..runs.build import assemble
from ..runs.data import data_spec_of
from ..runs.experiment import Experiment

SCHEDULE_ROUNDS = ("rounds", "warmup")
"""Settings of learning-rate schedules that are numbers of rounds."""

DENSE_LAST = 0.1
"""The share of the rounds, at the end, that are all evaluated: the bytes of a round depend on who takes part, so the
last round within the budget may be an earlier one."""


def estimate_bytes_per_round(experiment: Experiment) -> float:
    """Bytes in both directions of all devices that take part in a round, by a dry run."""
    fleet, loaded = experiment.fleet, experiment.loaded
    moved = dry_run(loaded, experiment.method, fleet, data_spec_of(experiment.dataset), experiment.compression)
    shares = zip(fleet.tiers, fleet.shares, strict=True)
    each = sum(share * (moved.bytes_up[tier.name] + moved.bytes_down[tier.name]) for tier, share in shares)
    return float(loaded.recipe.fleet.participation * fleet.size * each)


def spend_equal_bytes(
    arms: Mapping[str, LoadedRecipe], registries: Registries, data: Path, dataset: Dataset
) -> dict[str, LoadedRecipe]:
    """The arms with as many rounds as the first one's bytes pay for; one that sends nothing has the first one's rounds.

    Parameters
    ----------
    arms : their recipes; the first one's is the budget.
    registries : the names that they use.
    data : the folder of the data sets.
    dataset : the one that all of them have.
    """
    spent = {
        name: estimate_bytes_per_round(assemble(loaded, registries, data, dataset)) for name, loaded in arms.items()
    }
    first = next(iter(arms))
    rounds = arms[first].recipe.rounds
    budget = rounds * spent[first]
    return {
        name: with_rounds(loaded, max(1, int(budget / spent[name])) if spent[name] else rounds)
        for name, loaded in arms.items()
    }


def with_rounds(loaded: LoadedRecipe, rounds: int) -> LoadedRecipe:
    """A recipe with another number of rounds, its learning-rate schedule and evaluations stretched alike.

    Parameters
    ----------
    loaded : the recipe.
    rounds : how many it is to have.
    """
    document = loaded.recipe.document()
    ratio = rounds / document["rounds"]
    schedule = {
        key: _stretch(value, ratio) if key in SCHEDULE_ROUNDS else value
        for key, value in document["training"]["lr_schedule"].items()
    }
    evaluation = document["evaluation"]
    dense = max(evaluation["dense_last"], DENSE_LAST)
    return loaded.with_document({
        **document, "rounds": rounds, "training": {**document["training"], "lr_schedule": schedule},
        "evaluation": {**evaluation, "every": _stretch(evaluation["every"], ratio), "dense_last": dense},
    })  # fmt: skip


def _stretch(rounds: Any, ratio: float) -> Any:
    """A number of rounds, or a list of them; 0 stays 0."""
    if isinstance(rounds, list | tuple):
        return [_stretch(one, ratio) for one in rounds]
    return max(1, round(rounds * ratio)) if rounds else 0

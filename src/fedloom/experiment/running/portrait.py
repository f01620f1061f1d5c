"""Who takes part in a run, what it costs them and what they hold: written once, for reports and whoever has no data."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...data import DATASETS
from ...fleet.rings import tier_rings
from ...methods import METHODS
from ...models import MODELS, cost
from ..assembly.assemble import Experiment

FILE = "fleet.json"
MOST_CLASSES = 100  # columns; of more, words say, only the most frequent are told apart
FREQUENT = 10


def portrait(experiment: Experiment) -> dict[str, Any]:
    recipe, fleet, method = experiment.loaded.recipe, experiment.fleet, experiment.method
    fixed = fleet.assignment == "fixed"
    return {
        "method": {
            "name": recipe.method.name, "paper": method.paper, "leaves": method.leaves, "keeps": method.keeps,
            "features": method.ships, "gives": method.gives,
        },
        "dataset": experiment.dataset.name,
        "tiers": _tiers(experiment),
        "rings": [list(ring) for ring in tier_rings(fleet)],
        "devices": [fleet.name(index) for index in range(fleet.size)],
        "device_tiers": [one.tier for one in fleet.devices(1)] if fixed else None,
        "unseen": [fleet.name(index) for index in sorted(fleet.unseen)],
        "holdings": _holdings(experiment),
        "own_names": _own_names(experiment),
    }  # fmt: skip


def _tiers(experiment: Experiment) -> list[dict[str, Any]]:
    fleet = experiment.fleet
    served = {tier.name for tier in fleet.served}
    found = []
    for tier, share in zip(fleet.tiers, fleet.shares, strict=True):
        spent = cost(tier.model)
        trained = tier.name in served
        size = {"parameters": spent.parameters, "macs": spent.macs}
        found.append({"name": tier.name, "share": share, **size, "trained": trained})
    return found


def _holdings(experiment: Experiment) -> dict[str, Any]:
    """How many training examples of each class every device holds; where every word is one, how many words."""
    labels, classes = experiment.dataset.train.y.numpy(), experiment.dataset.classes
    shown: Sequence[int] = range(classes)
    if classes > MOST_CLASSES:
        often = np.bincount(labels.ravel(), minlength=classes)
        shown = np.argsort(-often, kind="stable")[:FREQUENT].tolist()
    counts = [np.bincount(labels[rows].ravel(), minlength=classes) for rows in experiment.partition.train]
    told = [[int(count[one]) for one in shown] for count in counts]
    rest = [int(count.sum()) - sum(some) for count, some in zip(counts, told, strict=True)]
    if not any(rest):
        return {"classes": [str(one) for one in shown], "counts": told}
    return {
        "classes": [*(str(one) for one in shown), "others"],
        "counts": [[*some, other] for some, other in zip(told, rest, strict=True)],
    }


def _own_names(experiment: Experiment) -> list[str]:
    """What a recipe names that is not the project's own: to run it again takes the user's file too."""
    recipe = experiment.loaded.recipe
    families = {tier.family or recipe.model.family for tier in recipe.tiers}
    unknown = [recipe.method.name] if recipe.method.name not in METHODS else []
    unknown += sorted(families - MODELS.keys())
    return unknown + ([recipe.data.dataset] if recipe.data.dataset not in DATASETS else [])

"""Which merge a round has: the one place where a recipe's choice becomes one."""

from ...fleet import expected_voters
from ...footprints import Merge, PrivateMerge
from .assemble import Experiment


def merge_for(experiment: Experiment, round_number: int) -> Merge:
    """The experiment's own, as a defence may have chosen it; or one that hides devices, whose noise is the round's."""
    said, fleet = experiment.loaded.recipe.privacy, experiment.fleet
    if said.clip is None or said.noise is None:
        return experiment.merge
    expected = expected_voters(fleet, experiment.loaded.recipe.fleet.participation)
    electorate = [
        (experiment.method.votes_on(tier, fleet, round_number), expected[tier.name])
        for tier in fleet.served
        if expected[tier.name] > 0
    ]
    return PrivateMerge(said.clip, said.noise, electorate, fleet.seed, round_number)

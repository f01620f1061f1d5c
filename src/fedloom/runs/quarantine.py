"""Devices whose replies were refused too many rounds in a row take no more part in training."""

from ..engines import Refusal
from ..engines.gate import CODES
from ..fleet import Device, RoundContext
from .build import Experiment


def trusted(experiment: Experiment, cohort: list[Device]) -> list[Device]:
    """Those of a cohort that may still be asked."""
    after, rounds = experiment.loaded.recipe.admission.quarantine, _refused_in_a_row(experiment)
    return [device for device in cohort if after is None or rounds.get(device.name, 0) < after]


def note_refusals(experiment: Experiment, context: RoundContext, refusals: list[Refusal]) -> None:
    """A device of which nothing came is neither better nor worse for it; a reply that is admitted makes good all."""
    after, rounds = experiment.loaded.recipe.admission.quarantine, _refused_in_a_row(experiment)
    if after is None:
        return
    refused, told_of = {one.device for one in refusals if one.code in CODES}, {one.device for one in refusals}
    for name in sorted(device.name for device in context.cohort if device.name in context.traffic.devices):
        if name not in told_of:
            rounds.pop(name, None)
        elif name in refused:
            rounds[name] = rounds.get(name, 0) + 1
            if rounds[name] == after:
                said = f"refused {after} rounds in a row: it is not asked any more"
                experiment.refusals.append((context.number, Refusal(name, "QUARANTINE", said)))


def _refused_in_a_row(experiment: Experiment) -> dict[str, int]:
    """By device; part of a run's standing, so that it outlives a crash."""
    known: dict[str, int] = experiment.standing.others.setdefault("refused_in_a_row", {})
    return known

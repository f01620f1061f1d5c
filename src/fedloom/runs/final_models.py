"""The models of a run that has ended: saved for every tier, and compared with each other."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..client import Client, ClientResult, Schedule, with_batchnorm_statistics
from ..engines.in_process import Job, make_blocks, run_block
from ..evaluation.cka import cka_map, features
from ..fleet import Device, DeviceModel, ModelWeights, Request, ServerModel, Tier
from ..tensors import Parcel
from .experiment import Experiment
from .folder import RunWriter

SHARED = "shared.safetensors"


def save_models(experiment: Experiment, server: Parcel, number: int, journal: RunWriter) -> None:
    """Every tier's model with its normalization statistics, ready to be used; where the server has no whole model, the
    weights that it has."""
    fleet = experiment.fleet
    ask = experiment.ask(number)
    candidates = experiment.method.eval_targets(server)
    if "weights" in server and not any(isinstance(one, ServerModel) for one in candidates.values()):
        journal.tensors(SHARED, server["weights"])
    for name, candidate in candidates.items():
        if not isinstance(candidate, ServerModel):
            continue
        for tier, weights in experiment.evaluator.models(name, candidate, fleet, ask, number).items():
            about = {"family": tier.model.family, "tier": tier.name, "settings": repr(dict(tier.model.settings))}
            journal.model(tier.name if name == "server" else f"{tier.name}.{name}", weights, about)


def load_device_model(experiment: Experiment, device: Device, candidate: DeviceModel, number: int) -> ModelWeights:
    """By the question with which it is judged after this round, for that decides the batches of its examples. Right
    here: neither workers nor a convoy know this task."""
    found: list[ModelWeights] = []

    def look(client: Client, inbox: Parcel) -> ClientResult:
        model, weights = candidate.load(client, inbox)
        filled = with_batchnorm_statistics(replace(client, model=model), weights)
        found.append((model, {name: one[0].detach().clone() for name, one in filled.items()}))
        return ClientResult(upload={})

    evaluator = experiment.evaluator
    schedule = Schedule(evaluator.statistics.batch_size)
    task = replace(
        evaluator.local_evaluation(candidate).evaluate, run=look, sends={}, batch_key=None, schedule=schedule
    )
    request = Request(task, {device: candidate.inbox(device)}, number)
    for block in make_blocks([Job(experiment.simulator, request)]):
        run_block(block)
    return found[0]


FILE = "cka.json"


EXAMPLES = 128


def compute_tier_cka(experiment: Experiment, server: Parcel, number: int, folder: Path) -> list[dict[str, Any]]:
    """Every tier's model after the last round, of this number, against the largest tier's: the one that the server
    has, else that of one of its devices."""
    largest = experiment.fleet.largest.name
    x = experiment.dataset.preparation(experiment.dataset.test.x[:EXAMPLES])
    found = {
        tier.name: _of_server(tier, folder) or _of_device(tier, experiment, server, number)
        for tier in experiment.fleet.active_tiers
    }
    seen = {name: features(*one, x) for name, one in found.items() if one}
    if not seen.get(largest):
        return []
    return [
        {"tier": name, "against": largest, "layers": list(seen[name]), "layers_against": list(seen[largest]),
         "cka": _plain(cka_map(seen[name], seen[largest]))}
        for name in seen
        if seen[name]
    ]  # fmt: skip


def _of_server(tier: Tier, folder: Path) -> ModelWeights | None:
    file = folder / "models" / f"{tier.name}.safetensors"
    return (tier.model, load_file(file)) if file.is_file() else None


def _of_device(tier: Tier, experiment: Experiment, server: Parcel, number: int) -> ModelWeights | None:
    """Of the tier's first device that has learned, if any has. A device that is none of this process shows nothing."""
    candidates = [
        one
        for one in experiment.method.eval_targets(server).values()
        if isinstance(one, DeviceModel) and (not one.tiers or tier.name in one.tiers)
    ]
    devices = [device for device in experiment.fleet.devices(number) if device.tier == tier.name]
    if not candidates or not devices or not experiment.client_states.is_local:
        return None
    learned = experiment.client_states.committed
    device = next((one for one in devices if one.name in learned), devices[0])
    return load_device_model(experiment, device, candidates[0], number)


def _plain(values: list[list[float]]) -> list[list[float | None]]:
    """What sees no difference between examples is like nothing."""
    return [[None if math.isnan(one) else round(one, 6) for one in line] for line in values]

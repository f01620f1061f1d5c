"""The models at the end of a run: saved for every tier, and compared with each other by CKA."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from ..client import Client, ClientResult, Schedule, with_batchnorm_statistics
from ..engines.in_process import Job, make_blocks, run_block
from ..evaluation.cka import cka_map, features
from ..exporting import describe_model
from ..fleet import Device, DeviceModel, ModelWeights, Request, ServerModel, Tier, make_ask
from ..placement import leave
from ..tensors import Parcel
from .experiment import Experiment
from .folder import RunWriter
from .loop import eval_targets

SHARED_FILE, CKA_FILE = "shared.safetensors", "cka.json"
CKA_EXAMPLES = 128


def save_models(experiment: Experiment, server: Parcel, number: int, writer: RunWriter) -> None:
    """Save every tier's model, with frozen weights and batch-norm statistics, so that a file needs no other.

    If the server has no complete model, save its weights.
    """
    fleet = experiment.fleet
    ask = make_ask(experiment.engine, number)
    targets = eval_targets(experiment, server)
    if "weights" in server and not any(isinstance(target, ServerModel) for target in targets.values()):
        writer.write_tensors(SHARED_FILE, server["weights"])
    for name, target in targets.items():
        if not isinstance(target, ServerModel):
            continue
        for tier, weights in experiment.evaluator.models(name, target, fleet, ask, number).items():
            about = describe_model(tier.model, experiment.dataset, tier=tier.name, round=number)
            whole = {**weights, **tier.model.frozen_weights()}
            writer.write_model(tier.name if name == "server" else f"{tier.name}.{name}", whole, about)


def load_device_model(experiment: Experiment, device: Device, target: DeviceModel, number: int) -> ModelWeights:
    """A device's model, as it is evaluated after this round.

    The evaluation's own task is used, since it decides the batches that fill batch-norm statistics. It runs in this
    process: workers cannot find a task that is made here.
    """
    loaded: list[ModelWeights] = []

    def load(client: Client, inbox: Parcel) -> ClientResult:
        model, weights = target.load(client, inbox)
        filled = with_batchnorm_statistics(replace(client, model=model), weights)
        loaded.append((model, {name: tensor[0].detach().clone() for name, tensor in filled.items()}))
        return ClientResult(upload={})

    evaluator = experiment.evaluator
    schedule = Schedule(evaluator.statistics.batch_size)
    task = replace(evaluator.local_evaluation(target).evaluate, run=load, sends={}, batch_key=None, schedule=schedule)
    request = Request(task, {device: target.inbox(device)}, number)
    for block in make_blocks([Job(experiment.simulator, request)]):
        run_block(block)
    model, weights = loaded[0]
    return model.plain, leave(weights)


def compute_tier_cka(experiment: Experiment, server: Parcel, number: int, folder: Path) -> list[dict[str, Any]]:
    """Compare every tier's model after round `number` with the largest tier's: the server's model, or else that of one
    device of the tier."""
    largest = experiment.fleet.largest.name
    x = experiment.dataset.preparation(experiment.dataset.test.x[:CKA_EXAMPLES])
    models = {
        tier.name: _read_server_model(tier, folder) or _load_tier_model(tier, experiment, server, number)
        for tier in experiment.fleet.active_tiers
    }
    compute = experiment.simulator.compute
    maps = {name: features(*model, x, compute=compute) for name, model in models.items() if model}
    if not maps.get(largest):
        return []
    return [
        {"tier": name, "against": largest, "layers": list(maps[name]), "layers_against": list(maps[largest]),
         "cka": _round_cka(cka_map(maps[name], maps[largest]))}
        for name in maps
        if maps[name]
    ]  # fmt: skip


def _read_server_model(tier: Tier, folder: Path) -> ModelWeights | None:
    file = folder / "models" / f"{tier.name}.safetensors"
    return (tier.model, load_file(file)) if file.is_file() else None


def _load_tier_model(tier: Tier, experiment: Experiment, server: Parcel, number: int) -> ModelWeights | None:
    """The model of the tier's first device, if possible one that has a state; None if devices are elsewhere."""
    targets = [
        target
        for target in eval_targets(experiment, server).values()
        if isinstance(target, DeviceModel) and (not target.tiers or tier.name in target.tiers)
    ]
    devices = [device for device in experiment.fleet.devices(number) if device.tier == tier.name]
    if not targets or not devices or not experiment.client_states.is_local:
        return None
    states = experiment.client_states.committed
    device = next((device for device in devices if device.name in states), devices[0])
    return load_device_model(experiment, device, targets[0], number)


def _round_cka(values: list[list[float]]) -> list[list[float | None]]:
    """A layer with the same output for all examples has no CKA: null."""
    return [[None if math.isnan(value) else round(value, 6) for value in line] for line in values]

"""What each device sent last, kept by the server for reporting alone: FedHeN's figures show the mean of it.

A device that was never asked counts with the first model. Server state has one bundle for each device.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from ..client import Layout
from ..fleet import EvalTarget, Fleet, Reply, ServerModel, Tier
from ..footprints import between, is_part
from ..models import Model
from ..tensors import Parcel, Tensors, combine

KEPT = "what it sent last, which the server keeps for reports (method.report = false does without)"


def latest_models(fleet: Fleet, first: Tensors) -> dict[str, Tensors]:
    """Everybody's first model, tier by tier; all share the same memory until they answer."""
    shared = {tier.name: tier.footprint.read(first) for tier in fleet.active_tiers}
    return {bundle(device.tier, device.name): shared[device.tier] for device in fleet.members(1)}


def with_latest(first: Parcel, fleet: Fleet) -> Parcel:
    """A first state of one global model, and beside it what everybody holds of it."""
    return {**first, **latest_models(fleet, first["weights"])}


def received(server: Parcel, replies: Iterable[Reply]) -> dict[str, Tensors]:
    """What has come in this round, if the server keeps it."""
    named = {bundle(reply.device.tier, reply.device.name): reply.sent["weights"] for reply in replies}
    return {name: weights for name, weights in named.items() if name in server}


def whole_model(model: Model, inbox: Parcel, examples: int) -> Layout:
    """All weights of the device's own model."""
    return {name: (tuple(shape), torch.get_default_dtype()) for name, shape in model.shapes().items()}


def reports(server: Parcel) -> dict[str, EvalTarget]:
    """`report_paper`: a tier's model is the mean over its own devices; `report_all`: over all that contain it."""
    if not any(name.startswith("latest:") for name in server):
        return {}
    return {
        "report_paper": ServerModel(lambda tier: _mean(server, tier, own=True)),
        "report_all": ServerModel(lambda tier: _mean(server, tier, own=False)),
    }


def report_problem(method: str, fleet: Fleet) -> str | None:
    if fleet.assignment != "fixed":
        return f"{method} cannot report each device's last model where tiers are redrawn; set report = false"
    empty = {tier.name for tier in fleet.active_tiers} - {device.tier for device in fleet.members(1)}
    return f"{method} cannot report on tier {min(empty)!r}, which has no device; set report = false" if empty else None


def bundle(tier: str, device: str) -> str:
    return f"latest:{tier}:{device}"


def _mean(server: Parcel, tier: Tier, own: bool) -> dict[str, Tensor]:
    prefix = bundle(tier.name, "") if own else "latest:"
    small = tier.model.shapes()
    parts: list[Tensors] = []
    for name, weights in sorted(server.items()):
        if name.startswith(prefix):
            held = {key: tensor.shape for key, tensor in weights.items()}
            if is_part(small, held):
                parts.append(between(small, held).read(weights))
    return combine(lambda *each: torch.stack(each).double().mean(0).to(each[0].dtype), *parts)

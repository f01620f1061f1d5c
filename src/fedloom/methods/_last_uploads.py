"""The last upload of each device, kept in the server state for reports: FedHeN's figures show the mean of them.

A device that was never asked counts with the initial model.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..client import Layout
from ..fleet import EvalTarget, Fleet, Reply, ServerModel, Tier
from ..footprints import find_footprint, find_sliced_stack, is_submodel
from ..models import Model
from ..tensors import Parcel, Tensors, combine
from .method import init_weights

KEPT_UPLOADS = "what it sent last, which the server keeps for reports (set method.report = false to avoid it)"


def initial_uploads(fleet: Fleet, weights: Tensors) -> dict[str, Tensors]:
    """Each device's slice of the initial model. Devices of a tier share its memory until they reply."""
    slices = {tier.name: tier.footprint.read(weights) for tier in fleet.active_tiers}
    return {upload_key(device.tier, device.name): slices[device.tier] for device in fleet.eligible_devices(1)}


def initial_models(fleet: Fleet, seed: int, warm_start: Tensors | None) -> dict[str, Tensors]:
    """Each device's own initial model, for methods whose devices keep theirs. Devices of a tier share its memory."""
    devices = fleet.eligible_devices(1)
    models = {device.tier: init_weights(device, seed, warm_start) for device in devices}
    return {upload_key(device.tier, device.name): models[device.tier] for device in devices}


def updated_uploads(server: Parcel, replies: Iterable[Reply], bundle: str = "weights") -> dict[str, Tensors]:
    """The uploads of this round, if the server keeps them."""
    uploads = {
        upload_key(reply.device.tier, reply.device.name): reply.upload[bundle]
        for reply in replies
        if bundle in reply.upload
    }
    return {name: weights for name, weights in uploads.items() if name in server}


def report_targets(server: Parcel) -> dict[str, EvalTarget]:
    """`report_paper`: the mean over a tier's own devices; `report_all`: over all devices that contain its model."""
    if not any(name.startswith("latest:") for name in server):
        return {}
    return {
        "report_paper": ServerModel(lambda tier: _mean(server, tier, same_tier=True)),
        "report_all": ServerModel(lambda tier: _mean(server, tier, same_tier=False)),
    }


def mean_of_models(server: Parcel, shared: Tensors | None = None) -> dict[str, EvalTarget]:
    """`report_paper`: the mean of the models that a tier's devices keep, with the `shared` layers where they have any.

    LG-FedAvg's code (Liang et al., 2020) reports it as Global, also for devices that share nothing.
    """
    tiers = tuple(dict.fromkeys(name.split(":")[1] for name in server if name.startswith("latest:")))

    def weights(tier: Tier) -> Tensors:
        kept = [bundle for name, bundle in sorted(server.items()) if name.startswith(upload_key(tier.name, ""))]
        return {**tier.footprint.only(*(shared or ())).read(shared or {}), **_mean_of(kept)}

    return {"report_paper": ServerModel(weights, tiers=tiers)} if tiers else {}


def report_problem(method: str, fleet: Fleet) -> str | None:
    """Why `report` cannot be used with a fleet; None if it can."""
    if fleet.assignment != "fixed":
        return f"{method} cannot report each device's last model where tiers are redrawn; set report = false"
    large = fleet.global_model.shapes()
    stacked = filter(None, (find_sliced_stack(tier.model.shapes(), large) for tier in fleet.active_tiers))
    name = next(stacked, None)
    if name:
        return f"{method} cannot report on parts of {name}, which stacks several things on an axis; set report = false"
    empty = {tier.name for tier in fleet.active_tiers} - {device.tier for device in fleet.eligible_devices(1)}
    return f"{method} cannot report on tier {min(empty)!r}, which has no device; set report = false" if empty else None


def upload_key(tier: str, device: str) -> str:
    return f"latest:{tier}:{device}"


def full_model_layout(model: Model, inbox: Parcel, examples: int) -> Layout:
    """The layout of an upload of all weights of the device's own model."""
    return {name: (tuple(shape), torch.get_default_dtype()) for name, shape in model.shapes().items()}


def _mean(server: Parcel, tier: Tier, same_tier: bool) -> dict[str, Tensor]:
    prefix = upload_key(tier.name, "") if same_tier else "latest:"
    small = tier.model.shapes()
    slices: list[Tensors] = []
    for name, weights in sorted(server.items()):
        if name.startswith(prefix):
            large = {key: tensor.shape for key, tensor in weights.items()}
            if is_submodel(small, large):
                slices.append(find_footprint(small, large).read(weights))
    return _mean_of(slices)


def _mean_of(models: Sequence[Tensors]) -> dict[str, Tensor]:
    return combine(lambda *each: torch.stack(each).double().mean(0).to(each[0].dtype), *models)

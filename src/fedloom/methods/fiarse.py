"""FIARSE: Federated Importance-Aware Submodel Extraction. Wu et al., NeurIPS 2024.

A device trains the weights of the global model that are largest in magnitude, as many as it can hold: a mask of single
entries, chosen anew every round. A weight is averaged over the devices whose mask has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, gradient, label_loss, like, on_device
from ..fleet import EvalTarget, Fleet, RoundContext, ServerModel, Tier
from ..footprints import ClientUpdate, Footprint
from ..models import Model
from ..settings import FrozenDict, Share
from ..tensors import Parcel, Tensors, combine, per_device
from .method import Method, MethodInfo

KEPT = "kept entries"
"""The entries of all matrices and kernels as one row, [1, entries]: of the whole model, or in a message of a mask."""


@dataclass(frozen=True)
class FIARSE(Method):
    """FIARSE: devices train the largest weights of the global model, so many as they can hold.

    It saves bytes, not compute: tensors of a device are dense, with zeros outside its mask, so all tiers have the same
    model and cost the same multiply-adds. A message has the masked entries alone, and to a device one bit for each
    entry, which says where they are.

    While a device trains, an entry that falls below the smallest magnitude of its mask, the threshold, is left out of
    the net. As the mask depends on the weights, the gradient of an entry w is multiplied by 1 + 2 threshold |w| / (|w|
    + threshold)^2, threshold-controlled biased gradient descent; train with plain SGD. Masks are chosen over all
    matrices and kernels together. This follows the authors' code but in three points. Vectors, which are norms and
    biases, always belong to the submodel; there biases compete as well. The average is over the devices whose mask has
    an entry; there over those whose entry has changed, which misses one that training left alone. Devices of size 1
    have no threshold; there it is their smallest weight.

    Parameters
    ----------
    sizes : the share of the entries that a tier's devices hold, by tier; empty: the paper's, all for the first tier and
        a quarter of the tier before for each other.
    """

    info = MethodInfo(
        paper="Wu et al., NeurIPS 2024",
        uploads="the largest weights, as many as the device's tier holds",
        heterogeneity="one model",
        example_settings=FrozenDict(sizes=FrozenDict(large=1.0, small=0.25)),
    )
    dp_uncovered = "updates of entries that are chosen anew every round"

    sizes: Mapping[str, Share] = FrozenDict()

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        entries = sum(server["weights"][name].numel() for name in _masked_names(fleet.global_model))
        shares = self.sizes or {tier.name: 0.25**number for number, tier in enumerate(fleet.active_tiers)}
        held = {name: torch.tensor(max(1, int(share * entries))) for name, share in shares.items()}
        return {**server, "entries": held}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        model = context.fleet.global_model
        flat = _flatten(model, server["weights"])
        held = {tier.name: _largest(flat[KEPT], server["entries"][tier.name]) for tier in context.fleet.active_tiers}
        inboxes = {device: _inbox(flat, held[device.tier]) for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        updates = (ClientUpdate(_footprint(flat, held[r.device.tier]), r.upload["weights"], 1.0) for r in replies)
        return {**server, "weights": _unflatten(model, context.aggregate(flat, updates))}

    @on_device(sends={"weights": like("weights", same_entries=False)})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        if "mask" not in inbox:  # the device holds all entries
            weights = fit(client, _unflatten(client.model, inbox["weights"]), label_loss(client))
            return ClientResult(upload={"weights": _flatten(client.model, weights)})
        values, mask = inbox["weights"][KEPT], inbox["mask"][KEPT]
        dense = values.new_zeros(mask.shape).masked_scatter(mask, values)
        initial = _unflatten(client.model, {**inbox["weights"], KEPT: dense})
        masks = _split(client.model, mask)
        threshold, loss = values.abs().amin((1, 2)), label_loss(client)

        def biased_gradient(weights: Tensors, batch: Batch) -> Tensors:
            active = {name: held & (weights[name].abs() >= per_device(threshold, held)) for name, held in masks.items()}
            effective = {**weights, **combine(torch.mul, {name: weights[name] for name in active}, active)}
            grads = gradient(loss, effective, batch)
            return {
                **grads,
                **{name: grads[name] * on * _gradient_factor(weights[name], threshold) for name, on in active.items()},
            }

        trained = _flatten(client.model, fit(client, initial, biased_gradient))
        # the masked entries in their order; how many they are is known, so that nothing has to be read from the mask
        places = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., : values.shape[-1]]
        kept = trained[KEPT].gather(-1, places)
        return ClientResult(upload={"weights": {**trained, KEPT: kept}})

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        def weights(tier: Tier) -> dict[str, Tensor]:
            flat = _flatten(tier.model, server["weights"])
            dense = torch.zeros_like(flat[KEPT])
            held = _largest(flat[KEPT], server["entries"][tier.name])
            dense[:, held] = flat[KEPT][:, held]
            return _unflatten(tier.model, {**flat, KEPT: dense})

        return {"server": ServerModel(weights)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        if not _masked_names(fleet.global_model):
            return f"fiarse masks matrices and kernels, and {fleet.global_model.family} has none"
        missing = [tier.name for tier in fleet.active_tiers if tier.name not in self.sizes]
        if self.sizes and missing:  # others may be named that take no part, as in the arms of a comparison
            return f"method.sizes has the share of weights of every tier, but none for tier {missing[0]!r}"
        return None


def _masked_names(model: Model) -> list[str]:
    return [name for name, shape in model.shapes().items() if len(shape) > 1]


def _flatten(model: Model, weights: Tensors) -> dict[str, Tensor]:
    """All matrices and kernels as one row, the vectors as they are; leading axes, such as devices, are kept.

    A row and not a vector, since compression leaves vectors as they are.
    """
    shapes, names = model.shapes(), _masked_names(model)
    rows = [weights[name].flatten(weights[name].dim() - len(shapes[name])) for name in names]
    return {KEPT: torch.cat(rows, -1).unsqueeze(-2), **{name: weights[name] for name in shapes if name not in names}}


def _unflatten(model: Model, flat: Tensors) -> dict[str, Tensor]:
    found = {**flat, **_split(model, flat[KEPT])}
    return {name: found[name] for name in model.shapes()}


def _split(model: Model, row: Tensor) -> dict[str, Tensor]:
    """The matrices and kernels of a row."""
    shapes = {name: model.shapes()[name] for name in _masked_names(model)}
    parts = row.squeeze(-2).split([shape.numel() for shape in shapes.values()], -1)
    return {name: part.unflatten(-1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _largest(entries: Tensor, count: Tensor) -> Tensor:
    """Where the largest magnitudes are, ascending; of equal ones the first."""
    order = entries.flatten().abs().sort(descending=True, stable=True).indices
    return order[: int(count)].sort().values


def _inbox(flat: Tensors, held: Tensor) -> Parcel:
    if len(held) == flat[KEPT].numel():
        return {"weights": flat}
    mask = torch.zeros_like(flat[KEPT], dtype=torch.bool)
    mask[:, held] = True
    return {"weights": {**flat, KEPT: flat[KEPT][:, held]}, "mask": {KEPT: mask}}


def _footprint(flat: Tensors, held: Tensor) -> Footprint:
    """Single entries of the row, and all of the vectors."""
    full = {name: tuple(slice(0, size) for size in tensor.shape) for name, tensor in flat.items()}
    return Footprint({**full, KEPT: (slice(0, 1), held if len(held) < flat[KEPT].numel() else slice(0, len(held)))})


def _gradient_factor(weight: Tensor, threshold: Tensor) -> Tensor:
    """1 + 2 threshold |w| / (|w| + threshold)^2, and 1 where both are zero."""
    size, at = weight.abs(), per_device(threshold, weight)
    total = (size + at).square()
    return 1 + torch.where(total > 0, 2 * at * size / total.clamp_min(torch.finfo(total.dtype).tiny), 0)

"""InclusiveFL. Liu et al., No One Left Behind: Inclusive Federated Learning over Heterogeneous Devices, KDD 2022.

Weak devices train a net of fewer layers. Layers are averaged over all depths, but the top layer and the classifier of
each depth only over its own devices. A top layer also follows the layers that deeper devices have in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Client, ClientResult, fit, label_loss, like, on_device
from ..fleet import Device, EvalTarget, Fleet, Reply, RoundContext, ServerModel, Tier, tier_slices
from ..footprints import ClientUpdate, Footprint
from ..models import Model
from ..settings import Fraction
from ..tensors import Parcel, Tensors, combine
from .method import Method, MethodInfo, early_exit_problem


@dataclass(frozen=True)
class InclusiveFL(Method):
    """InclusiveFL: devices train as many layers as they can run, and their top layers learn from deeper devices.

    In a round, the change of the top layer of depth l becomes (1 - momentum) times its own and momentum times that of
    the next larger depth in the round before, the mean over its layers from l to its last. Changes are those of
    averaged weights; in the authors' code they are gradients, which the server applies by AdamW. That code adds them
    only where there are none yet, and takes the last of these layers alone, divided by their number. Both defeat what
    the abstract describes, so here every round adds the mean. The exits of a net below its last are not trained.

    Parameters
    ----------
    momentum : the share of the deeper devices' change, beta; 0: none, as for nets whose layers differ in shape.
    """

    info = MethodInfo(paper="Liu et al., KDD 2022", uploads="weights up to the device's own depth, example count")
    dp_uncovered = "updates to several aggregates, one for each depth"

    momentum: Fraction = 0.2

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = dict(super().start(fleet, seed, warm_start))
        weights, layers = server["weights"], fleet.global_model.layers()
        for depth in _depths(fleet)[:-1]:
            top = {name: weights[name] for name in layers[depth - 1]}
            server[_top(depth)] = top
            if self.momentum:
                server[_momentum(depth)] = combine(torch.zeros_like, top)
        return server

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": self._weights(server, device)} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        depths, layers = _depths(context.fleet), context.fleet.global_model.layers()
        updates = (ClientUpdate(self._shared(r.device, depths[-1]), r.upload["weights"], r.examples) for r in replies)
        new = {**server, "weights": context.aggregate(server["weights"], updates)}
        for below, depth in zip([0, *depths], depths, strict=False):
            of_depth = [reply for reply in replies if len(reply.device.model.layers()) == depth]
            if not of_depth:
                continue  # its top layer stays, and what others have learned from it before
            change = _mean_change(layers[max(below, 1) - 1 : depth], inboxes, of_depth, context)
            if _top(depth) in server:
                top, own = server[_top(depth)], {name: change[name] for name in layers[depth - 1]}
                followed = server[_momentum(depth)] if self.momentum else combine(torch.zeros_like, top)
                new[_top(depth)] = combine(self._moved, top, own, followed)
            if below and self.momentum:
                same_place = [[change[name] for name in layer] for layer in layers[below - 1 : depth]]
                means = [torch.stack(each).mean(0) for each in zip(*same_place, strict=True)]
                new[_momentum(below)] = dict(zip(layers[below - 1], means, strict=True))
        return new

    def _moved(self, top: Tensor, change: Tensor, momentum: Tensor) -> Tensor:
        return top + (1 - self.momentum) * change + self.momentum * momentum

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        trained = client.model.last_exit_weights()
        return ClientResult(upload={"weights": fit(client, inbox["weights"], label_loss(client), only=trained)})

    def _weights(self, server: Parcel, target: Device | Tier) -> dict[str, Tensor]:
        """The model of a device or tier: its layers of the global model, but a top layer of its own."""
        own_top = server.get(_top(len(target.model.layers())), {})
        return {**target.footprint.read(server["weights"]), **own_top}

    def _shared(self, target: Device | Tier, deepest: int) -> Footprint:
        """What is averaged over all depths, and the classifier; the deepest top layer is the global model's."""
        layers = target.model.layers()
        own_top = layers[-1] if len(layers) < deepest else ()
        return target.footprint.only(*(name for name in target.model.last_exit_weights() if name not in own_top))

    def aggregation_footprint(self, tier: Tier, fleet: Fleet, round_number: int) -> Footprint:
        return self._shared(tier, _depths(fleet)[-1])

    def eval_targets(self, server: Parcel) -> Mapping[str, EvalTarget]:
        slices = tier_slices(server["weights"])

        def weights(tier: Tier) -> dict[str, Tensor]:
            return {**slices.weights(tier), **server.get(_top(len(tier.model.layers())), {})}

        return {"server": ServerModel(weights)}

    def check_fleet(self, fleet: Fleet) -> str | None:
        problem = early_exit_problem("inclusivefl", fleet)
        if problem:
            return problem
        model = fleet.global_model
        if not model.layers():
            return (
                f"inclusivefl is about nets of more or fewer layers, and {model.family} names no list of them; use "
                "transformer, preactresnet or convnet, or name the list in the module's attribute `layer_list`"
            )
        shapes = model.shapes()
        for tier in fleet.active_tiers:
            sliced = next((name for name, shape in tier.model.shapes().items() if shape != shapes[name]), None)
            if sliced:
                return f"inclusivefl has nets of unequal depth alone, and tier {tier.name!r} has a part of {sliced}"
        depths = _depths(fleet)
        if self.momentum and len(depths) > 1:
            layers = model.layers()[depths[0] - 1 : depths[-1]]
            if len({_layer_shapes(model, layer) for layer in layers}) > 1:
                return (
                    f"inclusivefl passes changes on between layers of the same shapes, and those of {model.family} "
                    "differ; set method.momentum = 0, or use a net with equal layers, such as transformer"
                )
        return None


def _top(depth: int) -> str:
    return f"top:{depth}"


def _momentum(depth: int) -> str:
    return f"momentum:{depth}"


def _depths(fleet: Fleet) -> list[int]:
    """The different numbers of layers of the fleet's nets, ascending."""
    return sorted({len(tier.model.layers()) for tier in fleet.active_tiers})


def _layer_shapes(model: Model, layer: Sequence[str]) -> tuple[tuple[str, torch.Size], ...]:
    """The weights of a layer, by what follows its number, and their shapes."""
    shapes = model.shapes()
    return tuple((name.split(".", 2)[2], shapes[name]) for name in layer)


def _mean_change(
    layers: Sequence[Sequence[str]], inboxes: Mapping[Device, Parcel], replies: Sequence[Reply], context: RoundContext
) -> dict[str, Tensor]:
    """By how much devices of one depth changed some of their layers in the mean."""
    names = [name for layer in layers for name in layer]
    received = {name: inboxes[replies[0].device]["weights"][name] for name in names}
    updates = (ClientUpdate(r.device.footprint.only(*names), r.upload["weights"], r.examples) for r in replies)
    return combine(torch.sub, context.aggregate(received, updates), received)

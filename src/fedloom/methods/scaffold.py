"""SCAFFOLD. Karimireddy et al., ICML 2020, Algorithm 1.

Every device keeps a control variate c_i, an estimate of its gradient, and the server their mean c. Local training
follows g - c_i + c, so that it does not drift to the device's own optimum. With nested models c is a mean entry by
entry: over the devices whose slice has the entry. Where only one device has it, c is c_i and training is plain.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor

from ..client import Batch, Client, ClientResult, fit, gradient, label_loss, like, on_device
from ..fleet import Device, Fleet, RoundContext
from ..footprints import ClientUpdate
from ..models import Model
from ..settings import Positive, SearchRange
from ..tensors import Parcel, Tensors, combine, finite_devices, per_device
from ._reply_share import reply_shares
from .method import Method, MethodInfo, fixed_tiers_problem


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD: control variates of devices and server correct the drift of local training.

    We know of no program of the authors, and those of others differ from the paper: PFLlib's takes the batches of one
    epoch for the number of steps K, however many epochs there are; that of FedDyn's authors has one K for all devices,
    and weights control variates by numbers of examples. Here all is as in the paper, and K is a device's own.

    Parameters
    ----------
    option : a device's new control variate: "I", its mean gradient at the model it received, for which it goes over the
        round's batches once more; "II", its mean gradient over the steps of its training, as in the paper's
        experiments. With plain SGD that is c_i - c + (x - y) / (K lr), as the paper writes it; the mean itself is a
        gradient with every optimizer.
    global_lr : the step size of the server, the paper's global step-size.
    """

    info = MethodInfo(
        paper="Karimireddy et al., ICML 2020",
        uploads="weights of the device's slice, change of its control variate",
        client_state="its control variate",
        server_step="has a server step of its own, method.global_lr",
    )

    option: Literal["I", "II"] = "II"
    global_lr: Annotated[Positive, SearchRange(0.3, 3.0, log=True)] = 1.0

    def start(self, fleet: Fleet, seed: int, warm_start: Tensors | None = None) -> Parcel:
        server = super().start(fleet, seed, warm_start)
        return {**server, "control": combine(torch.zeros_like, server["weights"])}

    def init_client(self, device: Device, seed: int, warm_start: Tensors | None = None) -> Parcel:
        return {"control": {name: torch.zeros(shape) for name, shape in device.model.shapes().items()}}

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {
            device: {bundle: device.footprint.read(server[bundle]) for bundle in ("weights", "control")}
            for device in context.cohort
        }
        replies = context.ask(self.train, inboxes)

        def mean(bundle: str) -> Tensors:
            updates = (ClientUpdate(reply.device.footprint, reply.upload[bundle], 1.0) for reply in replies)
            return context.aggregate(server[bundle], updates)

        shares = reply_shares(context, server["weights"], replies)  # |S| / N, entry by entry
        rates = combine(lambda share: torch.full_like(share, self.global_lr), shares)
        return {
            "weights": combine(_move, server["weights"], mean("weights"), rates),
            "control": combine(_move, server["control"], mean("control"), shares),
        }

    @on_device(sends={"weights": like("weights"), "control": like("control")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        x, c, c_i = inbox["weights"], inbox["control"], client.state["control"]
        loss, total, taken = label_loss(client), combine(torch.zeros_like, x), torch.zeros_like(client.plan[0].active)

        def corrected(y: Tensors, batch: Batch) -> Tensors:
            g = gradient(loss, y, batch)
            _add_step(total, taken, g, batch.takes_step)
            return combine(lambda g, c_i, c: g - c_i + c, g, c_i, c)

        y = fit(client, x, corrected)
        if self.option == "I":
            total, taken = self._sum_gradients(client, x)
        new = combine(partial(_mean_gradient, taken), total, c_i)
        # an update of what the device received: so compression sends the change alone
        sent = combine(lambda c, new, c_i: c + (new - c_i), c, new, c_i)
        return ClientResult(upload={"weights": y, "control": sent}, state={"control": new})

    def _sum_gradients(self, client: Client, x: Tensors) -> tuple[dict[str, Tensor], Tensor]:
        """The sum of the gradients of the round's batches at the received model, and the number of steps, [K]."""
        loss, total, taken = label_loss(client), combine(torch.zeros_like, x), torch.zeros_like(client.plan[0].active)
        for step in client.plan:
            _add_step(total, taken, gradient(loss, x, client.batch(step)), step.active)
        return total, taken

    def check_fleet(self, fleet: Fleet) -> str | None:
        return fixed_tiers_problem(fleet)

    @property
    def dp_uncovered(self) -> str:
        return "its control variate"

    def device_macs(self, model: Model, examples: int, steps: int) -> float:
        return (2 if self.option == "I" else 1) * super().device_macs(model, examples, steps)


def _move(old: Tensor, mean: Tensor, step: Tensor) -> Tensor:
    """So much of the way from old to mean. Entries that did not change keep their bits; a whole step is the mean."""
    moved = (old.double() + step * (mean.double() - old.double())).to(old.dtype)
    return torch.where((mean == old) | (step == 1), mean, moved)


def _add_step(total: Tensors, taken: Tensor, gradients: Tensors, active: Tensor) -> None:
    """Add, in place, the gradients of devices that take a step; those of others may be anything.

    In float16 a gradient may overflow. `fit` then skips the step, and it does not count here either.
    """
    counted = (active > 0) & finite_devices(gradients)
    taken += counted
    for name, sums in total.items():
        sums += torch.where(per_device(counted, sums), gradients[name], 0)


def _mean_gradient(taken: Tensor, total: Tensor, c_i: Tensor) -> Tensor:
    """The new control variate; that of a device which skipped all steps stays."""
    steps = per_device(taken, total)
    return torch.where(steps > 0, total / steps.to(total), c_i)

"""ScaleFL: Resource-Adaptive Federated Learning With Heterogeneous Clients. Ilhan, Su & Liu, CVPR 2023.

A device trains a part of the global model that is both narrower and less deep, up to an early exit. Of its exits, the
deeper ones count more, and the last one teaches the others. A weight is averaged over the devices that hold it.
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from ..client import Batch, Client, ClientResult, distillation_loss, fit, like, on_device, supervised_loss
from ..fleet import Fleet, RoundContext
from ..footprints import ClientUpdate
from ..settings import NonNegative, Positive, SearchRange
from ..tensors import Parcel, Tensors
from .method import Method, MethodInfo, early_exit_problem


@dataclass(frozen=True)
class ScaleFL(Method):
    """ScaleFL: devices train narrower and less deep parts of the model, whose last exit teaches the earlier ones.

    Exit i of a device's m counts i / (1 + ... + m). Its loss is that with the labels and, for all but the last, the
    divergence from the last exit's outputs at a temperature. Scale both `width` and depth of the tiers. Weights of
    exits, temperature and average are those of the authors' code, which divides the divergence by the number of classes
    as well (torch's reduction "mean"), lets its gradient into the teacher, leaves it out in the first quarter of the
    rounds, and has a weight of 0 unless it is set; here it is the mean over examples, teaches the earlier exits alone,
    and counts from the first round.

    Parameters
    ----------
    distillation : the weight of the divergence, gamma; 0.05 in the authors' command for BERT. 0: none.
    temperature : the temperature of both outputs, T; the divergence is multiplied by its square.
    """

    info = MethodInfo(
        paper="Ilhan et al., CVPR 2023",
        uploads="weights of the device's part of the model",
        example_nets="exits and widths",
    )
    dp_uncovered = ""

    distillation: Annotated[NonNegative, SearchRange(0.005, 1.0, log=True)] = 0.05
    temperature: Positive = 3.0

    def round(self, server: Parcel, context: RoundContext) -> Parcel:
        inboxes = {device: {"weights": device.footprint.read(server["weights"])} for device in context.cohort}
        replies = context.ask(self.train, inboxes)
        updates = (ClientUpdate(reply.device.footprint, reply.upload["weights"], 1.0) for reply in replies)
        return {"weights": context.aggregate(server["weights"], updates)}

    @on_device(sends={"weights": like("weights")})
    def train(self, client: Client, inbox: Parcel) -> ClientResult:
        def loss(weights: Tensors, batch: Batch) -> Tensor:
            *earlier, last = client.model(weights, batch.x, batch.step_seeds).exits.values()
            exits = len(earlier) + 1
            total = exits * supervised_loss(last, batch)
            for number, logits in enumerate(earlier, start=1):
                total = total + number * supervised_loss(logits, batch)
                if self.distillation:
                    total = total + number * self.distillation * self._divergence(logits, last, client)
            return total / (exits * (exits + 1) / 2)

        return ClientResult(upload={"weights": fit(client, inbox["weights"], loss)})

    def _divergence(self, logits: Tensor, teacher: Tensor, client: Client) -> Tensor:
        softened = distillation_loss(logits / self.temperature, teacher / self.temperature, client.task)
        return self.temperature**2 * softened

    def check_fleet(self, fleet: Fleet) -> str | None:
        return early_exit_problem("scalefl", fleet)

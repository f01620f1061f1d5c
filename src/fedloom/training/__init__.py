"""What happens on a device: its view of a task, the one training loop, losses and optimisers."""

from .client import Batch, Client, Holdings, Layout, Outcome, Sent, Task, like, on_any_device, on_device, shaped
from .elastic import Stream, draw_subnets, subnet_logits
from .fit import fit, gradient
from .losses import cross_entropy, distance, label_loss, mask_logits, soft_cross_entropy
from .optimisers import OPTIMISERS, RATES, Constant, Cosine, Milestones, Optimiser, Rates, Sgd, at_round
from .plan import DevicePlan, Schedule, Step, plan_for, together

__all__ = [
    "OPTIMISERS",
    "RATES",
    "Batch",
    "Client",
    "Constant",
    "Cosine",
    "DevicePlan",
    "Holdings",
    "Layout",
    "Milestones",
    "Optimiser",
    "Outcome",
    "Rates",
    "Schedule",
    "Sent",
    "Sgd",
    "Step",
    "Stream",
    "Task",
    "at_round",
    "cross_entropy",
    "distance",
    "draw_subnets",
    "fit",
    "gradient",
    "label_loss",
    "like",
    "mask_logits",
    "on_any_device",
    "on_device",
    "plan_for",
    "shaped",
    "soft_cross_entropy",
    "subnet_logits",
    "together",
]

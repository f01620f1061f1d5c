"""What happens on a device: its view of a task, the one training loop, losses and optimisers."""

from .client import Batch, Client, Holdings, Layout, Outcome, Sent, Task, like, on_device, shaped
from .fit import fit, gradient
from .losses import cross_entropy, label_loss, mask_logits
from .optimisers import OPTIMISERS, RATES, Constant, Milestones, Optimiser, Rates, Sgd, at_round
from .plan import DevicePlan, Schedule, Step, plan_for, together

__all__ = [
    "OPTIMISERS",
    "RATES",
    "Batch",
    "Client",
    "Constant",
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
    "Task",
    "at_round",
    "cross_entropy",
    "fit",
    "gradient",
    "label_loss",
    "like",
    "mask_logits",
    "on_device",
    "plan_for",
    "shaped",
    "together",
]

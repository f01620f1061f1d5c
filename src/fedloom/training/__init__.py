"""What happens on a device: its view of a task, the one training loop, losses and optimisers."""

from .alignment import Kernel, about, blended, described, description, misalignment
from .client import (
    Batch,
    Bounded,
    Client,
    Holdings,
    Layout,
    Outcome,
    Pull,
    Sent,
    Task,
    like,
    on_any_device,
    on_device,
    shaped,
)
from .elastic import Stream, draw_subnets, subnet_logits
from .fit import fit, gradient
from .losses import cross_entropy, distance, label_loss, mask_logits, soft_cross_entropy, towards_first_class
from .optimisers import OPTIMISERS, RATES, Adam, Constant, Cosine, Milestones, Optimiser, Rates, Sgd, at_round
from .plan import DevicePlan, Schedule, Step, plan_for, together
from .statistics import batch_sums, own_statistics

__all__ = [
    "OPTIMISERS",
    "RATES",
    "Adam",
    "Batch",
    "Bounded",
    "Client",
    "Constant",
    "Cosine",
    "DevicePlan",
    "Holdings",
    "Kernel",
    "Layout",
    "Milestones",
    "Optimiser",
    "Outcome",
    "Pull",
    "Rates",
    "Schedule",
    "Sent",
    "Sgd",
    "Step",
    "Stream",
    "Task",
    "about",
    "at_round",
    "batch_sums",
    "blended",
    "cross_entropy",
    "described",
    "description",
    "distance",
    "draw_subnets",
    "fit",
    "gradient",
    "label_loss",
    "like",
    "mask_logits",
    "misalignment",
    "on_any_device",
    "on_device",
    "own_statistics",
    "plan_for",
    "shaped",
    "soft_cross_entropy",
    "subnet_logits",
    "together",
    "towards_first_class",
]

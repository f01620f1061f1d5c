"""What happens on a device: tasks and what they see, the training loop, losses and optimizers."""

from .alignment import Kernel, alignment_loss, average_kernels, represent, representation_kind, select_examples
from .client import (
    AuxiliaryLoss,
    Batch,
    Client,
    ClientResult,
    PaddedIndices,
    evaluate_without_padding,
    sum_batch_statistics,
    with_batchnorm_statistics,
)
from .fit import fit, gradient
from .losses import (
    CROSS_ENTROPY,
    LOSSES,
    BinaryCrossEntropy,
    CrossEntropy,
    Focal,
    Huber,
    Loss,
    MeanAbsoluteError,
    MeanSquaredError,
    build_loss,
    default_loss,
    distance,
    distillation_loss,
    dummy_loss,
    fits_task,
    label_loss,
    mask_logits,
    soft_cross_entropy,
    supervised_loss,
)
from .optimizers import (
    LR_SCHEDULES,
    OPTIMIZERS,
    Adam,
    Constant,
    Cosine,
    LRSchedule,
    Milestones,
    Optimizer,
    Sgd,
    UnequalNumbersError,
    join_optimizers,
    joining_key,
    optimizer_at,
)
from .plan import DevicePlan, Schedule, Step, draw_plan, merge_plans
from .subnets import SubnetStream, draw_subnets, subnet_logits
from .task import Bounded, BundleSpec, Layout, Like, Task, join_tasks, like, on_any_device, on_device, shaped, tasks_of

__all__ = [
    "CROSS_ENTROPY", "LOSSES", "LR_SCHEDULES", "OPTIMIZERS", "Adam", "AuxiliaryLoss", "Batch", "BinaryCrossEntropy",
    "Bounded", "BundleSpec", "Client", "ClientResult", "Constant", "Cosine", "CrossEntropy", "DevicePlan", "Focal",
    "Huber", "Kernel", "LRSchedule", "Layout", "Like", "Loss", "MeanAbsoluteError", "MeanSquaredError", "Milestones",
    "Optimizer", "PaddedIndices", "Schedule", "Sgd", "Step", "SubnetStream", "Task", "UnequalNumbersError",
    "alignment_loss", "average_kernels", "build_loss", "default_loss", "distance", "distillation_loss", "draw_plan",
    "draw_subnets", "dummy_loss", "evaluate_without_padding", "fit", "fits_task", "gradient", "join_optimizers",
    "join_tasks", "joining_key", "label_loss", "like", "mask_logits", "merge_plans", "on_any_device", "on_device",
    "optimizer_at", "represent", "representation_kind", "select_examples", "shaped", "soft_cross_entropy",
    "subnet_logits", "sum_batch_statistics", "supervised_loss", "tasks_of", "with_batchnorm_statistics",
]  # fmt: skip

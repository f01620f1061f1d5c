"""Evaluation: metrics, and who evaluates which model on which examples."""

from .batchnorm import StaticBatchNorm
from .evaluator import Evaluator
from .local import FineTune
from .metrics import Row

__all__ = ["Evaluator", "FineTune", "Row", "StaticBatchNorm"]

"""Evaluation: metrics, and who evaluates which model on which examples."""

from .batchnorm import BatchNormStatistics
from .evaluator import Evaluator
from .local import FineTune
from .metrics import Row

__all__ = ["BatchNormStatistics", "Evaluator", "FineTune", "Row"]

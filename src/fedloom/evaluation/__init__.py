"""How good a model is."""

from .batchnorm import StaticBatchNorm
from .evaluator import Judge
from .local import FineTune
from .metrics import Row

__all__ = ["FineTune", "Judge", "Row", "StaticBatchNorm"]

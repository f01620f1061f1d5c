"""How good a model is."""

from .batchnorm import StaticBatchNorm
from .evaluator import Evaluator
from .local import FineTune
from .metrics import Row

__all__ = ["Evaluator", "FineTune", "Row", "StaticBatchNorm"]

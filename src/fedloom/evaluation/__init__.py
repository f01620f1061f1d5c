"""How good a model is."""

from .judge import Judge
from .personal import FineTune
from .rows import Row
from .static_batchnorm import StaticBatchNorm

__all__ = ["FineTune", "Judge", "Row", "StaticBatchNorm"]

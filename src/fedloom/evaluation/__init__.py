"""How good a model is."""

from .judge import Judge
from .rows import Row
from .static_batchnorm import StaticBatchNorm

__all__ = ["Judge", "Row", "StaticBatchNorm"]

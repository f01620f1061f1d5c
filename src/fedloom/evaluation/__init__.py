"""How good a model is and what it costs."""

from .costs import Cost, cost
from .judge import Judge
from .rows import Row
from .static_batchnorm import StaticBatchNorm

__all__ = ["Cost", "Judge", "Row", "StaticBatchNorm", "cost"]

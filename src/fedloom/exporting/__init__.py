"""Export the model of a tier, a device or a subnet to files that run without this package."""

from .card import read_card, usage_snippet, write_card
from .formats import FORMATS, Format, MissingDependency, Predictor
from .module import ExportModule, build_empty_module, build_export_module, build_preparation
from .parity import Parity, as_predictor, check_parity, evaluate_examples, evaluate_predictor, measure_latency_ms

__all__ = [
    "FORMATS", "ExportModule", "Format", "MissingDependency", "Parity", "Predictor", "as_predictor",
    "build_empty_module", "build_export_module", "build_preparation", "check_parity", "evaluate_examples",
    "evaluate_predictor", "measure_latency_ms", "read_card", "usage_snippet", "write_card",
]  # fmt: skip

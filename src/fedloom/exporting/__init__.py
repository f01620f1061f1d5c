"""Export the model of a tier, a device or a subnet to files that run without this package."""

from .card import read_card, usage_snippet, write_card
from .description import (
    InputKind,
    as_lists,
    describe_input,
    describe_model,
    input_transform,
    read_description,
    rebuild_model,
    rebuild_preparation,
)
from .formats import FORMATS, Format, MissingDependency, Predictor
from .module import ExportModule, PreparationModule, build_empty_module, build_export_module, build_preparation
from .parity import Parity, as_predictor, check_parity, evaluate_examples, evaluate_predictor, measure_latency_ms

__all__ = [
    "FORMATS", "ExportModule", "Format", "InputKind", "MissingDependency", "Parity", "Predictor", "PreparationModule",
    "as_lists", "as_predictor", "build_empty_module", "build_export_module", "build_preparation", "check_parity",
    "describe_input", "describe_model", "evaluate_examples", "evaluate_predictor", "input_transform",
    "measure_latency_ms", "read_card", "read_description", "rebuild_model", "rebuild_preparation", "usage_snippet",
    "write_card",
]  # fmt: skip

"""Check methods, models, data sets and engines that were written outside the package, as `check_estimator` does for
scikit-learn: `check_method`, `check_model`, `check_dataset` and `check_engine` raise `CheckFailed` with a hint.

Each check is a function of its own, listed in `METHOD_CHECKS`, `MODEL_CHECKS`, `DATASET_CHECKS` or `ENGINE_CHECKS`; the
tests of the package call the same functions. `TinyWorld` and `ScriptedEngine` are for further tests.
"""

from .accelerator import FakeAccelerator, accelerator
from .datasets import check_dataset
from .device_check import DeviceReport, check_device
from .doubles import InterceptingEngine, ScriptedEngine, build_client, random_block, with_compression, with_transports
from .engines import check_engine
from .methods import check_method
from .models import check_model
from .report import (
    DATASET_CHECKS,
    ENGINE_CHECKS,
    METHOD_CHECKS,
    MODEL_CHECKS,
    CheckFailed,
    CheckReport,
    largest_difference,
    same_bits,
    same_parcel,
)
from .world import TinyWorld, tiny_model

__all__ = [
    "DATASET_CHECKS", "ENGINE_CHECKS", "METHOD_CHECKS", "MODEL_CHECKS", "CheckFailed", "CheckReport",
    "DeviceReport", "FakeAccelerator", "InterceptingEngine", "ScriptedEngine", "TinyWorld", "accelerator",
    "build_client", "check_dataset", "check_device", "check_engine", "check_method", "check_model",
    "largest_difference", "random_block", "same_bits", "same_parcel", "tiny_model", "with_compression",
    "with_transports",
]  # fmt: skip

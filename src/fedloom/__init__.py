"""fedloom: federated learning for devices that cannot all run the same model.

Importing it is cheap: torch and the rest of the package are loaded when a name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import logs

if TYPE_CHECKING:
    from . import engines, methods, models, testing
    from .api.parts import ClientConfig, tiers
    from .api.reproduce import reproduce
    from .api.run import Run
    from .api.simulation import Simulation
    from .api.verbs import (
        attack,
        audit,
        check,
        cka,
        compare,
        export,
        finish,
        load_model,
        open_run,
        plan,
        report,
        resume,
        run,
        subnet,
        tune,
        verify,
    )
    from .client import LOSSES as losses
    from .client import LR_SCHEDULES as lr_schedules
    from .client import OPTIMIZERS as optimizers
    from .data import DATASETS as datasets
    from .data import PARTITIONS as partitions
    from .data import PREPARATIONS as preparations
    from .data import TASKS as tasks
    from .data import Dataset
    from .engines import ATTACKS as attacks
    from .engines.compression import COMPRESSORS as compressors
    from .evaluation.metrics import METRICS as metrics
    from .evaluation.metrics import Metric
    from .exporting import FORMATS as export_formats
    from .fleet.speed import STRAGGLERS as stragglers
    from .footprints import RULES as aggregation
    from .footprints import SERVER_OPTIMIZERS as server_optimizers
    from .recipe.errors import RecipeError
    from .recipe.registries import Registries
    from .tracking import TRACKERS as trackers
    from .tracking import Tracker

__version__ = "0.2.0"

_VERBS = (
    "attack", "audit", "check", "cka", "compare", "export", "finish", "load_model", "open_run", "plan", "report",
    "resume", "run", "subnet", "tune", "verify",
)  # fmt: skip
_LAZY = {
    **{name: ("api.verbs", name) for name in _VERBS},
    "ClientConfig": ("api.parts", "ClientConfig"),
    "Dataset": ("data", "Dataset"),
    "Metric": ("evaluation.metrics", "Metric"),
    "RecipeError": ("recipe.errors", "RecipeError"),
    "Registries": ("recipe.registries", "Registries"),
    "Run": ("api.run", "Run"),
    "Simulation": ("api.simulation", "Simulation"),
    "Tracker": ("tracking", "Tracker"),
    "aggregation": ("footprints", "RULES"),
    "attacks": ("engines", "ATTACKS"),
    "compressors": ("engines.compression", "COMPRESSORS"),
    "datasets": ("data", "DATASETS"),
    "engines": ("engines", ""),
    "export_formats": ("exporting", "FORMATS"),
    "losses": ("client", "LOSSES"),
    "lr_schedules": ("client", "LR_SCHEDULES"),
    "methods": ("methods", ""),
    "metrics": ("evaluation.metrics", "METRICS"),
    "models": ("models", ""),
    "optimizers": ("client", "OPTIMIZERS"),
    "partitions": ("data", "PARTITIONS"),
    "preparations": ("data", "PREPARATIONS"),
    "reproduce": ("api.reproduce", "reproduce"),
    "server_optimizers": ("footprints", "SERVER_OPTIMIZERS"),
    "stragglers": ("fleet.speed", "STRAGGLERS"),
    "tasks": ("data", "TASKS"),
    "testing": ("testing", ""),
    "tiers": ("api.parts", "tiers"),
    "trackers": ("tracking", "TRACKERS"),
}
__all__ = [
    "ClientConfig", "Dataset", "Metric", "RecipeError", "Registries", "Run", "Simulation", "Tracker", "aggregation",
    "attack", "attacks", "audit", "check", "cka", "compare", "compressors", "datasets", "engines", "export",
    "export_formats", "finish", "load_model", "logs", "losses", "lr_schedules", "methods", "metrics", "models",
    "open_run", "optimizers", "partitions", "plan", "preparations", "report", "reproduce", "resume", "run",
    "server_optimizers", "stragglers", "subnet", "tasks", "testing", "tiers", "trackers", "tune", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'fedloom' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    found = import_module(f".{module}", __name__)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

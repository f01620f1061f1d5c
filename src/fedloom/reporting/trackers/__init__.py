"""A run's rows in other people's tools, beside rows.jsonl. Their libraries are imported only when they are chosen."""

from collections.abc import Callable, Mapping, Sequence

from .mlflow import MLflow
from .tensorboard import TensorBoard
from .tracker import NONE, Beginning, Tracker, Trackers

TRACKERS: Mapping[str, Callable[[], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


class TrackerMissing(Exception):  # noqa: N818 - named for what is wrong
    """A tracker whose library is not there."""

    def __init__(self, name: str, error: ImportError):
        super().__init__(f"{name} is not installed: {error}")
        self.hint = "pip install 'fedloom[track]'"


def followed_by(names: Sequence[str], run: str = "", noticed: Callable[[str], None] = lambda said: None) -> Trackers:
    """The trackers of these names, for one run."""
    return Trackers(run, {name: _opened(name) for name in names}, noticed)


def _opened(name: str) -> Tracker:
    try:
        return TRACKERS[name]()
    except ImportError as error:
        raise TrackerMissing(name, error) from None


__all__ = ["NONE", "TRACKERS", "Beginning", "Tracker", "TrackerMissing", "Trackers", "followed_by"]

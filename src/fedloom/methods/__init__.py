"""One file per method; each reads like the algorithm box of its paper."""

from .centralised import Centralised
from .fedavg import FedAvg
from .heterofl import HeteroFL
from .method import Method
from .standalone import Standalone

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "heterofl": HeteroFL,
    "standalone": Standalone,
    "centralised": Centralised,
}

__all__ = ["METHODS", "Method"]

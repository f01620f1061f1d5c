"""One file per method; each reads like the algorithm box of its paper."""

from .centralised import Centralised
from .decouple import Decouple
from .efedsup import EFedSup
from .fedavg import FedAvg
from .fedhen import FedHeN
from .fedprox import FedProx
from .fedrolex import FedRolex
from .fedsup import FedSup
from .fjord import FjORD
from .heterofl import HeteroFL
from .method import Method
from .noside import NoSide
from .standalone import Standalone

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "fjord": FjORD,
    "fedhen": FedHeN,
    "noside": NoSide,
    "decouple": Decouple,
    "fedsup": FedSup,
    "efedsup": EFedSup,
    "standalone": Standalone,
    "centralised": Centralised,
}

__all__ = ["METHODS", "Method"]

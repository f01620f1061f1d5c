"""One file per method; each reads like the algorithm box of its paper."""

from ..registry import Registry
from ._personal import PersonalModels
from .centralized import Centralized
from .decouple import Decouple
from .depthfl import DepthFL
from .ditto import Ditto
from .efedsup import EFedSup
from .everytier import EveryTier
from .fd import FD
from .fedavg import FedAvg
from .feddyn import FedDyn
from .fedgh import FedGH
from .fedgkt import FedGKT
from .fedhen import FedHeN
from .fedhenn import FedHeNN
from .fedin import FedIN
from .fedkd import FedKD
from .fedproto import FedProto
from .fedprox import FedProx
from .fedrep import FedRep
from .fedrolex import FedRolex
from .fedsup import FedSup
from .fedtgp import FedTGP
from .fiarse import FIARSE
from .fjord import FjORD
from .fml import FML
from .heterofl import HeteroFL
from .inclusivefl import InclusiveFL
from .lgfedavg import LGFedAvg
from .method import Method, MethodInfo, fleet_problem, headline_test, training_macs
from .mixed import Mixed
from .noside import NoSide
from .perfedavg import PerFedAvg
from .scaffold import Scaffold
from .scalefl import ScaleFL
from .standalone import Standalone

METHODS: Registry[type[Method]] = Registry(
    "methods",
    {
        "fedavg": FedAvg,
        "fedprox": FedProx,
        "scaffold": Scaffold,
        "feddyn": FedDyn,
        "heterofl": HeteroFL,
        "fedrolex": FedRolex,
        "fjord": FjORD,
        "fiarse": FIARSE,
        "everytier": EveryTier,
        "fedhen": FedHeN,
        "noside": NoSide,
        "decouple": Decouple,
        "depthfl": DepthFL,
        "scalefl": ScaleFL,
        "inclusivefl": InclusiveFL,
        "fedsup": FedSup,
        "efedsup": EFedSup,
        "fedhenn": FedHeNN,
        "fedin": FedIN,
        "fedgkt": FedGKT,
        "fd": FD,
        "fedproto": FedProto,
        "fedtgp": FedTGP,
        "fedgh": FedGH,
        "fml": FML,
        "fedkd": FedKD,
        "ditto": Ditto,
        "lgfedavg": LGFedAvg,
        "perfedavg": PerFedAvg,
        "fedrep": FedRep,
        "mixed": Mixed,
        "standalone": Standalone,
        "centralized": Centralized,
    },
)
register = METHODS.register

__all__ = ["METHODS", "Method", "MethodInfo", "PersonalModels", "fleet_problem", "headline_test", "training_macs"]

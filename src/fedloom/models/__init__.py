"""Models: plain torch modules as functions of weights, run for many devices at once, and the built-in families."""

from ..registry import Registry
from .axes import AxisDeclaration, LayoutError, ModelShapes, concatenated, gates, heads, packed
from .bottleneck import bottleneck
from .columnnet import columnnet
from .convnet import convnet
from .convnet1d import convnet1d
from .cost import Cost, compute_cost
from .kernels import KernelSetting, choose_kernels
from .layers import Scaler
from .lenet import lenet
from .lstm import lstm
from .mlp import mlp
from .mobilenet import SPACES, mobilenet
from .model import Model, StepSeeds, build_model, chain_models, exit_names, last_exit
from .preactresnet import preactresnet
from .preresnet import preresnet
from .search_space import SearchSpace, make_space, space_from_models
from .splitnet import splitnet
from .structure import Family, InputSpec, Outputs, Shapes
from .transformer import transformer
from .unet import unet

MODELS: Registry[Family] = Registry(
    "models",
    {
        "bottleneck": bottleneck,
        "columnnet": columnnet,
        "convnet": convnet,
        "convnet1d": convnet1d,
        "lenet": lenet,
        "lstm": lstm,
        "mlp": mlp,
        "mobilenet": mobilenet,
        "preactresnet": preactresnet,
        "preresnet": preresnet,
        "splitnet": splitnet,
        "transformer": transformer,
        "unet": unet,
    },
    passed=("input_shape", "classes", "widest", "tokens"),
)
register = MODELS.register

__all__ = [
    "MODELS", "SPACES", "AxisDeclaration", "Cost", "Family", "InputSpec", "KernelSetting", "LayoutError", "Model",
    "ModelShapes", "Outputs", "Scaler", "SearchSpace", "Shapes", "StepSeeds", "build_model", "chain_models",
    "choose_kernels", "compute_cost", "concatenated", "exit_names", "gates", "heads", "last_exit", "make_space",
    "packed", "register", "space_from_models",
]  # fmt: skip

"""Models: plain torch modules as functions of weights, run for many devices at once, and the built-in families."""

from .bottleneck import bottleneck
from .convnet import convnet
from .cost import Cost, compute_cost
from .layers import Scaler
from .lenet import lenet
from .lstm import lstm
from .mlp import mlp
from .mobilenet import SPACES, mobilenet
from .model import Model, StepSeeds, build_model, chain_models
from .preactresnet import preactresnet
from .preresnet import preresnet
from .search_space import SearchSpace, make_space, space_from_models
from .splitnet import splitnet
from .structure import Family, InputSpec, Outputs, Shapes
from .transformer import transformer

MODELS: dict[str, Family] = {
    "bottleneck": bottleneck,
    "convnet": convnet,
    "lenet": lenet,
    "lstm": lstm,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "preactresnet": preactresnet,
    "preresnet": preresnet,
    "splitnet": splitnet,
    "transformer": transformer,
}

__all__ = [
    "MODELS", "SPACES", "Cost", "Family", "InputSpec", "Model", "Outputs", "Scaler", "SearchSpace", "Shapes",
    "StepSeeds", "build_model", "chain_models", "compute_cost", "make_space", "space_from_models",
]  # fmt: skip

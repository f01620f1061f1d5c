"""What a model is; nothing here knows of federation."""

from .bottleneck import bottleneck
from .chain import chained
from .convnet import convnet
from .cost import Cost, cost
from .interface import Inputs, Outputs
from .layers import Scaler
from .lenet import lenet
from .lstm import lstm
from .mlp import mlp
from .mobilenet import SPACES, mobilenet
from .model import Family, Model, Shapes, StepSeeds, model
from .preactresnet import preactresnet
from .preresnet import preresnet
from .search_space import Space, space, space_of
from .splitnet import splitnet
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
    "MODELS",
    "SPACES",
    "Cost",
    "Family",
    "Inputs",
    "Model",
    "Outputs",
    "Scaler",
    "Shapes",
    "Space",
    "StepSeeds",
    "chained",
    "cost",
    "model",
    "space",
    "space_of",
]

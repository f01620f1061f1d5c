"""What a model is; nothing here knows of federation."""

from .bottleneck import bottleneck
from .chain import chained
from .convnet import convnet
from .costs import Cost, cost
from .elastic import Space, space, space_of
from .inputs import Inputs
from .layers import Scaler
from .lenet import lenet
from .lstm import lstm
from .mlp import mlp
from .mobilenet import SPACES, mobilenet
from .model import Draws, Family, Model, Shapes, model
from .outputs import Outputs
from .preactresnet import preactresnet
from .preresnet import preresnet
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
    "Draws",
    "Family",
    "Inputs",
    "Model",
    "Outputs",
    "Scaler",
    "Shapes",
    "Space",
    "chained",
    "cost",
    "model",
    "space",
    "space_of",
]

"""What a model is; nothing here knows of federation."""

from .bottleneck import bottleneck
from .chain import chained
from .convnet import convnet
from .costs import Cost, cost
from .elastic import Space, space, space_of
from .layers import Scaler
from .lenet import lenet
from .mlp import mlp
from .mobilenet import SPACES, mobilenet
from .model import Draws, Family, Model, Shapes, model
from .outputs import Outputs
from .preactresnet import preactresnet
from .preresnet import preresnet
from .splitnet import splitnet

MODELS: dict[str, Family] = {
    "bottleneck": bottleneck,
    "convnet": convnet,
    "lenet": lenet,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "preactresnet": preactresnet,
    "preresnet": preresnet,
    "splitnet": splitnet,
}

__all__ = [
    "MODELS",
    "SPACES",
    "Cost",
    "Draws",
    "Family",
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

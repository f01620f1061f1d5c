"""What a model is; nothing here knows of federation."""

from .convnet import convnet
from .costs import Cost, cost
from .elastic import Space, space, space_of
from .layers import Scaler
from .mobilenet import SPACES, mobilenet
from .model import Draws, Family, Model, Outputs, Shapes, model
from .preactresnet import preactresnet
from .preresnet import preresnet

MODELS: dict[str, Family] = {
    "convnet": convnet,
    "mobilenet": mobilenet,
    "preactresnet": preactresnet,
    "preresnet": preresnet,
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
    "cost",
    "model",
    "space",
    "space_of",
]

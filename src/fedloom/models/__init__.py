"""What a model is; nothing here knows of federation."""

from .convnet import convnet
from .layers import Scaler
from .model import Draws, Family, Model, Outputs, Shapes, model
from .preresnet import preresnet

MODELS: dict[str, Family] = {
    "convnet": convnet,
    "preresnet": preresnet,
}

__all__ = ["MODELS", "Draws", "Family", "Model", "Outputs", "Scaler", "Shapes", "model"]

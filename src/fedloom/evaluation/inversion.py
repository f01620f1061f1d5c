"""Feature inversion: how well inputs can be reconstructed from uploaded features, given the layers that made them.

Gradient descent on an input until its features match. Mahendran & Vedaldi, CVPR 2015.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Adam, Batch, Client, PaddedIndices, Step, fit
from ..data import Examples, Preparation
from ..models import Model, StepSeeds
from ..placement import ON_CPU, Compute, enter, leave
from ..tensors import Tensors

LEARNING_RATES = (0.1, 0.01, 0.001)  # one after the other


@dataclass(frozen=True)
class Inversion:
    psnr: float  # decibels, mean over the examples; above 30 a picture is easily recognized
    examples: int
    steps: int


def invert(
    extractor: Model, weights: Tensors, inputs: Tensor, span: Tensor, steps: int, compute: Compute = ON_CPU
) -> Inversion:
    """Reconstruct prepared inputs from their features; `span` is the difference of white and black in them."""
    block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    with compute.active():
        block, x = enter((block, inputs.unsqueeze(0)), compute.torch_device)
        guess = leave(_reconstruct(extractor, block, x, steps))
    return Inversion(psnr(guess[0], inputs, span), len(inputs), steps)


def _reconstruct(extractor: Model, block: Tensors, x: Tensor, steps: int) -> Tensor:
    """The inputs that gradient descent finds."""
    with torch.no_grad():
        features = extractor(block, x).logits

    def feature_distance(guess: Tensors, batch: Batch) -> Tensor:
        return (extractor(block, guess["x"]).logits - features).square().flatten(1).sum(1)

    guess: Tensors = {"x": torch.zeros_like(x)}
    for rate in LEARNING_RATES:
        client = _make_client(extractor, rate, steps // len(LEARNING_RATES), x.device)
        guess = fit(client, guess, feature_distance)
    return guess["x"]


def psnr(guess: Tensor, original: Tensor, span: Tensor) -> float:
    """Peak signal-to-noise ratio in decibels, the mean over examples."""
    errors = ((guess - original) / span).double().square().flatten(1).mean(1).clamp_min(1e-20)
    return float((-10 * torch.log10(errors)).mean())


def pixel_range(preparation: Preparation, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The difference of white and black pixels after preparation."""
    if dtype != torch.uint8:
        return torch.ones(())
    black, white = (torch.full((1, *shape), value, dtype=dtype) for value in (0, 255))
    return (preparation(white) - preparation(black))[0]


def describe_psnr(decibels: float) -> str:
    if math.isnan(decibels) or decibels < 15:
        return "hardly anything can be recognized"
    return "outlines can be recognized" if decibels < 25 else "the originals can be recognized"


def _make_client(model: Model, lr: float, steps: int, device: torch.device) -> Client:
    """A client with `steps` training steps and no data."""
    row = torch.zeros(1, 1, dtype=torch.int64)
    examples = Examples(model.zero_inputs(1), torch.zeros(1, dtype=torch.int64))
    plan = tuple(Step(row, torch.ones(1), {}, StepSeeds((0,))) for _ in range(steps))
    seen_labels = torch.ones(1, model.classes, dtype=torch.bool)
    no_tests = PaddedIndices(row, torch.zeros(1, 1, dtype=torch.bool))
    examples, no_tests, plan, seen_labels = enter((examples, no_tests, plan, seen_labels), device)
    return Client(model, Adam(lr), examples, examples, no_tests, Preparation(), plan, seen_labels, {})

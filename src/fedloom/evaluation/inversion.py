"""How much of an input its features give away: whoever has the part of the net that made them looks for an input that
gives the same. The better it finds the original, the less the features hide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..client import Adam, Batch, Client, PaddedIndices, Step, fit
from ..data import Examples, Preparation
from ..models import Model, StepSeeds
from ..tensors import Tensors

RATES = (0.1, 0.01, 0.001)  # of the search, one after the other


@dataclass(frozen=True)
class Inversion:
    psnr: float  # decibels, mean over the examples; above 30 a picture is easily recognized
    examples: int
    steps: int


def invert(part: Model, weights: Tensors, prepared: Tensor, span: Tensor, steps: int) -> Inversion:
    """`prepared` inputs, as the part gets them; `span` is how far apart black and white are there."""
    block = {name: weight.unsqueeze(0) for name, weight in weights.items()}
    x = prepared.unsqueeze(0)
    with torch.no_grad():
        features = part(block, x).logits

    def apart(guess: Tensors, batch: Batch) -> Tensor:
        return (part(block, guess["x"]).logits - features).square().flatten(1).sum(1)

    found: Tensors = {"x": torch.zeros_like(x)}
    for rate in RATES:
        found = fit(_searcher(part, rate, steps // len(RATES)), found, apart)
    return Inversion(psnr(found["x"][0], prepared, span), len(prepared), steps)


def psnr(guess: Tensor, original: Tensor, span: Tensor) -> float:
    """Peak signal to noise, the mean over examples."""
    errors = ((guess - original) / span).double().square().flatten(1).mean(1).clamp_min(1e-20)
    return float((-10 * torch.log10(errors)).mean())


def pixel_range(preparation: Preparation, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """How far apart the darkest and the lightest stored pixels are for a model."""
    if dtype != torch.uint8:
        return torch.ones(())
    black, white = (torch.full((1, *shape), value, dtype=dtype) for value in (0, 255))
    return (preparation(white) - preparation(black))[0]


def describe_psnr(decibels: float) -> str:
    """In words."""
    if math.isnan(decibels) or decibels < 15:
        return "hardly anything can be recognized"
    return "outlines can be recognized" if decibels < 25 else "the originals can be recognized"


def _searcher(part: Model, rate: float, steps: int) -> Client:
    """Somebody with nothing but the features: the plan's steps have no examples of their own."""
    row = torch.zeros(1, 1, dtype=torch.int64)
    nothing = Examples(part.zero_inputs(1), torch.zeros(1, dtype=torch.int64))
    plan = tuple(Step(row, torch.ones(1), {}, StepSeeds((0,))) for _ in range(steps))
    seen, none = torch.ones(1, part.classes, dtype=torch.bool), PaddedIndices(row, torch.zeros(1, 1, dtype=torch.bool))
    return Client(part, Adam(rate), nothing, nothing, none, Preparation(), plan, seen, {})

"""Predicting the next token: a net must not see it."""

from typing import Any

import pytest
import torch

import fedloom as fl
from fedloom.data import Dataset, Examples, Preparation
from fedloom.models import MODELS, build_model
from fedloom.testing import tiny_model


def text(count: int = 24) -> Dataset:
    """Sequences that count up: the next token is the last one plus 1."""
    x = (torch.arange(count).unsqueeze(1) + torch.arange(6)) % 7
    examples = Examples(x, (x + 1) % 7)
    return Dataset("counting", examples, examples, 7, Preparation(), tokens=7)


def simulate(**settings: Any) -> fl.Simulation:
    sizes = {"embedding": 8, "heads": 2, "hidden": 8, "layers": 1, "dropout": 0.0, **settings}
    tiers = fl.tiers("transformer", sizes, all={"share": 1.0})
    return fl.Simulation(dataset=text(), devices=2, tiers=tiers, method="fedavg", rounds=1)


def test_check_causal_transformer_sees_later_tokens_only_without_its_mask() -> None:
    with pytest.raises(ValueError, match="depends on later tokens"):
        tiny_model("transformer").check_causal()
    tiny_model("transformer", causal=True).check_causal()


def test_check_causal_net_without_attention_passes() -> None:
    net = build_model("alone", lambda *, tokens, classes: torch.nn.Embedding(tokens, classes), {}, (6,), 7, 7)
    net.check_causal()


def test_simulation_of_next_tokens_refuses_a_net_that_sees_them() -> None:
    assert text().task.kind == "causal_language_modeling"
    with pytest.raises(fl.RecipeError, match=r"MODEL_BUILD: transformer .* depends on later tokens"):
        list(simulate().rounds())


def test_simulation_of_next_tokens_trains_a_causal_transformer() -> None:
    (result,) = simulate(causal=True).rounds()
    assert result.metrics["all"]["perplexity"] > 1


def test_transformer_causal_has_the_weights_of_the_other() -> None:
    settings = {"embedding": 8, "heads": 2, "hidden": 8, "layers": 1}
    plain, causal = (
        build_model("transformer", MODELS["transformer"], {**settings, **more}, (6,), 7, 8)
        for more in ({}, {"causal": True})
    )
    assert dict(plain.shapes()) == dict(causal.shapes())

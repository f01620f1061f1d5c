"""Every module of the zoo: what it takes, and what is known about it."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from torch import nn

from fedloom.models import Model, build_model
from tests.zoo import hub, plain

CLASSES = 4
IMAGES, TOKENS, SERIES, SIGNALS = (1, 8, 8), (6,), (7, 3), (2, 16)
VOCABULARY = 11

Batching = Literal["fold", "vmap", "loop"]


@dataclass(frozen=True)
class Case:
    """A module of the zoo.

    Parameters
    ----------
    title : what the documentation calls it.
    input_shape : of one example.
    batching : how many devices run at once.
    reason : why they run one after the other; "" if they do not.
    settings : of the family.
    """

    title: str
    input_shape: tuple[int, ...]
    batching: Batching
    reason: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int | None:
        return VOCABULARY if self.input_shape == TOKENS else None

    @property
    def dataset(self) -> str:
        return {IMAGES: "zoo_images", TOKENS: "zoo_tokens", SERIES: "zoo_series", SIGNALS: "zoo_signals"}[
            self.input_shape
        ]


FAMILIES: dict[str, Callable[..., nn.Module]] = {**plain.MODELS, **hub.MODELS}

CASES = {
    "convnext": Case("ConvNeXt with stochastic depth", IMAGES, "vmap"),
    "vgg": Case("VGG with dropout", IMAGES, "fold"),
    "densenet": Case("DenseNet", IMAGES, "vmap"),
    "vit": Case("ViT with `nn.MultiheadAttention`", IMAGES, "vmap"),
    "text_encoder": Case("text encoder with separate q, k and v", TOKENS, "vmap"),
    "einsum_mixer": Case("mixer of plain parameters and einsum", IMAGES, "vmap"),
    "lstm_classifier": Case(
        "`nn.LSTM`", TOKENS, "loop", "lstm (LSTM) uses lstm, which torch cannot run for many devices at once"
    ),
    "gru_classifier": Case(
        "`nn.GRU`", SERIES, "loop", "gru (GRU) uses gru, which torch cannot run for many devices at once"
    ),
    "signal_cnn": Case("1-D CNN", SIGNALS, "fold"),
    "unet": Case("U-Net", IMAGES, "vmap"),
    "mlp_mixer": Case("MLP-Mixer", IMAGES, "vmap"),
    "lora_net": Case("LoRA written by hand", IMAGES, "vmap", settings={"rank": 4}),
    "hf_bert": Case("Hugging Face BERT", TOKENS, "vmap"),
    "hf_vit": Case("Hugging Face ViT", IMAGES, "vmap"),
    "hf_lora": Case("LoRA of PEFT on Hugging Face BERT", TOKENS, "vmap", settings={"rank": 4}),
}


def zoo_model(name: str, **changes: Any) -> Model:
    case = CASES[name]
    return build_model(name, FAMILIES[name], {**case.settings, **changes}, case.input_shape, CLASSES, case.tokens)


def names(*, quick: Collection[str] = plain.MODELS) -> list[Any]:
    """Every module; all but the quick ones are slow, and so are those of Hugging Face, whose import takes seconds."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in CASES]

"""Models of the library transformers with narrower tiers: their heads are recognized, and the slices proved."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from fedloom.footprints import find_slicing_problem, is_submodel
from fedloom.models import build_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENS, LENGTH, CLASSES = 20, 6, 3


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, size: int):
        super().__init__()
        self.body, self.classifier = body, nn.Linear(size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.body(x).last_hidden_state[:, 0])  # type: ignore[no-any-return]


def settings_of(kind: str, size: int) -> dict[str, Any]:
    """Of a tiny model with a fixed number of heads."""
    text = {"vocab_size": TOKENS}
    usual = {"hidden_size": size, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * size}
    special = {"bos_token_id": 0, "eos_token_id": 1}
    return {
        "Bert": {**text, **usual, "max_position_embeddings": 16},
        "DistilBert": {**text, "dim": size, "n_layers": 2, "n_heads": 2, "hidden_dim": 2 * size},
        "GPT2": {**text, **special, "n_embd": size, "n_layer": 2, "n_head": 2, "n_positions": 16},
        "Llama": {**text, **special, **usual, "num_attention_heads": 4, "num_key_value_heads": 2},
        "T5": {**text, "d_model": size, "d_kv": size // 2, "num_layers": 2, "num_heads": 2, "d_ff": 2 * size},
        "ViT": {**usual, "image_size": 8, "patch_size": 4, "num_channels": 1},
    }[kind]


def library_model(kind: str, size: int) -> nn.Module:
    library = pytest.importorskip("transformers")
    config = getattr(library, f"{kind}Config")(**settings_of(kind, size))
    body: Callable[..., nn.Module] = getattr(library, "T5EncoderModel" if kind == "T5" else f"{kind}Model")
    return Classifier(body(config), size)


@pytest.mark.parametrize("kind", ["Bert", "DistilBert", "GPT2", "Llama", "T5", "ViT"])
def test_find_slicing_problem_library_model_is_accepted(kind: str) -> None:
    shape, tokens = ((1, 8, 8), None) if kind == "ViT" else ((LENGTH,), TOKENS)
    large, small = (
        build_model(kind, library_model, {"kind": kind, "size": size}, shape, CLASSES, tokens) for size in (16, 8)
    )
    assert is_submodel(small.shapes(), large.shapes())
    stacked = {name for name, axes in small.shapes().layouts.items() for axis in axes if axis < 2}
    assert len(stacked) >= 2 * 2  # in each of two layers, at least the packed projections and the output
    assert find_slicing_problem(small, large) is None

"""Models of the Hugging Face libraries, from tiny random configurations: nothing is downloaded.

The file can be given to a command with `--with`. It imports the libraries when a model is built, which takes seconds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Shape = tuple[int, ...]


@contextmanager
def quiet_import() -> Iterator[None]:
    """The libraries import modules that announce their own deprecation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def hf_bert(
    *, input_shape: Shape, classes: int, tokens: int, width: float = 1.0, head_size: int | None = None, inner: int = 32
) -> nn.Module:
    """Of two heads whatever the width, or of as many as heads of a given size make."""
    with quiet_import():
        from transformers import BertConfig, BertForSequenceClassification
    hidden = int(16 * width)
    config = BertConfig(
        vocab_size=tokens, hidden_size=hidden, num_hidden_layers=2, intermediate_size=inner, num_labels=classes,
        num_attention_heads=2 if head_size is None else hidden // head_size, max_position_embeddings=input_shape[0],
    )  # fmt: skip
    return BertForSequenceClassification(config)


def hf_vit(*, input_shape: Shape, classes: int, width: float = 1.0, head_size: int | None = None) -> nn.Module:
    with quiet_import():
        from transformers import ViTConfig, ViTForImageClassification
    hidden = int(16 * width)
    config = ViTConfig(
        image_size=input_shape[1], patch_size=4, num_channels=input_shape[0], hidden_size=hidden, num_hidden_layers=2,
        intermediate_size=2 * hidden, num_attention_heads=2 if head_size is None else hidden // head_size,
        num_labels=classes,
    )  # fmt: skip
    return ViTForImageClassification(config)


def hf_lora(*, input_shape: Shape, classes: int, tokens: int, rank: int = 16, alpha: float | None = None) -> nn.Module:
    """Adapters on the queries and values of BERT; without `alpha`, of the same strength whatever the rank."""
    with quiet_import():
        from peft import LoraConfig, TaskType, get_peft_model
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=rank if alpha is None else alpha, lora_dropout=0.1,
        target_modules=["query", "value"],
    )  # fmt: skip
    return get_peft_model(hf_bert(input_shape=input_shape, classes=classes, tokens=tokens), config)


MODELS: dict[str, Any] = {"hf_bert": hf_bert, "hf_vit": hf_vit, "hf_lora": hf_lora}

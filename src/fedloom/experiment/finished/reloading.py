"""An exported file of weights as a module again: the card beside it says which."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...data import Preparation
from ...export import FORMATS, Plain, preparing, read_card, unfilled
from ...models import model
from ..recipes.tables import Tables
from .trained import wrong


def load_exported(folder: Path, tables: Tables) -> nn.Module:
    """A module from a folder that was exported to safetensors."""
    if not (folder / "card.json").is_file():
        raise wrong(folder, "EXPORT_FOLDER", "this is no exported model", "fedloom export RUN --to safetensors")
    card = read_card(folder)
    if card["format"] != "safetensors":
        raise wrong(folder, "EXPORT_FORMAT", f"this is {card['format']}, which needs no fedloom", "see its card.md")
    answer = FORMATS["safetensors"].open(folder / card["file"], lambda: rebuilt(card, tables))
    assert isinstance(answer, nn.Module)
    return answer


def rebuilt(card: Mapping[str, Any], tables: Tables) -> Plain:
    """The module of a card, without weights."""
    said, family = card["input"], card["family"]
    if family not in tables.models:
        raise wrong(Path(card["file"]), "MODEL_NAME", f"there is no model family {family!r}", "name it in models={…}")
    settings = {name: _tuples(value) for name, value in card["settings"].items()}
    net = model(
        family, tables.models[family], settings, tuple(said["model_shape"]), card["output"]["shape"][-1], said["tokens"]
    )
    steps = {name: _tuples(value) for name, value in said["preparation"].items()}
    stored = torch.zeros(1, *said["stored_shape"], dtype=getattr(torch, said["stored_dtype"]))
    return unfilled(net, preparing(Preparation(**steps), stored) if said["kind"] == "stored" else None)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
